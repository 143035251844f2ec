#include "driver/fault.h"

#include "attachment.h"
#include "driver/driver.h"

namespace gpubpf {

bool is_sticky(CUresult result) {
    switch (result) {
        case CUDA_ERROR_ECC_UNCORRECTABLE:
        case CUDA_ERROR_ILLEGAL_ADDRESS:
        case CUDA_ERROR_LAUNCH_TIMEOUT:
        case CUDA_ERROR_ASSERT:
        case CUDA_ERROR_HARDWARE_STACK_ERROR:
        case CUDA_ERROR_ILLEGAL_INSTRUCTION:
        case CUDA_ERROR_MISALIGNED_ADDRESS:
        case CUDA_ERROR_INVALID_ADDRESS_SPACE:
        case CUDA_ERROR_INVALID_PC:
        case CUDA_ERROR_LAUNCH_FAILED:
        case CUDA_ERROR_TENSOR_MEMORY_LEAK: return true;
        default: return false;
    }
}

// Returns whether a kernel failed in one of the tool's patches. A GPU's driver does not say where a kernel fails.
static PatchFailed in_own_patch(Context &context, bool known) {
    Patches &p = context.patches;
    std::lock_guard<std::mutex> hold(p.lock);
    if (!p.usable) return PatchFailed::No;
    if (!known) return PatchFailed::Perhaps;
    uint64_t pc = 0;
    if (!driver.cudasim_fault_in_patch || driver.cudasim_fault_in_patch(context.handle, &pc) != CUDA_SUCCESS)
        return PatchFailed::No;
    for (const auto &[first, size] : p.code)
        if (pc - first < size) return PatchFailed::Yes;
    return PatchFailed::No;
}

void tell_fault(Context &context) {
    cudasim_fault_report report;
    const bool known = driver.cudasim_fault && driver.cudasim_fault(context.handle, &report) == CUDA_SUCCESS;
    const CUresult error = known ? static_cast<CUresult>(report.error) : driver.cuStreamQuery(context.stream);
    if (!is_sticky(error) || context.told_fault.exchange(true)) return;
    message::KernelFailed told{static_cast<uint32_t>(context.device),
                               static_cast<uint32_t>(error),
                               in_own_patch(context, known),
                               {}};
    const auto &[bx, by, bz] = report.block;
    const auto &[x, y, z] = report.thread;
    if (known)
        told.place = {report.kernel, report.file, report.line, {bx, by, bz}, {x, y, z}, report.address};
    tell_tool(told);
}

}  // namespace gpubpf
