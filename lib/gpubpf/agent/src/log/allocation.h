// Which allocation an address belongs to, and for how long (docs/memory.md, "Allocations and epochs").
#pragma once

#include <cstdint>
#include <string>

#include "lifetime.h"

namespace gpubpf {

extern const Lifetime allocation_lifetime;

// Returns the number of times that addresses were reused. It increases when an allocation covers memory that
// was freed since the last increase.
uint64_t allocation_epoch();

// Below, `context` is the serial number of a context; in the agent for AMD, the number of a GPU.
constexpr uint32_t kNoContext = UINT32_MAX;

// The driver allocated [base, base + bytes). Returns the first epoch in which that is true. May throw, like
// all functions below.
uint64_t allocated(uint64_t base, uint64_t bytes, uint32_t context);
// Logs an allocation, or the end of one.
void log_allocation(uint32_t context, const char *call, uint64_t base, uint64_t bytes, uint64_t epoch,
                    uint32_t stack, uint16_t flags = 0);

// Logs allocations made before the agent was attached, when a launch's parameters contain an address in them. `find` asks the driver
// for the allocation at an address, and returns false if there is none.
using FindAllocation = bool (*)(uint64_t address, uint64_t &base, uint64_t &bytes);
void log_allocations_before(const void *parameters, size_t size, uint32_t context, FindAllocation find);

// For use around a driver call that frees the allocation at `base` or, if `bytes` is not 0, all allocations
// that begin in that range. The record is taken before the call, because another thread may get the same
// address before the call returns.
struct Freeing {
    uint64_t base = 0, bytes = 0;
    uint64_t serial = 0;  // serial of the allocation at `base`; 0: none is known
    uint64_t epoch = 0;   // the last epoch in which it exists
};
Freeing freeing(uint64_t base, uint64_t bytes);
void freed(const Freeing &what);  // the driver's call succeeded

// A context ends, and all allocations in it.
void freed_with(uint32_t context);

// A variable of a module is at `base`. It counts as an allocation that ends with the module. Returns false if it is not logged
// because there are too many.
bool variable_found(uint32_t context, const std::string &name, uint64_t base, uint64_t bytes);
// Call this before the driver unloads the variable's module by `call`; null: its context has already ended.
void variable_gone(uint32_t context, const char *call, uint64_t base);

}  // namespace gpubpf
