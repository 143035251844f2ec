// cuLink*: links several images into one that can be loaded.
//
// As in a driver, the result is a cubin, here with its PTX inside (cubin.h). PTX is checked when it is added. Symbols that are
// undefined or defined twice are reported by cuLinkComplete. Logs go to the buffers of cuLinkCreate.
#include <string.h>

#include "driver/cubin.h"
#include "driver/jit.h"

namespace cudasim::driver {
namespace {

struct Link {
    std::mutex mutex;
    JitOptions jit;
    std::vector<LinkInput> inputs;
    std::unique_ptr<std::string>
        image;  // the result of cuLinkComplete; valid until cuLinkDestroy or the next cuLinkComplete
    ~Link() {
        // A program that uses the image after cuLinkDestroy must fail.
        if (image && config().hostile) memset(image->data(), 0xa5, image->size());
    }
};

Handles<Link> &links() {
    static Handles<Link> *const instance = new Handles<Link>();
    return *instance;
}

CUresult report_failure(const Link &link, const std::string &problem, CUresult status,
                        const std::string &input = "") {
    log_line("%s", problem.c_str());
    link.jit.report(status == CUDA_ERROR_INVALID_PTX ? compiler_log(problem, input) : "error   : " + problem,
                    "");
    return status;
}

// Whether an input is libcudadevrt.a: NVIDIA's code for launches from kernels, which this device has itself.
bool is_device_runtime(CUjitInputType type, const void *data, size_t size) {
    constexpr char kArchive[] = "!<arch>\n", kMember[] = "cuda_device_runtime";
    return type == CU_JIT_INPUT_LIBRARY && size >= sizeof kArchive &&
           memcmp(data, kArchive, strlen(kArchive)) == 0 &&
           memmem(data, size, kMember, strlen(kMember)) != nullptr;
}

// Finds the PTX of an input that is a cubin or a fat binary.
CUresult select_input_ptx(Link &link, CUjitInputType type, const void *data, std::string &text) {
    if (type != CU_JIT_INPUT_CUBIN && type != CU_JIT_INPUT_FATBINARY)
        return report_failure(
            link,
            "the embedded device links PTX, and fat binaries and cubins that contain PTX, but no objects, "
            "libraries or LTO-IR",
            CUDA_ERROR_NO_BINARY_FOR_GPU);
    ChosenPtx chosen;
    const CUresult status = select_ptx(data, link.jit, chosen);
    text = std::move(chosen.text);
    return status;
}

}  // namespace
}  // namespace cudasim::driver

using namespace cudasim;
using namespace cudasim::driver;

CUresult cuLinkCreate(unsigned int count, CUjit_option *options, void **values, CUlinkState *handle) {
    std::shared_ptr<Context> context;
    if (CUresult status = current_context(context)) return status;
    if (handle == nullptr) return CUDA_ERROR_INVALID_VALUE;
    auto link = std::make_shared<Link>();
    link->jit = JitOptions(count, options, values);
    if (CUresult status = link->jit.status()) return status;
    *handle = static_cast<CUlinkState>(links().add(link));
    return CUDA_SUCCESS;
}

CUresult cuLinkAddData(CUlinkState handle, CUjitInputType type, void *data, size_t size, const char *name,
                       unsigned int count, CUjit_option *options, void **values) {
    if (CUresult status = check_initialized()) return status;
    std::shared_ptr<Link> link = links().get(handle);
    if (!link) return CUDA_ERROR_INVALID_HANDLE;
    if (data == nullptr || size == 0 || type >= CU_JIT_NUM_INPUT_TYPES) return CUDA_ERROR_INVALID_VALUE;
    if (CUresult status = JitOptions(count, options, values).status()) return status;
    std::lock_guard lock(link->mutex);
    if (link->image) return CUDA_ERROR_INVALID_VALUE;  // completed
    if (is_device_runtime(type, data, size)) return CUDA_SUCCESS;
    LinkInput input;
    input.name = name != nullptr && *name != '\0' ? name : "input " + std::to_string(link->inputs.size() + 1);
    if (type == CU_JIT_INPUT_PTX) {
        const char *text = static_cast<const char *>(data);
        input.text.assign(text, strnlen(text, size));
    } else if (CUresult status = select_input_ptx(*link, type, data, input.text)) {
        return status;
    }
    TranslateError error;
    std::string checked;
    if (!link_ptx({input}, false, checked, error))
        return report_failure(*link, error.log, static_cast<CUresult>(error.code), input.name);
    link->inputs.push_back(std::move(input));
    return CUDA_SUCCESS;
}

CUresult cuLinkAddFile(CUlinkState handle, CUjitInputType type, const char *path, unsigned int count,
                       CUjit_option *options, void **values) {
    if (path == nullptr) return CUDA_ERROR_INVALID_VALUE;
    std::string content;
    if (CUresult status = read_image_file(path, content)) return status;
    return cuLinkAddData(handle, type, content.data(), content.size(), path, count, options, values);
}

CUresult cuLinkComplete(CUlinkState handle, void **image, size_t *size) {
    std::shared_ptr<Context> context;
    if (CUresult status = current_context(context)) return status;
    std::shared_ptr<Link> link = links().get(handle);
    if (!link) return CUDA_ERROR_INVALID_HANDLE;
    if (image == nullptr) return CUDA_ERROR_INVALID_VALUE;
    std::optional<ExclusiveContext> exclusive;
    if (CUresult status = prepare_load(context, exclusive)) return status;
    std::lock_guard lock(link->mutex);
    if (link->inputs.empty())
        return report_failure(*link, "nothing was added to the link", CUDA_ERROR_INVALID_VALUE);
    TranslateError error;
    std::string text;
    if (!link_ptx(link->inputs, true, text, error))
        return report_failure(*link, error.log, static_cast<CUresult>(error.code));
    std::shared_ptr<const Image> translated;
    if (CUresult status = translate_ptx(text, link->jit, translated)) return status;
    std::vector<std::string> kernels;
    for (const cudasim::Kernel &kernel : translated->kernels()) kernels.push_back(kernel.name);
    link->image = std::make_unique<std::string>(
        make_cubin(text, kernels, static_cast<unsigned>(config().compute_capability())));
    *image = link->image->data();
    if (size != nullptr) *size = link->image->size();
    return CUDA_SUCCESS;
}

CUresult cuLinkDestroy(CUlinkState handle) {
    if (CUresult status = check_initialized()) return status;
    return links().remove(handle) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}
