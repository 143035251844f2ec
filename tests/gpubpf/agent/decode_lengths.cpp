// Reads instructions, one a line in hexadecimal, and prints the length that the agent's decoder gives for each.
#include <cstdint>
#include <cstdio>
#include <cstring>

#include "../../../lib/gpubpf/agent/src/patch.h"

int main() {
  char line[256];
  while (fgets(line, sizeof line, stdin)) {
    uint8_t code[32];
    memset(code, 0x90, sizeof code);
    size_t n = 0;
    unsigned byte;
    for (const char *p = line; n < 16 && sscanf(p, "%2x", &byte) == 1; p += 2) code[n++] = static_cast<uint8_t>(byte);
    printf("%zu\n", gpubpf::decode(code).length);
  }
}
