// Descriptions of errors. The driver and the runtime share their numbers.
#pragma once

namespace cudasim {

// Returns the description of an error, or `name` if there is none.
const char *error_text(int number, const char *name);

}  // namespace cudasim
