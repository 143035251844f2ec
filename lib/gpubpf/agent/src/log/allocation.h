// Which allocation an address belongs to, and for how long (docs/memory.md, "Allocations and epochs").
#pragma once

#include <cstdint>
#include <string>

#include "state.h"

namespace gpubpf {

extern const Lifetime allocation_lifetime;

// Returns the number of times that addresses were reused. It increases when an allocation covers memory that
// was freed since the last increase.
uint64_t allocation_epoch();

// The driver allocated [base, base + bytes). Returns the first epoch in which that holds. May throw, like all
// functions below.
uint64_t allocated(uint64_t base, uint64_t bytes, const Context *context);

// Allocations made before the agent was attached are found through the addresses in launches. The first
// function tells whether `address` is in a known allocation. The second adds the allocation that the driver
// reports for an address.
bool allocation_known(uint64_t address);
void allocation_found(uint64_t base, uint64_t bytes, const Context *context);

// For use around a driver call that frees the allocation at `base`, or, if `bytes` is not 0, all allocations
// that begin in that range. The record is taken before the call: another thread may get the same address
// before the call returns.
struct Freeing {
    uint64_t base = 0, bytes = 0;
    uint64_t serial = 0;  // of the allocation at `base`; 0: none is known
    uint64_t epoch = 0;   // the last epoch in which it exists
};
Freeing freeing(uint64_t base, uint64_t bytes);
void freed(const Freeing &what);  // the driver's call succeeded

// A context ends, and all allocations in it.
void freed_with(const Context *context);

// A variable of `module` is at `base` in the context. It is an allocation that ends with the module.
void variable_found(Module *module, const Context *context, const std::string &name, uint64_t base,
                    uint64_t bytes);
void variables_gone(Module *module, const char *call);  // before the driver unloads the module

}  // namespace gpubpf
