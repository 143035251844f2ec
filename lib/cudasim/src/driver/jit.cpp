// Options and logs of the calls that compile, and the way from an image to its translation.
#include "driver/jit.h"

#include <stdio.h>
#include <string.h>

#include <algorithm>

#include "driver/cubin.h"
#include "driver/fatbin.h"

namespace cudasim::driver {

JitOptions::JitOptions(unsigned count, CUjit_option *options, void **values) : begin_ns_(now_ns()) {
    if (count != 0 && (options == nullptr || values == nullptr)) {
        status_ = CUDA_ERROR_INVALID_VALUE;
        return;
    }
    for (unsigned i = 0; i < count; i++) {
        const auto number = static_cast<unsigned>(reinterpret_cast<uintptr_t>(values[i]));
        switch (options[i]) {
            case CU_JIT_MAX_REGISTERS: max_registers_ = number; break;
            case CU_JIT_WALL_TIME: wall_time_ = &values[i]; break;
            case CU_JIT_LOG_VERBOSE: verbose_ = number != 0; break;
            case CU_JIT_INFO_LOG_BUFFER: info_.text = static_cast<char *>(values[i]); break;
            case CU_JIT_INFO_LOG_BUFFER_SIZE_BYTES:
                info_.size = number;
                info_.written = &values[i];
                break;
            case CU_JIT_ERROR_LOG_BUFFER: error_.text = static_cast<char *>(values[i]); break;
            case CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES:
                error_.size = number;
                error_.written = &values[i];
                break;
            case CU_JIT_OPTIMIZATION_LEVEL:
                if (number > 4) status_ = CUDA_ERROR_INVALID_VALUE;
                break;
            default: break;
        }
    }
}

void JitOptions::Log::write(const std::string &from) const {
    size_t count = 0;
    if (text != nullptr && size != 0) {
        count = std::min(from.size(), size - 1);
        memcpy(text, from.data(), count);
        text[count] = '\0';
    }
    if (written != nullptr) *written = reinterpret_cast<void *>(count);
}

void JitOptions::report(const std::string &error, const std::string &info) const {
    error_.write(error);
    info_.write(info);
    if (wall_time_ == nullptr) return;
    const float ms = static_cast<float>(now_ns() - begin_ns_) * 1e-6f;
    *wall_time_ = nullptr;
    memcpy(wall_time_, &ms, sizeof ms);
}

std::string compiler_log(const std::string &problem, const std::string &input) {
    const std::string marker = "PTX line ";
    const std::string name = input.empty() ? "" : input + ", ";
    std::string log;
    for (size_t at = 0; at < problem.size();) {
        const size_t end = std::min(problem.find('\n', at), problem.size());
        std::string line = problem.substr(at, end - at);
        at = end + 1;
        if (line.empty()) continue;
        const size_t colon = line.find(": ");
        if (line.compare(0, marker.size(), marker) == 0 && colon != std::string::npos)
            line = "ptxas application ptx input, line " + line.substr(marker.size(), colon - marker.size()) +
                   "; error   : " + line.substr(colon + 2);
        else line = "error   : " + name + line;
        log += line + "\n";
    }
    return log + "ptxas fatal   : Ptx assembly aborted due to errors";
}

std::string verbose_log(const Image &image) {
    size_t global = 0, constant = 0;
    for (const Variable &variable : image.variables())
        (variable.space == Space::constant ? constant : global) += variable.size;
    std::string log =
        "info    : " + std::to_string(global) + " bytes gmem, " + std::to_string(constant) + " bytes cmem[3]";
    for (const cudasim::Kernel &kernel : image.kernels())
        log += "\ninfo    : Function properties for '" + kernel.name + "':\ninfo    : used " +
               std::to_string(kernel.registers) + " registers, " + std::to_string(kernel.local) + " stack, " +
               std::to_string(kernel.static_shared) + " bytes smem, " +
               std::to_string(kernel.parameter_bytes) + " bytes cmem[0]";
    return log;
}

CUresult select_ptx(const void *image, const JitOptions &jit, ChosenPtx &chosen) {
    std::string problem;
    if (int status = choose_ptx(image, static_cast<unsigned>(config().compute_capability()), config().hostile,
                                chosen, problem)) {
        log_line("%s", problem.c_str());
        jit.report(problem, "");
        return static_cast<CUresult>(status);
    }
    if (!chosen.more_texts.empty()) {
        std::vector<LinkInput> inputs{{"text 1", std::move(chosen.text)}};
        for (std::string &other : chosen.more_texts)
            inputs.push_back({"text " + std::to_string(inputs.size() + 1), std::move(other)});
        TranslateError error;
        // Parts without PTX may define the missing names. Only kernels that use them are refused.
        if (!link_ptx(inputs, false, chosen.text, error)) {
            log_line("%s", error.log.c_str());
            jit.report(compiler_log(error.log), "");
            return CUDA_ERROR_NO_BINARY_FOR_GPU;
        }
    }
    return CUDA_SUCCESS;
}

CUresult translate_ptx(const std::string &text, const JitOptions &jit,
                       std::shared_ptr<const Image> &translated) {
    TranslateError error;
    translated = translate(text, error, config().virtual_clock);
    if (!translated) {
        jit.report(compiler_log(error.log), "");
        log_line("%s", error.log.c_str());
        return static_cast<CUresult>(error.code != 0 ? error.code : CUDA_ERROR_INVALID_PTX);
    }
    if (config().hostile && translated->target > config().compute_capability()) {
        const std::string problem = "the PTX's .target is newer than this device";
        log_line("%s", problem.c_str());
        jit.report(compiler_log(problem), "");
        return CUDA_ERROR_INVALID_PTX;
    }
    jit.report("", jit.verbose() ? verbose_log(*translated) : "");
    return CUDA_SUCCESS;
}

CUresult read_image_file(const char *path, std::string &content) {
    FILE *file = fopen(path, "rbe");
    if (file == nullptr) return CUDA_ERROR_FILE_NOT_FOUND;
    char buffer[65536];
    for (size_t got; (got = fread(buffer, 1, sizeof buffer, file)) != 0;) content.append(buffer, got);
    const bool good = !ferror(file);  // fopen succeeds for a directory, fread fails
    fclose(file);
    const size_t size = content.size();
    content.append(64, '\0');
    if (good && image_kind(content.data()) == ImageKind::elf && cubin_size(content.data(), size) == 0)
        return CUDA_ERROR_NO_BINARY_FOR_GPU;
    return good ? CUDA_SUCCESS : CUDA_ERROR_FILE_NOT_FOUND;
}

CUresult prepare_load(const std::shared_ptr<Context> &context, std::optional<ExclusiveContext> &exclusive) {
    if (!config().hostile) return CUDA_SUCCESS;
    if (CUresult status = check_unsafe_call()) return status;
    exclusive.emplace(context);
    return CUDA_SUCCESS;
}

CUresult prepare_lazy_load(const std::shared_ptr<Context> &context,
                           std::optional<ExclusiveContext> &exclusive) {
    return config().lazy_loading_waits ? check_unsafe_call() : prepare_load(context, exclusive);
}

}  // namespace cudasim::driver
