// What an error number means, in words; driver and runtime share the numbers from 1 on.
#pragma once

namespace cudasim {

// `name` is used where no better words are known: "cudaErrorNotReady" gives itself.
const char *error_text(int number, const char *name);

}  // namespace cudasim
