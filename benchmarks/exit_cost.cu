// What it costs a kernel to update memory, read clocks or compute where its threads exit, in variants of one kernel whose threads load
// two numbers and store one. Its warps are short, so this is the worst case. For a GPU:
//
//     nvcc -O3 -arch=native benchmarks/exit_cost.cu -o exit_cost && ./exit_cost      1.7 GiB of its memory, a second
//
// benchmarks/results/exit_cost.md has results.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <type_traits>
#include <vector>

constexpr int kThreads = 64 << 20, kBlock = 256, kLaunches = 20, kRounds = 5;
__device__ unsigned long long never;

#define ASM asm volatile
__device__ uint32_t lane() { uint32_t v; ASM("mov.u32 %0, %%laneid;" : "=r"(v)); return v; }
__device__ uint32_t sm() { uint32_t v; ASM("mov.u32 %0, %%smid;" : "=r"(v)); return v; }
__device__ uint64_t timer() { uint64_t v; ASM("mov.u64 %0, %%globaltimer;" : "=l"(v)); return v; }
__device__ uint64_t ticks() { uint64_t v; ASM("mov.u64 %0, %%clock64;" : "=l"(v)); return v; }
__device__ void add(unsigned long long *to) { ASM("red.global.add.u64 [%0], 1;" ::"l"(to) : "memory"); }
__device__ void raise(unsigned long long *to, uint64_t v) { ASM("red.global.max.u64 [%0], %1;" ::"l"(to), "l"(v) : "memory"); }
__device__ void use(uint64_t v) { if (v == 1) add(&never); }  // so that nothing is left out
template <int N> __device__ uint32_t depend(uint32_t x) {
#pragma unroll
    for (int i = 0; i < N; i++) ASM("mad.lo.u32 %0, %0, %0, 7;" : "+r"(x));
    return x;
}

// Every second one executes in the pipe of multiplications, the others in that of integers.
template <int N> __device__ uint32_t mixed(uint32_t x) {
#pragma unroll
    for (int i = 0; i < N; i++)
        if (i & 1) ASM("mad.lo.u32 %0, %0, %0, 7;" : "+r"(x));
        else ASM("min.u32 %0, %0, %1;" : "+r"(x) : "r"(0x7fffff00 - i));
    return x;
}

// Words that are updated: of each multiprocessor a cache line of its own, of each warp or block one beside another's.
struct Nothing { static constexpr auto name = "nothing"; };
struct OfSm { static constexpr auto name = "each warp adds to a word of its multiprocessor"; };
struct OfWarp { static constexpr auto name = "each warp adds to a word of its own"; };
struct OfBlock { static constexpr auto name = "each warp adds to a word of its block"; };
struct OfBoth { static constexpr auto name = "each warp adds to a word of its own and one of its block"; };
struct TwoLanes { static constexpr auto name = "two lanes of each warp add to two words of their own"; };
struct Stores { static constexpr auto name = "each warp stores to a word of its own"; };
struct FirstWarp { static constexpr auto name = "the first warp of each block adds to a word of the block"; };
struct TimedSm { static constexpr auto name = "each warp reads globaltimer and raises a word of its multiprocessor"; };
struct Timer { static constexpr auto name = "each thread reads globaltimer"; };
struct Clock { static constexpr auto name = "each thread reads clock64"; };
struct SmId { static constexpr auto name = "each thread reads smid"; };
struct Depend20 { static constexpr auto name = "20 dependent instructions"; };
struct Depend60 { static constexpr auto name = "60 dependent instructions"; };
template <int N> struct Mixed { static constexpr int number = N; static constexpr auto name = "instructions that need not wait for the loads"; };
template <int N> struct MixedAfter { static constexpr int number = N; static constexpr auto name = "instructions that need the sum"; };
struct Specials { static constexpr auto name = "each thread reads tid.y, tid.z, ctaid.y, ctaid.z, laneid and smid"; };
struct Waits { static constexpr auto name = "each warp raises a word of its own and waits for the old value"; };
struct Stores16 { static constexpr auto name = "each warp stores 16 bytes to a place of its own"; };
struct TwoOwn { static constexpr auto name = "each warp raises a word of its own and adds to the one beside it"; };
struct MatchActive { static constexpr auto name = "match.all of the active lanes"; };
struct MatchAll { static constexpr auto name = "match.all"; };
struct OfWarpAndSm { static constexpr auto name = "each warp adds to a word of its own and one of its multiprocessor"; };
struct LoadAtStart { static constexpr auto name = "at the start: the first thread of each block compares a word of its multiprocessor"; };
template <int N, int Apart> struct WarpsRaise { static constexpr int number = N; static constexpr auto name = "words, of which each warp raises one; bytes from one to the next:"; };
template <int N> struct BlocksRaise { static constexpr int number = N; static constexpr auto name = "words, of which the first thread of each block raises one at the start"; };
struct AtStart { static constexpr auto name = "at the start: the first thread of each block raises a word of its multiprocessor"; };

template <class V> constexpr int mix = 0;
template <class V> constexpr int mix_after = 0;
template <int N> constexpr int mix<Mixed<N>> = N;
template <int N> constexpr int mix_after<MixedAfter<N>> = N;
template <class V> constexpr int warps_raise = 0;
template <class V> constexpr int apart = 0;
template <class V> constexpr int blocks_raise = 0;
template <int N, int Apart> constexpr int warps_raise<WarpsRaise<N, Apart>> = N;
template <int N, int Apart> constexpr int apart<WarpsRaise<N, Apart>> = Apart;
template <int N> constexpr int blocks_raise<BlocksRaise<N>> = N;
constexpr int kApart = 1 << 14;  // from one of the words that blocks raise to the next: 128 KiB
template <class This, class What> constexpr bool same = std::is_same_v<This, What>;

template <class V> __global__ void triad(const float *a, const float *b, float *c, unsigned long long *words) {
    uint32_t i = blockIdx.x * kBlock + threadIdx.x, warp = i >> 5;
    if (same<V, AtStart> && threadIdx.x == 0) raise(words + sm() * 16, timer());
    if (same<V, LoadAtStart> && threadIdx.x == 0 && *(volatile unsigned long long *)(words + sm() * 16) == warp + 1) return;
    if (blocks_raise<V> && threadIdx.x == 0) raise(words + sm() % (blocks_raise<V> | !blocks_raise<V>) * kApart, timer());
    float sum = a[i] + 3 * b[i];
    c[i] = sum;
    bool first = lane() == 0;
    if (same<V, OfSm> && first) add(words + sm() * 16);
    if ((same<V, OfWarp> || same<V, OfBoth>) && first) add(words + warp);
    if ((same<V, OfBlock> || same<V, OfBoth>) && first) add(words + (kThreads >> 5) + blockIdx.x);
    if (warps_raise<V> && first) raise(words + sm() % (warps_raise<V> | !warps_raise<V>) * (apart<V> / 8), timer());
    if (same<V, OfWarpAndSm> && first) add(words + warp), add(words + (kThreads >> 5) + sm() * 16);
    if (same<V, TwoLanes> && lane() < 2) add(words + warp * 2 + lane());
    if (same<V, Stores> && first) words[warp] = i;
    if (same<V, FirstWarp> && threadIdx.x == 0) add(words + blockIdx.x);
    if (same<V, TimedSm>) { uint64_t t = timer(); if (first) raise(words + sm() * 16, t); }
    if (same<V, Timer>) use(timer());
    if (same<V, Clock>) use(ticks());
    if (same<V, SmId>) use(sm() + 2);
    if (same<V, Depend20>) use(depend<20>(i) + 2);
    if (same<V, Depend60>) use(depend<60>(i) + 2);
    if constexpr (mix<V> > 0) use(mixed<mix<V>>(i) + 2u);
    if constexpr (mix_after<V> > 0) use(mixed<mix_after<V>>(i ^ __float_as_uint(sum)) + 2u);
    if (same<V, Specials>) {
        uint32_t x[6];
        ASM("mov.u32 %0, %%tid.y; mov.u32 %1, %%tid.z; mov.u32 %2, %%ctaid.y; mov.u32 %3, %%ctaid.z; mov.u32 %4, %%laneid; mov.u32 %5, %%smid;"
            : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]), "=r"(x[4]), "=r"(x[5]));
        use((x[0] ^ x[1] ^ x[2] ^ x[3] ^ x[4] ^ x[5]) + 2u);
    }
    if (same<V, Waits> && first) {
        unsigned long long old;
        ASM("atom.global.max.u64 %0, [%1], %2;" : "=l"(old) : "l"(words + warp * 2), "l"((uint64_t)i) : "memory");
        use((uint32_t)old + 2u);
    }
    if (same<V, Stores16> && first)
        ASM("st.global.v2.u64 [%0], {%1, %2};" ::"l"(words + warp * 2), "l"((uint64_t)i), "l"(timer()) : "memory");
    if (same<V, TwoOwn> && first) raise(words + warp * 2, i), add(words + warp * 2 + 1);
    if (same<V, MatchActive>) {
        uint32_t m;
        ASM("{ .reg .b32 t; activemask.b32 t; match.all.sync.b64 %0, %1, t; }" : "=r"(m) : "l"((uint64_t)__float_as_uint(sum)));
        use(m + 3u);
    }
    if (same<V, MatchAll>) {
        uint32_t m;
        ASM("{ .reg .pred p; match.all.sync.b64 %0|p, %1, 0xffffffff; }" : "=r"(m) : "l"((uint64_t)i & 0));
        use(m + 3u);
    }
}

template <class V> double measured(double alone) {
    static float *a, *b, *c;
    static unsigned long long *words;
    if (!a && (cudaMalloc(&a, 4ull * kThreads) || cudaMalloc(&b, 4ull * kThreads) || cudaMalloc(&c, 4ull * kThreads) ||
               cudaMalloc(&words, 256 << 20) || cudaMemset(a, 0, 4ull * kThreads) || cudaMemset(b, 0, 4ull * kThreads) ||
               cudaMemset(words, 0, 256 << 20))) {
        std::printf("%s\n", cudaGetErrorString(cudaGetLastError()));
        exit(1);
    }
    cudaEvent_t begin, end;
    cudaEventCreate(&begin), cudaEventCreate(&end);
    std::vector<float> times;
    for (int round = 0; round < kRounds; round++) {
        cudaEventRecord(begin);
        for (int k = 0; k < kLaunches; k++) triad<V><<<kThreads / kBlock, kBlock>>>(a, b, c, words);
        cudaEventRecord(end), cudaEventSynchronize(end);
        float ms;
        cudaEventElapsedTime(&ms, begin, end);
        times.push_back(ms * 1000 / kLaunches);
    }
    std::sort(times.begin(), times.end());
    double middle = times[kRounds / 2];
    std::string name = V::name;
    if constexpr (mix<V> || mix_after<V> || warps_raise<V> || blocks_raise<V>) name = std::to_string(V::number) + " " + name;
    if constexpr (warps_raise<V>) name += " " + std::to_string(apart<V>);
    std::printf("| %-85s | %7.2f | %.3f |\n", name.c_str(), middle, alone ? middle / alone : 1);
    return middle;
}

template <class... V> void all(double alone) { (measured<V>(alone), ...); }

// What a kernel of one block costs that does nothing else. A GPU does not end a kernel before its writes to host memory have arrived.
enum class Once { Nothing, ToGpu, Raises, ToHost, ToHostAndRaises };
template <Once what> __global__ void once(unsigned long long *words, unsigned long long *host) {
    if (threadIdx.x) return;
    if (what == Once::ToGpu) *(volatile unsigned long long *)words = timer();
    if (what == Once::Raises || what == Once::ToHostAndRaises) raise(words, timer());
    if (what == Once::ToHost || what == Once::ToHostAndRaises) *(volatile unsigned long long *)host = timer();
}

template <Once what> void launched(const char *name) {
    constexpr int kMany = 2000;
    unsigned long long *words, *host;
    if (cudaMalloc(&words, 8) || cudaHostAlloc(&host, 8, cudaHostAllocMapped)) return;
    cudaEvent_t begin, end;
    cudaEventCreate(&begin), cudaEventCreate(&end);
    std::vector<float> times;
    for (int round = 0; round < kRounds; round++) {
        cudaEventRecord(begin);
        for (int k = 0; k < kMany; k++) once<what><<<1, 32>>>(words, host);
        cudaEventRecord(end), cudaEventSynchronize(end);
        float ms;
        cudaEventElapsedTime(&ms, begin, end);
        times.push_back(ms * 1000 / kMany);
    }
    std::sort(times.begin(), times.end());
    std::printf("| %-60s | %7.3f |\n", name, times[kRounds / 2]);
}

int main() {
    std::printf("| a kernel of one block: its first thread | µs for each launch |\n|---|---|\n");
    launched<Once::Nothing>("does nothing");
    launched<Once::ToGpu>("stores to GPU memory");
    launched<Once::Raises>("raises a word of GPU memory");
    launched<Once::ToHost>("stores to host memory");
    launched<Once::ToHostAndRaises>("stores to host memory and raises a word of GPU memory");
    launched<Once::Nothing>("does nothing, again");
    std::printf("\n");
    std::printf("| at the exit | µs | times as long |\n|---|---|---|\n");
    all<Nothing, Clock, Timer, SmId, Specials, MatchAll, MatchActive, Depend20, Depend60, Mixed<20>, Mixed<40>, Mixed<60>, MixedAfter<20>,
        MixedAfter<40>, MixedAfter<60>, Stores, Stores16, OfSm, TimedSm, OfWarp, TwoLanes, TwoOwn, OfWarpAndSm, OfBlock, OfBoth, Waits,
        WarpsRaise<1, 131072>, WarpsRaise<4, 131072>, WarpsRaise<16, 128>, WarpsRaise<16, 256>, WarpsRaise<16, 1048576>,
        WarpsRaise<32, 256>, WarpsRaise<32, 1048576>, WarpsRaise<64, 128>, WarpsRaise<64, 256>, WarpsRaise<64, 1048576>,
        WarpsRaise<132, 8>, WarpsRaise<132, 128>, WarpsRaise<132, 256>, FirstWarp, AtStart, LoadAtStart, BlocksRaise<1>, BlocksRaise<4>,
        BlocksRaise<16>, BlocksRaise<64>, Nothing>(measured<Nothing>(0));
    return cudaGetLastError() != cudaSuccess;
}
