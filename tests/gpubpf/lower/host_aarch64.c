// Runs a host program's code for aarch64, with context fields and the address of a map as its values. Prints the map's first words.
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>

int main(int argc, char **argv) {
  uint8_t *code = mmap(NULL, 65536, PROT_READ | PROT_WRITE | PROT_EXEC, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  FILE *file = fopen(argv[1], "rb");
  if (!file || !fread(code, 1, 65536, file)) return 1;
  __builtin___clear_cache((char *)code, (char *)code + 65536);
  static uint64_t map[8];
  uint64_t values[16];
  for (int i = 2; i < argc; ++i) values[i - 2] = argv[i][0] == 'm' ? (uint64_t)map : strtoull(argv[i], NULL, 0);
  ((void (*)(const uint64_t *))code)(values);
  for (int i = 0; i < 8; ++i) printf("%llu\n", (unsigned long long)map[i]);
}
