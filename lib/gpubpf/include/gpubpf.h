/*
 * gpubpf.h: contexts, helpers and maps of device programs. Include it in the C text given to BPF(text=…). The types of bcc
 * (u8 … u64, s8 … s64), its map macros and helpers are available too. The argument of a function says when it runs:
 *
 *     int on_entry(struct gpu_entry *ctx)     on the GPU: in each thread, when it enters the kernel
 *     int on_access(struct gpu_access *ctx)   on the GPU: in each thread, before a memory access
 *     int on_launch(struct gpu_launch *ctx)   on the host: in the thread that launches, before the driver's call
 *
 * docs/attach-points.md has all points. A function with any other context, such as that of TRACEPOINT_PROBE, runs in the Linux
 * kernel.
 */
#ifndef GPUBPF_H
#define GPUBPF_H

/* Contexts. They are read-only; later versions may add fields at the end. */
struct gpu_entry {
    u64 launch; /* number of the launch, unique in the measurement */
    u64 site;   /* number of the probed place in the kernel */
    u64 args; /* how many arguments there are */
    u64 arg0, arg1, arg2, arg3, arg4, arg5, arg6, arg7; /* the first 8 bytes of each */
    u64 arg8, arg9, arg10, arg11, arg12, arg13, arg14, arg15;
};

struct gpu_exit {
    u64 launch;
    u64 site;
    u64 work; /* what accumulate= counted in this thread since it entered the kernel */
};

struct gpu_function_entry {
    u64 launch;
    u64 site; /* identifies the function */
    u64 args; /* how many arguments there are */
    u64 arg0, arg1, arg2, arg3, arg4, arg5, arg6, arg7; /* the first 8 bytes of each */
    u64 arg8, arg9, arg10, arg11, arg12, arg13, arg14, arg15;
};

struct gpu_function_exit {
    u64 launch;
    u64 site;
    u64 low;  /* the first 8 bytes of the result; 0 if there is none */
    u64 high; /* the next 8 bytes */
};

/* These two run in one thread of each block. */
struct gpu_block_begin {
    u64 launch;
    u64 site;
};

struct gpu_block_end {
    u64 launch;
    u64 site;
};

struct gpu_barrier_arrive {
    u64 launch;
    u64 site;
    u64 barrier; /* its number in the block; ~0 for the cluster's barrier */
    u64 threads; /* the number of threads that it waits for; 0: all threads of the block */
};

struct gpu_barrier_leave {
    u64 launch;
    u64 site;
    u64 barrier;
    u64 threads;
    u64 waited; /* in cycles of this multiprocessor's clock */
};

struct gpu_access {
    u64 launch;
    u64 site;
    u64 address; /* of the first byte; an offset in the block's shared memory or the thread's local memory; none of textures, surfaces, tensors and tensor memory */
    u64 width;   /* bytes that this lane accesses */
    u64 space;   /* GPU_GLOBAL … */
    u64 kind;    /* GPU_LOAD … */
    u64 active;  /* mask of the lanes that execute the access together */
    u64 effect;  /* GPU_READS | GPU_WRITES; a copy reads its source and writes its destination */
};

/*
 * For accesses that lanes made again and again in a loop, each time as the program that is attached with keeps=True saw them. It runs in
 * each thread that kept a number, when the thread leaves the kernel or when other lanes make the access. A thread may run this alone.
 */
struct gpu_access_again {
    u64 launch;
    u64 site;
    u64 width;
    u64 kept;  /* what the other program kept (gpu_keep) */
    u64 count; /* how often the thread made the access since then */
};

/* In each thread that enters a basic block. */
struct gpu_basic_block {
    u64 launch;
    u64 site;   /* identifies the block */
    u64 active; /* mask of the lanes that enter it together */
    u64 instructions; /* of the original kernel, in the block */
    u64 regions;      /* the numbers of the regions of branches that the block is in, as bits */
};

/*
 * The region of a branch: the blocks from the branch to the first block that all ways from it lead to. There, lanes that the branch
 * parted may still be apart. Regions that have a block in common have different numbers, from 0 to GPU_REGIONS - 1.
 */
#define GPU_REGIONS 16

/* In each thread that reaches a conditional branch, before it. */
struct gpu_branch {
    u64 launch;
    u64 site;
    u64 active; /* mask of the lanes that execute the branch together */
    u64 taken;  /* those of them that take it; the others continue with the next instruction */
    u64 region; /* number of the branch's region; GPU_REGIONS if no number was left, or if the branch never parts lanes */
};

/* In each thread that stores a value to memory, before it; loads one, after it; or changes one by an atomic, after it. */
struct gpu_value {
    u64 launch;
    u64 site;
    u64 address; /* as in struct gpu_access */
    u64 width;
    u64 space;
    u64 kind;     /* GPU_LOAD, GPU_STORE or GPU_ATOMIC */
    u64 active;   /* mask of the lanes that run this together */
    u64 effect;   /* with GPU_RETURNS, old_low and old_high are valid */
    u64 type;     /* GPU_F32 …; of each element of a vector */
    u64 low;      /* the first 8 bytes of the value, as in memory: what is loaded or stored, or the operand of an atomic */
    u64 high;     /* the next 8 bytes */
    u64 old_low;  /* of an atomic: the first 8 bytes of the old value */
    u64 old_high;
};

/* In each thread that executes a floating-point instruction, after it. */
struct gpu_float {
    u64 launch;
    u64 site;
    u64 operation;    /* GPU_FLOAT_ADD … */
    u64 active;       /* mask of the lanes that run this together */
    u64 type;         /* of the result, or of each of its elements: GPU_F16, GPU_BF16, GPU_F32 or GPU_F64 */
    u64 low;          /* the first 8 bytes of the result */
    u64 high;         /* the next 8 bytes */
    u64 operand_type; /* of the first operand */
    u64 operands;     /* how many there are */
    u64 operand0, operand1, operand2, operand3; /* the first 8 bytes of each, as the instruction read them */
};

/* In each thread that executes one of the chosen instructions, after it. */
struct gpu_instruction {
    u64 launch;
    u64 site;
    u64 active;
    u64 type; /* GPU_F32 …; of the result, or of each of its elements */
    u64 low;
    u64 high;
    u64 operand_type;
    u64 operands;
    u64 operand0, operand1, operand2, operand3;
};

enum gpu_space { GPU_GLOBAL, GPU_SHARED, GPU_LOCAL, GPU_CONST, GPU_TEXTURE, GPU_SURFACE, GPU_TENSOR, GPU_TMEM };
enum gpu_kind { GPU_LOAD, GPU_STORE, GPU_ATOMIC, GPU_ASYNC };
enum gpu_effect { GPU_READS = 1, GPU_WRITES = 2, GPU_RETURNS = 4 }; /* RETURNS: an atomic returns the old value, which is used */
enum gpu_type {
    GPU_B8, GPU_B16, GPU_B32, GPU_B64, GPU_B128,
    GPU_U8, GPU_U16, GPU_U32, GPU_U64,
    GPU_S8, GPU_S16, GPU_S32, GPU_S64,
    GPU_F16, GPU_BF16, GPU_F32, GPU_F64,
    GPU_PRED /* a predicate: 0 or 1 */
};
enum gpu_float_operation {
    GPU_FLOAT_ADD, GPU_FLOAT_SUB, GPU_FLOAT_MUL, GPU_FLOAT_FMA, GPU_FLOAT_DIV,
    GPU_FLOAT_RCP, GPU_FLOAT_SQRT, GPU_FLOAT_RSQRT,
    GPU_FLOAT_MIN, GPU_FLOAT_MAX, GPU_FLOAT_ABS, GPU_FLOAT_NEG, GPU_FLOAT_COPYSIGN,
    GPU_FLOAT_SIN, GPU_FLOAT_COS, GPU_FLOAT_TANH, GPU_FLOAT_LG2, GPU_FLOAT_EX2,
    GPU_FLOAT_CVT, GPU_FLOAT_MMA
};

/* Once for each launch of a matching kernel; once for a whole graph, with kernel ~0 and the lowest number of its launches. */
struct gpu_launch {
    u64 launch;  /* the same number as ctx->launch in device programs */
    u64 kernel;  /* number of the kernel in this process; session.kernels() has its name */
    u64 stream;  /* handle */
    u64 call_ns; /* CLOCK_MONOTONIC when the program called the driver */
    u64 threads; /* in the whole grid */
    u64 gpu;     /* ordinal of the GPU */
};

/* A request of the application to the driver, other than a kernel launch. */
struct gpu_operation {
    u64 id;          /* number in the operation log of the process */
    u64 kind;        /* GPU_OP_… */
    u64 stream;      /* handle */
    u64 call_ns;     /* CLOCK_MONOTONIC when the program called the driver */
    u64 bytes;       /* of a copy, memset or allocation */
    u64 destination; /* addresses; 0 if there is none */
    u64 source;
    u64 gpu; /* ordinal of the GPU */
};

enum gpu_operation_kind {
    GPU_OP_H2D = 2,
    GPU_OP_D2H,
    GPU_OP_D2D,
    GPU_OP_H2H,
    GPU_OP_MEMSET,
    GPU_OP_EVENT_RECORD,
    GPU_OP_STREAM_WAIT, /* for an event */
    GPU_OP_GRAPH,
    GPU_OP_SYNC,
    GPU_OP_API /* an allocation, a free */
};

/*
 * Helpers with the numbers of bpftime. A clock is read at the call, so read it first. The text of gpubpf_puts must be an array on the
 * stack, so call gpu_puts, which makes one.
 */
static long (*gpubpf_puts)(const char *text) = (void *)501;
static u64 (*bpf_get_globaltimer)(void) = (void *)502;
static void (*bpf_get_block_idx)(u64 *x, u64 *y, u64 *z) = (void *)503;
static void (*bpf_get_block_dim)(u64 *x, u64 *y, u64 *z) = (void *)504;
static void (*bpf_get_thread_idx)(u64 *x, u64 *y, u64 *z) = (void *)505;
static void (*bpf_gpu_membar)(void) = (void *)506;
static void (*bpf_cuda_exit)(void) = (void *)507; /* ends the thread before it runs the kernel; only with struct gpu_entry */
static void (*bpf_get_grid_dim)(u64 *x, u64 *y, u64 *z) = (void *)508;
static u32 (*bpf_get_sm_id)(void) = (void *)509;
static u32 (*bpf_get_warp_id)(void) = (void *)510; /* among the warps now on this multiprocessor; gpu_warp: in the block */
static u32 (*bpf_get_lane_id)(void) = (void *)511;
/*
 * Helpers of this library. A warp has 32 lanes; a wave of an AMD GPU has 32 or 64. A text that names GPU_LANES or gpu_mask is compiled
 * a second time for AMD GPUs, with 64 lanes. Any other text works in waves of 64 lanes only if it does not look at lanes.
 */
#ifndef GPU_LANES
#define GPU_LANES 32
#endif
#if GPU_LANES > 32
typedef u64 gpu_mask; /* of lanes; bit 0 is lane 0 */
#else
typedef u32 gpu_mask;
#endif
static void (*gpu_grid_dim)(u64 *x, u64 *y, u64 *z) = (void *)601;
static u32 (*gpu_lane)(void) = (void *)602; /* 0 to GPU_LANES - 1 */
static u32 (*gpu_warp)(void) = (void *)603; /* number of the warp in its block */
static u32 (*gpu_sm)(void) = (void *)604;
static u64 (*gpu_clock)(void) = (void *)605;         /* clock64 of this multiprocessor */
static u64 (*gpu_global_thread)(void) = (void *)606; /* number of the thread in its grid, x fastest */
/* Number of the warp in its grid, in 32 bits: in its block + block * warps of a block. Computed once in each thread, not at each site. */
static u32 (*gpu_global_warp)(void) = (void *)623;
/* Raises *cell, in the value of a map, to at least `value`, atomically for the whole GPU. Returns the old value. */
static u64 (*gpu_max)(u64 *cell, u64 value) = (void *)607;
static u32 (*gpu_log2)(u64 value) = (void *)609; /* position of the highest bit that is set; 0 for 0 */
static u64 (*gpu_kernel)(void) = (void *)613; /* number of the kernel in this process, like `kernel` of struct gpu_launch */
/* How often addresses had been reused for another allocation before this launch: (address, epoch) identifies an allocation. */
static u64 (*gpu_epoch)(void) = (void *)614;
static u32 (*gpu_popcount)(u64 value) = (void *)615;  /* number of bits that are set */
static gpu_mask (*gpu_lanes_below)(void) = (void *)616; /* mask of the lanes with a lower number than this one */
/* Whether this is the lowest lane of a mask. Let only this lane add, for all lanes: additions then cost a third. */
static u32 (*gpu_first)(gpu_mask lanes) = (void *)617;
static u32 (*gpu_warp_size)(void) = (void *)618; /* lanes of a warp of this kernel */
/* With sampling, a random number that all threads of a chosen block or warp share in a launch; otherwise gpu_sm(). */
static u32 (*gpu_group)(void) = (void *)622;
/*
 * The code after this call is seldom executed. In a kernel with many probes, that code is in a function, which runs the program again
 * from its beginning. So the code before this call must have no effects, and either all lanes that run the program must reach the call
 * together, or none.
 */
static void (*gpu_seldom)(void) = (void *)620;
/*
 * In a program at accesses that is attached with keeps=True: keep a number of this thread, not 0, until the program at `access_again` runs
 * for this access. The last call counts.
 */
static void (*gpu_keep)(u64 value) = (void *)624;

/*
 * Collective helpers: they work on the active lanes, those of the warp that run this together. Bit 0 of a mask is lane 0. After a
 * branch, the active lanes are those that took it. So the compiler must not merge two calls or duplicate one.
 */
static gpu_mask (*gpubpf_active)(void) = (void *)608;
static gpu_mask (*gpubpf_match)(u64 value) = (void *)610;
static gpu_mask (*gpubpf_ballot)(u64 predicate) = (void *)611;
static u64 (*gpubpf_shuffle)(u64 value, u32 lane) = (void *)612;
static u32 (*gpubpf_uniform)(u64 value) = (void *)619;
static u32 (*gpubpf_any)(u64 predicate) = (void *)621;

#define GPUBPF_HERE(_type, _call)                              \
    ({                                                         \
        _type _gpubpf_found;                                   \
        __attribute__((nomerge)) _gpubpf_found = _call;        \
        asm volatile("");                                      \
        _gpubpf_found;                                         \
    })
/* Mask of the active lanes. */
#define gpu_active() GPUBPF_HERE(gpu_mask, gpubpf_active())
/* Mask of the active lanes with the same value, a u64. */
#define gpu_match(_value) GPUBPF_HERE(gpu_mask, gpubpf_match(_value))
/* Mask of the active lanes whose predicate is not 0. */
#define gpu_ballot(_predicate) GPUBPF_HERE(gpu_mask, gpubpf_ballot(_predicate))
/* The value, a u64, that this lane (modulo GPU_LANES) passes; undefined if the lane is not active. */
#define gpu_shuffle(_value, _lane) GPUBPF_HERE(u64, gpubpf_shuffle(_value, _lane))
/* Whether all lanes of the warp are active and pass the same value, a u64. */
#define gpu_uniform(_value) GPUBPF_HERE(u32, gpubpf_uniform(_value))
/* Whether the predicate of any active lane is not 0. */
#define gpu_any(_predicate) GPUBPF_HERE(u32, gpubpf_any(_predicate))

#define gpu_puts(_text)                               \
    ({                                                \
        char _gpubpf_text[] = _text;                  \
        gpubpf_puts(_gpubpf_text);                    \
    })

/* bcc cannot load functions that are not inlined. */
#undef noinline
#define noinline
#undef __noinline
#define __noinline

/*
 * Maps. bcc has no names for these kinds of map and takes them for arrays. The type of the key tells the library which kind is meant.
 */
struct gpubpf_thread_array {
    int index;
};
struct gpubpf_warp_array {
    int index;
};
struct gpubpf_block_array {
    int index;
};
struct gpubpf_kernel_array {
    int index;
};
struct gpubpf_site_array {
    int index;
};
struct gpubpf_shared_array {
    int index;
};
struct gpubpf_param {
    int index;
};

#define GPUBPF_TABLE(_type, _key, _leaf, _name, _entries, _flags)                                  \
    struct _name##_table_t {                                                                       \
        _key key;                                                                                  \
        _leaf leaf;                                                                                \
        _leaf *(*lookup)(void *);                                                                  \
        _leaf *(*lookup_or_init)(void *, _leaf *);                                                 \
        _leaf *(*lookup_or_try_init)(void *, _leaf *);                                             \
        int (*update)(void *, _leaf *);                                                            \
        int (*insert)(void *, _leaf *);                                                            \
        int (*delete)(void *);                                                                     \
        void (*increment)(_key, ...);                                                              \
        void (*atomic_increment)(_key, ...);                                                       \
        u32 max_entries;                                                                           \
        int flags;                                                                                 \
    };                                                                                             \
    __attribute__((section("maps/" _type))) struct _name##_table_t _name = {.flags = (_flags),     \
                                                                            .max_entries = (_entries)}

/*
 * For each of `entries` keys, one value for each thread (warp, block) of the grid, or one for the whole grid. All launches of one
 * kernel and shape share the values. Launches in several streams may overlap, so count with __sync_fetch_and_add. A lookup finds
 * the value of the thread (warp, block) that runs the program.
 */
#define GPU_THREAD_ARRAY(_name, _leaf, _entries) \
    GPUBPF_TABLE("array", struct gpubpf_thread_array, _leaf, _name, _entries, 0)
#define GPU_WARP_ARRAY(_name, _leaf, _entries) \
    GPUBPF_TABLE("array", struct gpubpf_warp_array, _leaf, _name, _entries, 0)
#define GPU_BLOCK_ARRAY(_name, _leaf, _entries) \
    GPUBPF_TABLE("array", struct gpubpf_block_array, _leaf, _name, _entries, 0)
#define GPU_KERNEL_ARRAY(_name, _leaf, _entries) \
    GPUBPF_TABLE("array", struct gpubpf_kernel_array, _leaf, _name, _entries, 0)
/*
 * One value for each site of the kernel, which is the key. Each multiprocessor has values of its own, so that multiprocessors do not
 * wait for each other: lookup(&site) finds those of the multiprocessor that runs the program. Count with __sync_fetch_and_add.
 */
#define GPU_SITE_ARRAY(_name, _leaf) \
    GPUBPF_TABLE("array", struct gpubpf_site_array, _leaf, _name, 1, 0)
/*
 * Values in host memory, for each process, that host programs and device programs can both read and write. Each side must write fields
 * of its own, because an operation of one side is not atomic for the other.
 */
#define GPU_SHARED_ARRAY(_name, _leaf, _entries) \
    GPUBPF_TABLE("array", struct gpubpf_shared_array, _leaf, _name, _entries, BPF_F_MMAPABLE)
/* Values that all threads share: change them with __sync_fetch_and_add and the like, or NAME.increment(key, n). */
#define GPU_ARRAY(_name, _leaf, _entries) GPUBPF_TABLE("array", int, _leaf, _name, _entries, 0)
#define GPU_HASH(_name, _key, _leaf, _entries) \
    GPUBPF_TABLE("hash", _key, _leaf, _name, _entries, BPF_F_NO_PREALLOC)
/* Counters, with small numbers as keys: NAME.increment(bpf_log2l(value)). */
#define GPU_HISTOGRAM(_name, _entries) GPUBPF_TABLE("array", int, u64, _name, _entries, 0)
/* A small structure that the tool sets and the program only reads. Its key is 0. */
#define GPU_PARAM(_name, _leaf) GPUBPF_TABLE("array", struct gpubpf_param, _leaf, _name, 1, 0)
/*
 * A ring buffer with records of one type, which the tool reads while kernels run. `pages`: its size in pages of 4096 bytes, a power of
 * two (--ring-size overrides it). Records for which there is no room are counted as lost. Records of one multiprocessor stay in order.
 */
#define GPU_RINGBUF(_name, _leaf, _pages)                        \
    struct _name##_table_t {                                     \
        int key;                                                 \
        _leaf leaf;                                              \
        int (*ringbuf_output)(void *, u64, u64);                 \
        int (*perf_submit)(void *, void *, u32);                 \
        void *(*ringbuf_reserve)(u64);                           \
        void (*ringbuf_discard)(void *, u64);                    \
        void (*ringbuf_submit)(void *, u64);                     \
        u32 max_entries;                                         \
    };                                                           \
    __attribute__((section("maps/ringbuf"))) struct _name##_table_t _name = {.max_entries = (_pages) * PAGE_SIZE}

/* Selects threads: in each dimension (x, y, z) those with index - lo <= span, as unsigned numbers. {0, ~0} selects all. */
struct gpu_range {
    u32 lo, span;
};

struct gpu_filter {
    struct gpu_range block[3];
    struct gpu_range thread[3];
};

#define GPUBPF_IN(_index, _range) ((u32)((u32)(_index) - (_range).lo) <= (_range).span)

/* Without short-circuit evaluation, this is one predicate and one branch. */
static __always_inline int gpu_selected(const struct gpu_filter *filter)
{
    u64 bx, by, bz, tx, ty, tz;

    bpf_get_block_idx(&bx, &by, &bz);
    bpf_get_thread_idx(&tx, &ty, &tz);
    return GPUBPF_IN(bx, filter->block[0]) & GPUBPF_IN(by, filter->block[1]) & GPUBPF_IN(bz, filter->block[2]) &
           GPUBPF_IN(tx, filter->thread[0]) & GPUBPF_IN(ty, filter->thread[1]) & GPUBPF_IN(tz, filter->thread[2]);
}

/* Selects host threads. A field that is 0 selects all. */
struct gpu_host_filter {
    u64 cgroup;  /* threads in this cgroup (v2), or below it */
    u64 comm[2]; /* name of the thread, padded with zeros */
    u64 tid;
    u64 device, inode; /* the PID namespace in which `tid` is the thread's number */
};

static __always_inline int gpu_host_selected(const struct gpu_host_filter *filter)
{
    if (filter->tid) {
        struct bpf_pidns_info seen = {};
        u32 tid = bpf_get_current_pid_tgid();

        if (!bpf_get_ns_current_pid_tgid(filter->device, filter->inode, &seen, sizeof(seen)))
            tid = seen.pid;
        if (filter->tid != tid)
            return 0;
    }
    if (filter->comm[0]) {
        u64 comm[2] = {};

        bpf_get_current_comm(comm, sizeof(comm));
        if (comm[0] != filter->comm[0] || comm[1] != filter->comm[1])
            return 0;
    }
    if (filter->cgroup) {
        int level;

#pragma unroll
        for (level = 0; level < 16; level++) {
            u64 id = bpf_get_current_ancestor_cgroup_id(level);

            if (id == filter->cgroup)
                return 1;
            if (!id)
                return 0;
        }
        return 0;
    }
    return 1;
}

#endif
