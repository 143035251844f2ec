/* An eBPF object for gpurun: it counts how often each thread of vectorAdd runs, and each block.

       make threads.bpf.o
       gpurun threads.bpf.o -- ./vectoradd 19 5 1 2

   libbpf's bpf_helpers.h and a vmlinux.h would do as well. The few lines of them that this needs come first. */
typedef unsigned int u32;
typedef unsigned long long u64;

#define SEC(name) __attribute__((section(name), used))
#define __uint(name, value) int (*name)[value]
#define __type(name, value) typeof(value) *name

static void *(*bpf_map_lookup_elem)(void *map, const void *key) = (void *)1;
static long (*bpf_trace_printk)(const char *format, u32 size, ...) = (void *)6;

/* bpftime's numbers: a value for each GPU thread; values that all share */
#define PERGPUTD_ARRAY_MAP 1502
#define GPU_ARRAY_MAP 1503

static const u64 (*bpf_get_block_idx)(u64 *, u64 *, u64 *) = (void *)503;
static const u64 (*bpf_get_thread_idx)(u64 *, u64 *, u64 *) = (void *)505;

struct {
    __uint(type, PERGPUTD_ARRAY_MAP);
    __uint(max_entries, 1);
    __type(key, u32);
    __type(value, u64);
} runs SEC(".maps");

struct block_count {
    u64 first, others;
};
struct {
    __uint(type, GPU_ARRAY_MAP);
    __uint(max_entries, 1);
    __type(key, u32);
    __type(value, struct block_count);
} blocks SEC(".maps");

const volatile u64 loud = 1;

SEC("kretprobe/_Z9vectorAddPKfS0_Pfi")
int on_exit(void *ctx) {
    static const char done[] = "block %lu is done";
    u32 zero = 0;
    u64 block, thread, y, z;
    u64 *mine = bpf_map_lookup_elem(&runs, &zero);
    struct block_count *all = bpf_map_lookup_elem(&blocks, &zero);

    bpf_get_block_idx(&block, &y, &z);
    bpf_get_thread_idx(&thread, &y, &z);
    if (mine) *mine += 1;
    if (all && !thread) __sync_fetch_and_add(block ? &all->others : &all->first, 1);
    if (loud && !thread) bpf_trace_printk(done, sizeof done, block);
    return 0;
}

char LICENSE[] SEC("license") = "GPL";
