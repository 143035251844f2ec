// Options of the calls that compile: cuModuleLoadDataEx, cuLibraryLoadData, cuLinkCreate.
#pragma once

#include "driver/driver.h"
#include "driver/fatbin.h"

namespace cudasim::driver {

// The options of a call, and its output buffers. The option arrays must stay valid, because outputs are written to them: as
// in a driver, the value of an option is replaced by its result.
class JitOptions {
  public:
    JitOptions() = default;
    JitOptions(unsigned count, CUjit_option *options, void **values);

    CUresult status() const { return status_; }  // whether the options are valid
    unsigned max_registers() const { return max_registers_; }
    bool verbose() const { return verbose_; }

    // Writes both logs, their sizes, and the wall time since construction.
    void report(const std::string &error, const std::string &info) const;

  private:
    struct Log {
        char *text = nullptr;
        size_t size = 0;
        void **written = nullptr;
        void write(const std::string &from) const;
    };
    CUresult status_ = CUDA_SUCCESS;
    unsigned max_registers_ = 0;
    bool verbose_ = false;
    Log error_, info_;
    void **wall_time_ = nullptr;  // ms, a float in the low bits
    uint64_t begin_ns_ = 0;
};

// Returns a driver's error log for PTX that does not compile. `problem` is the translator's message.
std::string compiler_log(const std::string &problem, const std::string &input = "");
// Returns a driver's info log for CU_JIT_LOG_VERBOSE.
std::string verbose_log(const Image &image);

// Copies the PTX for this device from an image, as one text. Writes the logs if it fails.
CUresult select_ptx(const void *image, const JitOptions &jit, ChosenPtx &chosen);
// Translates PTX, and writes the logs.
CUresult translate_ptx(const std::string &text, const JitOptions &jit,
                       std::shared_ptr<const Image> &translated);

// Reads an image file, and appends zeros, because the parsers may read a little past its end. Fails for a truncated cubin.
CUresult read_image_file(const char *path, std::string &content);

// Hostile mode only: locks a context for a load and waits for its kernels. Fails during a stream capture.
CUresult prepare_load(const std::shared_ptr<Context> &context, std::optional<ExclusiveContext> &exclusive);
// The same for a load that does not wait with lazy loading: the first use of each kernel waits then.
CUresult prepare_lazy_load(const std::shared_ptr<Context> &context,
                           std::optional<ExclusiveContext> &exclusive);

}  // namespace cudasim::driver
