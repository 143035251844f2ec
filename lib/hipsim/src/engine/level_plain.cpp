// The vector instructions, compiled for the vectors that every x86-64 CPU has; on other CPUs, without vectors.

#include "engine/level.h"

namespace hipsim::plain {
#include "engine/level.inl"
}  // namespace hipsim::plain
