// Descriptions of errors. The driver and the runtime share their numbers.
#pragma once

namespace cudasim {

// Returns the description of an error. An error without a description gets its `name`.
const char *error_text(int number, const char *name);
// Prints that a function or a feature is not supported, once for each. Returns the error.
int unsupported(const char *what);

}  // namespace cudasim
