// Which allocation an address means, and until when (docs/memory.md, "Allocations and epochs").
#pragma once

#include <cstdint>
#include <string>

#include "state.h"

namespace gpubpf {

extern const Lifetime allocation_lifetime;

// How often addresses had come to mean another allocation. It is counted on when one is allocated that was freed since the last time.
uint64_t allocation_epoch();

// The driver allocated [base, base + bytes). Gives the epoch from which that holds. (May throw, as all below.)
uint64_t allocated(uint64_t base, uint64_t bytes, const Context *context);

// What a program allocated before the agent came is found by its addresses, in launches: whether `address` lies in an allocation that is known;
// and the allocation that the driver says it lies in.
bool allocation_known(uint64_t address);
void allocation_found(uint64_t base, uint64_t bytes, const Context *context);

// Around the driver's call that frees what begins at `base`, or with `bytes` all that begins in that range: another thread may be given
// the address before this one comes back from the call.
struct Freeing {
    uint64_t base = 0, bytes = 0;
    uint64_t serial = 0;  // of the allocation at `base`; 0: none is known
    uint64_t epoch = 0;   // the last in which it is there
};
Freeing freeing(uint64_t base, uint64_t bytes);
void freed(const Freeing &what);  // the driver did

// A context goes away, and with it all that was allocated there.
void freed_with(const Context *context);

// A variable of `module` is at `base` in the context: an allocation that ends with the module.
void variable_found(Module *module, const Context *context, const std::string &name, uint64_t base,
                    uint64_t bytes);
void variables_gone(Module *module, const char *call);  // before the driver unloads it

}  // namespace gpubpf
