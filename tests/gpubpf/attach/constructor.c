// A library that comes to cuInit while it is loaded.
#include <cuda.h>
#include <stdio.h>

__attribute__((constructor)) static void begin(void) {
  cuInit(0);
  dprintf(1, "loaded\n");
}
