// Options of the calls that compile: cuModuleLoadDataEx, cuLibraryLoadData, cuLinkCreate.
#pragma once

#include "driver/driver.h"

namespace cudasim::driver {

// What the caller asked for, and where it wants to be told how it went. The arrays stay the caller's: outputs are written to
// `values` (as drivers do it: the value of an option becomes what came out), as long as this is used.
class JitOptions {
  public:
    JitOptions() = default;
    JitOptions(unsigned count, CUjit_option *options, void **values);

    CUresult status() const { return status_; }  // of the options themselves
    unsigned max_registers() const { return max_registers_; }
    bool verbose() const { return verbose_; }

    // Writes both logs, their sizes and the time since the options were given.
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

// What a driver writes to the error log for PTX that does not compile, from what the translator says.
std::string compiler_log(const std::string &problem, const std::string &input = "");
// … and to the info log, where it is asked to be verbose.
std::string verbose_log(const Image &image);

// The PTX that this device takes from an image, copied: the caller may free `image`. Writes logs where it fails.
CUresult choose_text(const void *image, const JitOptions &jit, std::string &text, std::string &options);
// From PTX to its translation; writes logs.
CUresult translate_text(const std::string &text, const JitOptions &jit, std::shared_ptr<const Image> &made);

// A file's content, and zeros behind it: what reads it as an image may look a little further. A cubin must all be there.
CUresult read_image_file(const char *path, std::string &content);

// In hostile mode a load waits for running kernels, with the lock of their context, and is refused in capture.
CUresult before_load(const std::shared_ptr<Context> &context, std::optional<Exclusive> &exclusive);

}  // namespace cudasim::driver
