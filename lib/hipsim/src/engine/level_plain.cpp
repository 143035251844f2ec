// The vector instructions, compiled for the vectors that every x86-64 has (or none, on other CPUs).

#include "engine/level.h"

namespace hipsim::plain {
#include "engine/level.inl"
}  // namespace hipsim::plain
