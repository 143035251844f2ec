#include "engine/engine.h"

namespace hipsim {

Result run(const Launch &launch, Memory &, const Target &, Services &) {
    Result result;
    result.fault.kind = Fault::illegal_instruction;
    result.fault.address = launch.kernel_object;
    result.fault.text = "the engine runs no instruction yet";
    return result;
}

}  // namespace hipsim
