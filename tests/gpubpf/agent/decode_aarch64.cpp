// Reads A64 instructions, 4 bytes each. Prints what the agent's decoder finds, one line each: the kind, and the distance of a relative
// operand.
#include <cstdint>
#include <cstdio>

#include "machine/aarch64/instruction.h"

int main() {
  static const char *const kinds[] = {"plain", "call", "jump", "branch", "end", "address", "load", "vector", "prefetch", "svc", "break", "unknown"};
  for (uint32_t code; fread(&code, sizeof code, 1, stdin) == 1;) {
    const gpubpf::machine::Instruction found = gpubpf::machine::decode(code);
    if (found.relative) printf("%s %lld\n", kinds[found.kind], static_cast<long long>(found.distance));
    else printf("%s\n", kinds[found.kind]);
  }
}
