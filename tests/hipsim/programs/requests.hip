// Makes requests whose addresses a table says: a kernel for each kind of access, with one instruction for it.
#include <hip/hip_runtime.h>

#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

typedef unsigned two __attribute__((ext_vector_type(2)));
typedef unsigned three __attribute__((ext_vector_type(3)));
typedef unsigned four __attribute__((ext_vector_type(4)));

#define KERNEL(name, type, code)                                                                      \
    __global__ void name(const unsigned *table, char *room) {                                         \
        __shared__ __attribute__((aligned(64))) char shared[4096];                                    \
        unsigned own = blockIdx.x * blockDim.x * blockDim.y + threadIdx.y * blockDim.x + threadIdx.x; \
        unsigned at = table[own];                                                                     \
        char *in_room = room + at;                                                                    \
        unsigned in_shared =                                                                          \
            (unsigned)(unsigned long long)(__attribute__((address_space(3))) char *)shared + at;      \
        if (at != ~0u) {                                                                              \
            type v;                                                                                   \
            asm volatile(code "\n s_waitcnt vmcnt(0) lgkmcnt(0)"                                      \
                         : "=v"(v)                                                                    \
                         : "v"(in_room), "v"(in_shared)                                               \
                         : "memory");                                                                 \
            if (*(unsigned *)&v == 0x12345678) room[1] = shared[own & 7];                             \
        }                                                                                             \
    }
KERNEL(global1, unsigned, "global_load_ubyte %0, %1, off")
KERNEL(global2, unsigned, "global_load_ushort %0, %1, off")
KERNEL(global4, unsigned, "global_load_dword %0, %1, off")
KERNEL(global8, two, "global_load_dwordx2 %0, %1, off")
KERNEL(global12, three, "global_load_dwordx3 %0, %1, off")
KERNEL(global16, four, "global_load_dwordx4 %0, %1, off")
KERNEL(flat4, unsigned, "flat_load_dword %0, %1")
KERNEL(shared1, unsigned, "ds_read_u8 %0, %2")
KERNEL(shared2, unsigned, "ds_read_u16 %0, %2")
KERNEL(shared4, unsigned, "ds_read_b32 %0, %2")
KERNEL(shared8, two, "ds_read_b64 %0, %2")
KERNEL(shared16, four, "ds_read_b128 %0, %2")

int main(int argc, char **argv) {
    struct {
        const char *name;
        void (*kernel)(const unsigned *, char *);
    } kernels[] = {
#define ENTRY(name) {#name, name}
        ENTRY(global1), ENTRY(global2), ENTRY(global4), ENTRY(global8), ENTRY(global12), ENTRY(global16),
        ENTRY(flat4),   ENTRY(shared1), ENTRY(shared2), ENTRY(shared4), ENTRY(shared8),  ENTRY(shared16)};
    unsigned lanes = atoi(argv[2]), row = atoi(argv[3]);
    for (auto &each : kernels) {
        FILE *file = fopen((std::string(argv[1]) + "/" + each.name).c_str(), "rb");
        if (!file) continue;
        std::vector<unsigned> table(1 << 20);
        size_t count = fread(table.data(), 4, table.size(), file);
        fclose(file);
        unsigned *device;
        char *room;
        if (hipMalloc(&device, 4 * count) || hipMalloc(&room, 4096 + 64)) return 1;
        if (hipMemset(room, 0, 4096 + 64) ||
            hipMemcpy(device, table.data(), 4 * count, hipMemcpyHostToDevice))
            return 2;
        each.kernel<<<count / lanes, dim3(row, lanes / row)>>>(device, room);
        if (hipDeviceSynchronize()) return 3;
    }
}
