// own_new: a program with its own operator new and delete, which it exports with its templates, as with -rdynamic. What one of them
// allocated, no other function may free.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <new>
#include <string>
#include <unistd.h>
#include <unordered_map>
#include <vector>

#include <cuda.h>

namespace {
constexpr size_t kBefore = 64;
constexpr char kMark[] = "own_new";
}  // namespace

void *operator new(size_t bytes) {
    char *memory = static_cast<char *>(malloc(bytes + kBefore));
    if (!memory) throw std::bad_alloc();
    memcpy(memory, kMark, sizeof kMark);
    return memory + kBefore;
}
void operator delete(void *memory) noexcept {
    if (!memory) return;
    char *block = static_cast<char *>(memory) - kBefore;
    if (memcmp(block, kMark, sizeof kMark)) {
        fputs("not from this operator new\n", stderr);
        _exit(1);
    }
    free(block);
}
void operator delete(void *memory, size_t) noexcept { operator delete(memory); }

// The templates that the agent uses, too.
template class std::vector<char>;
template class std::vector<unsigned char>;
template class std::vector<unsigned>;
template class std::vector<unsigned long>;
template class std::vector<void *>;
template class std::vector<const void *>;
template class std::vector<std::string>;
template class std::vector<std::pair<std::string, std::string>>;
template class std::vector<std::vector<unsigned char>>;
template class std::deque<unsigned long long>;
template class std::unordered_map<unsigned long, int>;
template class std::unordered_map<unsigned long, unsigned long>;

namespace {

const char kModule[] =
    ".version 7.0\n.target sm_70\n.address_size 64\n.visible .entry work(.param .u64 p) { ret; }\n";

void must(CUresult result) {
    if (result != CUDA_SUCCESS) _exit(2);
}

}  // namespace

int main() {
    CUdevice device;
    CUcontext context;
    CUmodule module;
    CUfunction function;
    CUdeviceptr memory;
    must(cuInit(0));
    must(cuDeviceGet(&device, 0));
    must(cuDevicePrimaryCtxRetain(&context, device));
    must(cuCtxSetCurrent(context));
    must(cuModuleLoadData(&module, kModule));
    must(cuModuleGetFunction(&function, module, "work"));
    must(cuMemAlloc(&memory, 64));
    void *arguments[] = {&memory};
    for (int i = 0; i < 10; ++i)
        must(cuLaunchKernel(function, 1, 1, 1, 32, 1, 1, 0, nullptr, arguments, nullptr));
    must(cuCtxSynchronize());
    must(cuModuleUnload(module));
    puts("ended");
}
