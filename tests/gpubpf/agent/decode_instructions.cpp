// Reads instructions, one in each line in hexadecimal. Prints what the agent's decoder finds: length, kind, and whether an operand is
// relative to rip.
#include <cstdint>
#include <cstdio>
#include <cstring>

#include "../../../lib/gpubpf/agent/src/machine/x86_64/instruction.h"

int main() {
  static const char *const kinds[] = {"plain", "call", "jump", "branch", "end", "immovable"};
  char line[256];
  while (fgets(line, sizeof line, stdin)) {
    uint8_t code[32];
    memset(code, 0x90, sizeof code);
    size_t n = 0;
    unsigned byte;
    for (const char *p = line; n < 16 && sscanf(p, "%2x", &byte) == 1; p += 2) code[n++] = static_cast<uint8_t>(byte);
    const gpubpf::machine::Instruction found = gpubpf::machine::decode(code);
    // A distance is the last operand.
    if (found.distance_size && found.distance_at + found.distance_size != found.length) return 1;
    const char *operand = found.distance_size ? "relative" : found.displacement_at ? "rip" : "-";
    if (found.length) printf("%zu %s %s\n", found.length, kinds[found.kind], operand);
    else printf("unknown\n");
  }
}
