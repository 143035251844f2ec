// The former name of lifetime.h, for patch.cpp.
#pragma once

#include "lifetime.h"

namespace gpubpf {

template <class T>
using Lasting = NeverDestroyed<T>;

}  // namespace gpubpf
