// Headers that the vector instructions need: included before a level chooses what the CPU has.

#pragma once

#include "engine/half.h"
#include "engine/registry.h"
#include "engine/transcendental.h"

#include <bit>
#include <cfenv>
#include <cmath>
#include <limits>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>

#ifdef __SSE2__
#include <immintrin.h>
#endif
