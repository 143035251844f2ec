// When the GPU did what no probe times, from CUPTI's activity records: an alternative to timing events (stamp.h), where the user asked
// for it. CUPTI's library is NVIDIA's; what of its interface is used here is declared in cupti.cpp.
#pragma once

#include <cstdint>
#include <string>

#include "log.h"

namespace gpubpf {

// Loads the first that can be of the libraries named (with colons between them), and has it record kernels, copies and memsets. "" when
// it does, else why not. Inside cuInit.
std::string start_cupti(const std::string &libraries);
bool cupti_records();
void end_cupti_records();  // at the end of an attachment

// Around the driver's call of an operation, in its thread. A span is logged once CUPTI gives its times.
void begin_cupti(const Record &operation) noexcept;
void end_cupti() noexcept;

void collect_cupti() noexcept;  // logs what is over

}  // namespace gpubpf
