#include "error_text.h"

#include <cstdio>
#include <mutex>
#include <set>
#include <string>

namespace cudasim {

// Programs print these texts, so they are CUDA's own.
const char *error_text(int number, const char *name) {
    switch (number) {
        case 0: return "no error";
        case 1: return "invalid argument";
        case 2: return "out of memory";
        case 3: return "initialization error";
        case 4: return "driver shutting down";
        case 9: return "invalid configuration argument";
        case 12: return "invalid pitch argument";
        case 13: return "invalid device symbol";
        case 17: return "invalid device pointer";
        case 21: return "invalid copy direction for memcpy";
        case 34: return "CUDA driver is a stub library";
        case 35: return "CUDA driver version is insufficient for CUDA runtime version";
        case 36: return "API call is not supported in the installed CUDA driver";
        case 46: return "all CUDA-capable devices are busy or unavailable";
        case 52: return "__global__ function call is not configured";
        case 98: return "invalid device function";
        case 100: return "no CUDA-capable device is detected";
        case 101: return "invalid device ordinal";
        case 200: return "device kernel image is invalid";
        case 201: return "invalid device context";
        case 208: return "resource already mapped";
        case 209: return "no kernel image is available for execution on the device";
        case 214: return "uncorrectable ECC error encountered";
        case 215: return "limit is not supported on this architecture";
        case 218: return "a PTX JIT compilation failed";
        case 221: return "PTX JIT compiler library not found";
        case 222: return "the provided PTX was compiled with an unsupported toolchain.";
        case 300: return "device kernel image is invalid";
        case 301: return "file not found";
        case 302: return "shared object symbol not found";
        case 303: return "shared object initialization failed";
        case 304: return "OS call failed or operation not supported on this OS";
        case 400: return "invalid resource handle";
        case 401: return "the operation cannot be performed in the present state";
        case 500: return "named symbol not found";
        case 600: return "device not ready";
        case 700: return "an illegal memory access was encountered";
        case 701: return "too many resources requested for launch";
        case 702: return "the launch timed out and was terminated";
        case 704: return "peer access is already enabled";
        case 705: return "peer access has not been enabled";
        case 708: return "cannot set while device is active in this process";
        case 709: return "context is destroyed";
        case 710: return "device-side assert triggered";
        case 711: return "peer mapping resources exhausted";
        case 712: return "part or all of the requested memory range is already mapped";
        case 713: return "pointer does not correspond to a registered memory region";
        case 714: return "hardware stack error";
        case 715: return "an illegal instruction was encountered";
        case 716: return "misaligned address";
        case 717: return "operation not supported on global/shared address space";
        case 718: return "invalid program counter";
        case 719: return "unspecified launch failure";
        case 720: return "too many blocks in cooperative launch";
        case 800: return "operation not permitted";
        case 801: return "operation not supported";
        case 900: return "operation not permitted when stream is capturing";
        case 901: return "operation failed due to a previous error during capture";
        case 902: return "merge of two independent capture sequences not permitted";
        case 903: return "the capture was not initiated in this stream";
        case 904: return "capturing stream has unjoined work";
        case 905: return "dependency created on uncaptured work in another stream";
        case 906: return "operation would make the legacy stream depend on a capturing blocking stream";
        case 907: return "operation not permitted on an event last recorded in a capturing stream";
        case 908: return "attempt to terminate a thread-local capture sequence from another thread";
        case 909: return "wait operation timed out";
        case 910:
            return "the graph update was not performed because it included changes which violated "
                   "constraints "
                   "specific to instantiated graph update";
        case 999: return "unknown error";
        default: return name;
    }
}

int unsupported(const char *what) {
    static std::mutex mutex;
    static auto *const said = new std::set<std::string>();
    std::lock_guard lock(mutex);
    if (said->insert(what).second) fprintf(stderr, "cudasim: %s is not supported\n", what);
    return 801;
}

}  // namespace cudasim
