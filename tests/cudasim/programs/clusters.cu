// Thread block clusters of several blocks: shapes and ranks, the barrier, shared memory of other blocks, copies and mbarriers, graphs.
#include "check.h"

#include <cooperative_groups.h>
#include <cuda.h>

#include <cstdint>
#include <cstring>
#include <vector>

namespace cg = cooperative_groups;

#define PTX(...) asm volatile(__VA_ARGS__)

__device__ uint32_t address(const void *shared) { return static_cast<uint32_t>(__cvta_generic_to_shared(shared)); }

__device__ uint32_t map(uint32_t shared, unsigned rank) {
    uint32_t mapped;
    PTX("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(mapped) : "r"(shared), "r"(rank));
    return mapped;
}

template <class T>
T *managed(size_t count) {
    T *memory;
    CHECK(cudaMallocManaged(&memory, count * sizeof(T)));
    memset(memory, 0, count * sizeof(T));
    return memory;
}

// Launches with clusters of a shape, or of what the kernel requires.
template <class... Parameters, class... Arguments>
cudaError_t launch(dim3 cluster, dim3 grid, dim3 block, size_t shared, void (*kernel)(Parameters...), Arguments... arguments) {
    cudaLaunchAttribute attribute = {};
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim.x = cluster.x;
    attribute.val.clusterDim.y = cluster.y;
    attribute.val.clusterDim.z = cluster.z;
    cudaLaunchConfig_t config = {grid, block, shared, nullptr, &attribute, 1};
    return cudaLaunchKernelEx(&config, kernel, static_cast<Parameters>(arguments)...);
}

// ---- shapes: each block writes where it is in its cluster, and gets it from the other blocks

struct Place {
    unsigned cluster[3], clusters[3], block[3], blocks[3], rank, size, explicit_;
};

__global__ void places(Place *out, unsigned *sums) {
    Place here;
#define READ(FIELD, AXIS, NAME) PTX("mov.u32 %0, %%" NAME ";" : "=r"(here.FIELD[AXIS]))
#define READ3(FIELD, NAME) READ(FIELD, 0, NAME ".x"); READ(FIELD, 1, NAME ".y"); READ(FIELD, 2, NAME ".z")
    READ3(cluster, "clusterid");
    READ3(clusters, "nclusterid");
    READ3(block, "cluster_ctaid");
    READ3(blocks, "cluster_nctaid");
    PTX("mov.u32 %0, %%cluster_ctarank;" : "=r"(here.rank));
    PTX("mov.u32 %0, %%cluster_nctarank;" : "=r"(here.size));
    PTX("{ .reg .pred p; mov.pred p, %%is_explicit_cluster; selp.u32 %0, 1, 0, p; }" : "=r"(here.explicit_));
    const unsigned number = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
    __shared__ unsigned mine;
    mine = 1 + number;
    cg::cluster_group cluster = cg::this_cluster();
    cluster.sync();
    if (threadIdx.x == 0) {
        out[number] = here;
        for (unsigned rank = 0; rank < cluster.num_blocks(); rank++) sums[number] += *cluster.map_shared_rank(&mine, rank);
    }
    cluster.sync();
}

void shapes(dim3 grid, dim3 shape) {
    const unsigned count = grid.x * grid.y * grid.z;
    auto *found = managed<Place>(count);
    auto *sums = managed<unsigned>(count);
    CHECK(launch(shape, grid, 40, 0, places, found, sums));
    CHECK(cudaDeviceSynchronize());
    for (unsigned z = 0, number = 0; z < grid.z; z++)
        for (unsigned y = 0; y < grid.y; y++)
            for (unsigned x = 0; x < grid.x; x++, number++) {
                const Place &p = found[number];
                REQUIRE(p.cluster[0] == x / shape.x && p.cluster[1] == y / shape.y && p.cluster[2] == z / shape.z);
                REQUIRE(p.clusters[0] == grid.x / shape.x && p.clusters[1] == grid.y / shape.y && p.clusters[2] == grid.z / shape.z);
                REQUIRE(p.block[0] == x % shape.x && p.block[1] == y % shape.y && p.block[2] == z % shape.z);
                REQUIRE(p.blocks[0] == shape.x && p.blocks[1] == shape.y && p.blocks[2] == shape.z);
                REQUIRE(p.rank == x % shape.x + shape.x * (y % shape.y + shape.y * (z % shape.z)));
                REQUIRE(p.size == shape.x * shape.y * shape.z && p.explicit_ == 1);
                unsigned sum = 0;
                for (unsigned k = z - p.block[2]; k < z - p.block[2] + shape.z; k++)
                    for (unsigned j = y - p.block[1]; j < y - p.block[1] + shape.y; j++)
                        for (unsigned i = x - p.block[0]; i < x - p.block[0] + shape.x; i++) sum += 1 + i + grid.x * (j + grid.y * k);
                REQUIRE(sums[number] == sum);
            }
}

// ---- a histogram whose bins the blocks of a cluster share

__global__ void __cluster_dims__(4, 1, 1) histogram(const unsigned *values, unsigned count, unsigned *out) {
    extern __shared__ unsigned bins[];
    cg::cluster_group cluster = cg::this_cluster();
    bins[threadIdx.x] = 0;
    cluster.sync();
    for (unsigned i = cg::this_grid().thread_rank(); i < count; i += gridDim.x * blockDim.x)
        atomicAdd(cluster.map_shared_rank(bins, values[i] / blockDim.x) + values[i] % blockDim.x, 1u);
    cluster.sync();
    atomicAdd(&out[cluster.block_rank() * blockDim.x + threadIdx.x], bins[threadIdx.x]);
}

void histograms() {
    constexpr unsigned kCount = 10007, kThreads = 64, kBins = 4 * kThreads;
    auto *values = managed<unsigned>(kCount), *found = managed<unsigned>(kBins);
    std::vector<unsigned> expected(kBins);
    for (unsigned i = 0; i < kCount; i++) expected[values[i] = i * i % 251]++;
    histogram<<<8, kThreads, kThreads * sizeof(unsigned)>>>(values, kCount, found);
    CHECK(cudaDeviceSynchronize());
    REQUIRE(!memcmp(found, expected.data(), kBins * sizeof(unsigned)));
}

// ---- every kind of access to the memory of the next block, by 32-bit and generic addresses

__global__ void __cluster_dims__(3, 1, 1) accesses(unsigned *out) {
    __shared__ __align__(16) unsigned memory[32];
    __shared__ unsigned *pointer;
    const unsigned rank = blockIdx.x % 3, next = (rank + 1) % 3, l = threadIdx.x;
    cg::cluster_group cluster = cg::this_cluster();
    memory[l] = 100 * rank + l;
    if (l == 0) *cluster.map_shared_rank(&pointer, next) = memory;  // a generic address is one of the whole cluster
    cluster.sync();
    const uint32_t there = map(address(memory), next);
    unsigned found[8] = {}, *generic = cluster.map_shared_rank(memory, next);
    PTX("ld.shared::cluster.u32 %0, [%1];" : "=r"(found[0]) : "r"(there + 4 * l) : "memory");
    PTX("ld.u32 %0, [%1];" : "=r"(found[1]) : "l"(generic + l) : "memory");
    found[2] = pointer[l];
    PTX("getctarank.shared::cluster.u32 %0, %1;" : "=r"(found[3]) : "r"(there));
    found[4] = cluster.query_shared_rank(generic) + 10 * cluster.query_shared_rank(memory) + 100 * cluster.query_shared_rank(pointer);
    PTX("{ .reg .pred p, q, r, s; .reg .u32 a; isspacep.shared::cta p, %1; isspacep.shared::cluster q, %1; isspacep.global r, %1;"
        " isspacep.shared::cta s, %2; selp.u32 %0, 1, 0, p; selp.u32 a, 2, 0, q; or.b32 %0, %0, a; selp.u32 a, 4, 0, r;"
        " or.b32 %0, %0, a; selp.u32 a, 8, 0, s; or.b32 %0, %0, a; }"
        : "=r"(found[5]) : "l"(generic), "l"(memory));
    cluster.sync();
    PTX("st.shared::cluster.u32 [%0], %1;" ::"r"(there + 4 * l), "r"(1000 * rank + l) : "memory");
    cluster.sync();
    PTX("red.shared::cluster.add.u32 [%0], 1;" ::"r"(there) : "memory");
    PTX("atom.shared::cluster.max.u32 %0, [%1], %2;" : "=r"(found[6]) : "r"(there + 4), "r"(5000 + l) : "memory");
    atomicAdd(generic + 2, 2);
    cluster.sync();
    found[7] = memory[l];
    for (int k = 0; k < 8; k++) out[(blockIdx.x * 32 + l) * 8 + k] = found[k];
}

void every_access() {
    auto *out = managed<unsigned>(6 * 32 * 8);
    accesses<<<6, 32>>>(out);
    CHECK(cudaDeviceSynchronize());
    for (unsigned block = 0; block < 6; block++)
        for (unsigned l = 0; l < 32; l++) {
            const unsigned rank = block % 3, next = (rank + 1) % 3, before = (rank + 2) % 3, *f = out + (block * 32 + l) * 8;
            REQUIRE(f[0] == 100 * next + l && f[1] == 100 * next + l && f[2] == 100 * before + l);
            REQUIRE(f[3] == next && f[4] == next + 10 * rank + 100 * before && f[5] == 2 + 8);
            const unsigned stored = 1000 * before + l, changed[] = {stored + 32, 5031, stored + 64};
            REQUIRE(f[7] == (l < 3 ? changed[l] : stored));
            REQUIRE(f[6] == 1000 * rank + 1 || (f[6] >= 5000 && f[6] < 5032));
        }
}

// ---- the barrier: rounds in which the blocks pass values on, work between arrive and wait, threads that exit

__global__ void ring(unsigned *out, int rounds) {
    __shared__ unsigned slots[2];
    cg::cluster_group cluster = cg::this_cluster();
    const unsigned rank = cluster.block_rank(), size = cluster.num_blocks();
    if (threadIdx.x == 0) slots[0] = rank;
    cluster.sync();
    for (int k = 0; k < rounds; k++) {
        if (threadIdx.x == 0) *cluster.map_shared_rank(&slots[(k + 1) % 2], (rank + 1) % size) = slots[k % 2] * 3 + k;
        auto token = cluster.barrier_arrive();
        if (threadIdx.x % 2) out[blockIdx.x + gridDim.x] = k;  // some lanes have work to do
        cluster.barrier_wait(std::move(token));
    }
    if (threadIdx.x == 0) out[blockIdx.x] = slots[rounds % 2];
}

void rings() {
    constexpr unsigned kBlocks = 16, kSize = 8;
    auto *out = managed<unsigned>(2 * kBlocks);
    CHECK(launch(kSize, kBlocks, 96, 0, ring, out, 21));
    CHECK(cudaDeviceSynchronize());
    for (unsigned block = 0; block < kBlocks; block++) {
        unsigned value = (block % kSize + 3 * kSize - 21) % kSize;
        for (unsigned k = 0; k < 21; k++) value = value * 3 + k;
        REQUIRE(out[block] == value && out[kBlocks + block] == 20);
    }
}

// Of a warp, only lanes below `left` stay. The whole block 1 exits after it has arrived, threads of warp 1 before that.
__global__ void __cluster_dims__(2, 1, 1) leaving(unsigned *out, unsigned left) {
    __shared__ unsigned counter;
    const unsigned rank = blockIdx.x % 2;
    if (threadIdx.x == 0) counter = 0;
    cg::this_cluster().sync();
    if (threadIdx.x % 32 >= left || threadIdx.x / 32 == 1) return;
    atomicAdd(cg::this_cluster().map_shared_rank(&counter, 0), 1);
    PTX("barrier.cluster.arrive;" ::: "memory");
    if (rank == 1) return;
    PTX("barrier.cluster.wait;" ::: "memory");
    out[blockIdx.x / 2 * 96 + threadIdx.x] = counter;
    PTX("barrier.cluster.arrive.relaxed; barrier.cluster.wait.acquire;" ::: "memory");  // the others have exited
}

void exits() {
    auto *out = managed<unsigned>(2 * 96);
    for (unsigned left : {1, 7, 32}) {
        memset(out, 0, 2 * 96 * sizeof *out);
        leaving<<<4, 96>>>(out, left);
        CHECK(cudaDeviceSynchronize());
        for (unsigned i = 0; i < 2 * 96; i++)
            REQUIRE(out[i] == (i % 32 < left && i % 96 / 32 != 1 ? 4 * left : 0));
    }
}

// Warps of the blocks take the two sides of a branch, and both have a barrier.
__global__ void __cluster_dims__(2, 1, 1) diverging(unsigned *out) {
    __shared__ unsigned sum;
    cg::cluster_group cluster = cg::this_cluster();
    if (threadIdx.x == 0) sum = 0;
    cluster.sync();
    const unsigned odd = (threadIdx.x + blockIdx.x) % 2;
    atomicAdd(cluster.map_shared_rank(&sum, odd), 1 + threadIdx.x);
    if (odd) PTX("barrier.cluster.arrive; barrier.cluster.wait;" ::: "memory");
    else PTX("barrier.cluster.arrive; barrier.cluster.wait;" ::: "memory");
    out[blockIdx.x * blockDim.x + threadIdx.x] = sum;
}

void divergence() {
    auto *out = managed<unsigned>(4 * 48);
    diverging<<<4, 48>>>(out);
    CHECK(cudaDeviceSynchronize());
    for (unsigned i = 0; i < 4 * 48; i++) REQUIRE(out[i] == 48 * 49 / 2);
}

// ---- copies to other blocks, which their mbarriers count

__device__ void wait(uint32_t barrier, unsigned parity) {
    PTX("{ .reg .pred p; W: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%0], %1; @!p bra W; }" ::"r"(barrier),
        "r"(parity) : "memory");
}

__device__ void expect(uint32_t barrier, unsigned bytes) {
    PTX("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// Block 0 multicasts 64 words to the blocks of `mask`; every block sends its rank to the next one in several ways.
__global__ void __cluster_dims__(4, 1, 1) copies(const unsigned *in, unsigned *out, unsigned mask, const __grid_constant__ CUtensorMap tensor) {
    __shared__ __align__(128) unsigned tile[64], box[32], sent[8];
    __shared__ __align__(16) unsigned own[8];
    __shared__ __align__(8) uint64_t barriers[4];
    cg::cluster_group cluster = cg::this_cluster();
    const unsigned rank = cluster.block_rank(), next = (rank + 1) % 4, l = threadIdx.x;
    tile[l] = tile[l + 32] = box[l] = 7;
    if (l < 8) sent[l] = 0, own[l] = 10 * rank + l;
    const uint32_t first = address(barriers), second = first + 8, third = first + 16, fourth = first + 24;
    if (l == 0) {
        for (int k = 0; k < 3; k++) PTX("mbarrier.init.shared.b64 [%0], 1;" ::"r"(first + 8 * k));
        PTX("mbarrier.init.shared.b64 [%0], 96;" ::"r"(fourth));
        PTX("fence.mbarrier_init.release.cluster; fence.proxy.async;" ::: "memory");
    }
    cluster.sync();
    const bool chosen = mask >> rank & 1;
    if (l == 0) {
        if (chosen) expect(first, 256), expect(third, 128);
        expect(second, 32 + 16 + 8);
        if (rank == 0) {
            const auto bits = static_cast<unsigned short>(mask);
            PTX("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1], 256, [%2], %3;" ::"r"(address(tile)),
                "l"(in), "r"(first), "h"(bits) : "memory");
            PTX("cp.async.bulk.tensor.1d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%2}], [%3], %4;" ::"r"(address(box)),
                "l"(&tensor), "r"(64), "r"(third), "h"(bits) : "memory");
        }
        const uint32_t to = map(address(sent), next), done = map(second, next);
        PTX("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], 32, [%2];" ::"r"(to), "r"(address(own)), "r"(done) : "memory");
        PTX("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %1, 3, 4}, [%2];" ::"r"(to), "r"(rank), "r"(done) : "memory");
        PTX("red.async.relaxed.cluster.shared::cluster.mbarrier::complete_tx::bytes.add.u64 [%0], 5, [%1];" ::"r"(to + 16), "r"(done) : "memory");
    }
    for (unsigned other = 0; other < 4; other++)  // each thread arrives at the mbarriers of the other blocks
        if (other != rank) PTX("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(map(fourth, other)) : "memory");
    if (chosen) wait(first, 0), wait(third, 0);
    wait(second, 0);
    wait(fourth, 0);
    __syncwarp();
    unsigned *mine = out + blockIdx.x * 104;
    mine[l] = tile[l];
    mine[l + 32] = tile[l + 32];
    mine[l + 64] = box[l];
    if (l < 8) mine[l + 96] = sent[l];
    cluster.sync();  // no block exits while others write to it
}

void asynchronous_copies() {
    auto *in = managed<unsigned>(256), *out = managed<unsigned>(8 * 104);
    for (unsigned i = 0; i < 256; i++) in[i] = 1000 + i;
    CUtensorMap tensor;
    const cuuint64_t sizes[] = {256}, strides[] = {0};
    const cuuint32_t box[] = {32}, steps[] = {1};
    void *encode = nullptr;
    cudaDriverEntryPointQueryResult result;
    CHECK(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &encode, 12000, cudaEnableDefault, &result));
    REQUIRE(reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(encode)(
                &tensor, CU_TENSOR_MAP_DATA_TYPE_UINT32, 1, in, sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
                CU_TENSOR_MAP_SWIZZLE_NONE, CU_TENSOR_MAP_L2_PROMOTION_NONE, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS);
    for (unsigned mask : {15, 10, 1}) {
        copies<<<8, 32>>>(in, out, mask, tensor);
        CHECK(cudaDeviceSynchronize());
        for (unsigned block = 0; block < 8; block++) {
            const unsigned rank = block % 4, before = (rank + 3) % 4, *f = out + block * 104;
            for (unsigned i = 0; i < 64; i++) REQUIRE(f[i] == (mask >> rank & 1 ? 1000 + i : 7));
            for (unsigned i = 0; i < 32; i++) REQUIRE(f[64 + i] == (mask >> rank & 1 ? 1064 + i : 7));
            const unsigned sent[] = {before, before, 3, 4, 10 * before + 4 + 5, 10 * before + 5, 10 * before + 6, 10 * before + 7};
            REQUIRE(!memcmp(f + 96, sent, sizeof sent));
        }
    }
}

// ---- the shape of a launch

__global__ void __cluster_dims__(2, 1, 1) of_two(unsigned *out) { atomicAdd(out, cg::this_cluster().num_blocks()); }
__global__ void free_shape(unsigned *out) { atomicAdd(out, cg::this_cluster().num_blocks()); }
__global__ void __launch_bounds__(64, 1, 4) at_most_four(unsigned *out) { atomicAdd(out, cg::this_cluster().num_blocks()); }

void checks() {
    auto *out = managed<unsigned>(1);
    FAILS(launch(3, 4, 32, 0, free_shape, out), cudaErrorInvalidClusterSize);  // the grid has no whole clusters
    FAILS(launch(dim3(1, 2), dim3(4, 3), 32, 0, free_shape, out), cudaErrorInvalidClusterSize);
    FAILS(launch(16, 16, 32, 0, free_shape, out), cudaErrorInvalidClusterSize);  // not a portable size
    FAILS(launch(dim3(0, 1, 1), 16, 32, 0, free_shape, out), cudaErrorInvalidClusterSize);
    FAILS(launch(4, 4, 32, 0, of_two, out), cudaErrorInvalidClusterSize);
    FAILS(launch(8, 8, 32, 0, at_most_four, out), cudaErrorInvalidClusterSize);
    of_two<<<3, 32>>>(out);
    REQUIRE(cudaGetLastError() == cudaErrorInvalidClusterSize);
    CHECK(cudaDeviceSynchronize());
    REQUIRE(*out == 0);
    CHECK(cudaFuncSetAttribute(free_shape, cudaFuncAttributeNonPortableClusterSizeAllowed, 1));
    CHECK(launch(16, 32, 1, 0, free_shape, out));
    CHECK(launch(2, 4, 1, 0, of_two, out));
    CHECK(launch(4, 4, 1, 0, at_most_four, out));
    free_shape<<<3, 1>>>(out);
    CHECK(cudaDeviceSynchronize());
    REQUIRE(*out == 32 * 16 + 4 * 2 + 4 * 4 + 3);

    cudaFuncAttributes attributes;
    CHECK(cudaFuncGetAttributes(&attributes, of_two));
    REQUIRE(attributes.requiredClusterWidth == 2 && attributes.requiredClusterHeight == 1 && attributes.requiredClusterDepth == 1);
    FAILS(cudaFuncSetAttribute(of_two, cudaFuncAttributeRequiredClusterWidth, 4), cudaErrorNotPermitted);
    CHECK(cudaFuncGetAttributes(&attributes, free_shape));
    REQUIRE(attributes.requiredClusterWidth == 0 && attributes.clusterDimMustBeSet == 0);
    CHECK(cudaFuncSetAttribute(at_most_four, cudaFuncAttributeRequiredClusterWidth, 4));
    CHECK(cudaFuncSetAttribute(at_most_four, cudaFuncAttributeRequiredClusterHeight, 1));
    CHECK(cudaFuncSetAttribute(at_most_four, cudaFuncAttributeRequiredClusterDepth, 1));
    *out = 0;
    at_most_four<<<8, 1>>>(out);
    CHECK(cudaDeviceSynchronize());
    REQUIRE(*out == 8 * 4);

    int value = 0, blocks = 0, multiprocessors = 0;
    CHECK(cudaDeviceGetAttribute(&value, cudaDevAttrClusterLaunch, 0));
    REQUIRE(value == 1);
    CHECK(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, 0));
    cudaLaunchAttribute attribute = {};
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim = {4, 1, 1};
    cudaLaunchConfig_t config = {64, 1024, 0, nullptr, &attribute, 1};
    CHECK(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, free_shape, 1024, 0));
    CHECK(cudaOccupancyMaxActiveClusters(&value, free_shape, &config));
    REQUIRE(value == blocks * multiprocessors / 4);
    CHECK(cudaOccupancyMaxPotentialClusterSize(&value, free_shape, &config));
    REQUIRE(value == 16);
    CHECK(cudaOccupancyMaxPotentialClusterSize(&value, ring, &config));
    REQUIRE(value == 8);
    CHECK(cudaOccupancyMaxPotentialClusterSize(&value, of_two, &config));
    REQUIRE(value == 2);
    FAILS(cudaOccupancyMaxActiveClusters(&value, of_two, &config), cudaErrorInvalidClusterSize);
}

// ---- graphs: a captured launch, and a node whose attribute is set

void graphs() {
    constexpr unsigned kBlocks = 4;
    auto *out = managed<unsigned>(2 * kBlocks);
    cudaStream_t stream;
    CHECK(cudaStreamCreate(&stream));
    CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
    cudaLaunchAttribute attribute = {};
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim = {2, 1, 1};
    cudaLaunchConfig_t config = {kBlocks, 32, 0, stream, &attribute, 1};
    CHECK(cudaLaunchKernelEx(&config, ring, out, 3));
    cudaGraph_t graph;
    CHECK(cudaStreamEndCapture(stream, &graph));
    cudaGraphNode_t node;
    size_t count = 1;
    CHECK(cudaGraphGetNodes(graph, &node, &count));
    cudaKernelNodeAttrValue value = {};
    CHECK(cudaGraphKernelNodeGetAttribute(node, cudaLaunchAttributeClusterDimension, &value));
    REQUIRE(value.clusterDim.x == 2 && value.clusterDim.y == 1 && value.clusterDim.z == 1);
    const auto run = [&](unsigned size) {
        cudaGraphExec_t exec;
        CHECK(cudaGraphInstantiate(&exec, graph, 0));
        for (int k = 0; k < 2; k++) {
            memset(out, 0, 2 * kBlocks * sizeof *out);
            CHECK(cudaGraphLaunch(exec, stream));
            CHECK(cudaStreamSynchronize(stream));
            for (unsigned block = 0; block < kBlocks; block++) {
                const unsigned from = (block % size + 4 * size - 3) % size;
                REQUIRE(out[block] == 27 * from + 0 * 9 + 1 * 3 + 2);
            }
        }
        CHECK(cudaGraphExecDestroy(exec));
    };
    run(2);
    value.clusterDim.x = 4;
    CHECK(cudaGraphKernelNodeSetAttribute(node, cudaLaunchAttributeClusterDimension, &value));
    run(4);
    value.clusterDim.x = 3;
    FAILS(cudaGraphKernelNodeSetAttribute(node, cudaLaunchAttributeClusterDimension, &value), cudaErrorInvalidClusterSize);
    run(4);
    CHECK(cudaGraphDestroy(graph));
}

// ---- a cooperative launch with clusters

__global__ void together(unsigned *out) {
    cg::this_grid().sync();
    __shared__ unsigned mine;
    mine = blockIdx.x;
    cg::this_cluster().sync();
    atomicAdd(out, *cg::this_cluster().map_shared_rank(&mine, 1));
    cg::this_grid().sync();
    out[1 + blockIdx.x] = out[0];
}

void cooperative() {
    auto *out = managed<unsigned>(9);
    cudaLaunchAttribute attributes[2] = {};
    attributes[0].id = cudaLaunchAttributeClusterDimension;
    attributes[0].val.clusterDim = {2, 1, 1};
    attributes[1].id = cudaLaunchAttributeCooperative;
    attributes[1].val.cooperative = 1;
    cudaLaunchConfig_t config = {8, 1, 0, nullptr, attributes, 2};
    CHECK(cudaLaunchKernelEx(&config, together, out));
    CHECK(cudaDeviceSynchronize());
    for (unsigned block = 0; block < 8; block++) REQUIRE(out[1 + block] == 2 * (1 + 3 + 5 + 7));
}

// ---- errors of kernels

__global__ void __cluster_dims__(2, 1, 1) faulty(int what, unsigned *out) {
    __shared__ unsigned memory[4];
    memory[0] = 1;
    cg::this_cluster().sync();
    const unsigned rank = blockIdx.x % 2;
    if (what == 0) *out = *cg::this_cluster().map_shared_rank(memory, 2);  // no such block
    if (what == 1) *out = *(cg::this_cluster().map_shared_rank(memory, 1) + 1024);
    if (what == 2 && rank == 1) return;
    if (what == 2) {
        PTX("barrier.cluster.arrive; barrier.cluster.wait;" ::: "memory");
        *out = *cg::this_cluster().map_shared_rank(memory, 1);  // block 1 has exited
    }
    if (what == 3 && rank == 0) PTX("barrier.cluster.arrive; barrier.cluster.arrive;" ::: "memory");
    if (what == 4 && rank == 0) PTX("barrier.cluster.wait;" ::: "memory");
    if (what == 5 && rank == 0) __trap();
    if (what == 5) cg::this_cluster().sync();
    if (what == 6) *out = *reinterpret_cast<const unsigned *>(reinterpret_cast<const char *>(cg::this_cluster().map_shared_rank(memory, 1)) + 2);
}

int fail(int what) {
    auto *out = managed<unsigned>(1);
    faulty<<<2, 1>>>(what, out);
    const cudaError_t expected[] = {cudaErrorIllegalAddress, cudaErrorIllegalAddress, cudaErrorLaunchFailure, cudaErrorLaunchFailure,
                                    cudaErrorLaunchFailure, cudaErrorLaunchFailure, cudaErrorMisalignedAddress};
    REQUIRE(cudaDeviceSynchronize() == expected[what]);
    return 0;
}

int main(int argc, char **argv) {
    if (argc > 1) return fail(atoi(argv[1]));
    shapes(8, 1);
    shapes(8, 2);
    shapes(dim3(4, 2, 6), dim3(2, 2, 2));
    shapes(dim3(3, 4, 2), dim3(3, 1, 2));
    histograms();
    every_access();
    rings();
    exits();
    divergence();
    asynchronous_copies();
    graphs();
    cooperative();
    checks();
    printf("clusters ok\n");
}
