/* The interface between translated code (C) and the engine (C++): the state of a warp, services, descriptions of an image.
 *
 * A warp is a resumable state machine. Every lane has a program counter: the number of a basic block, unique in the
 * image. Generated code runs the lanes with the lowest program counter, so lanes that are ahead wait where control flow
 * reconverges. Registers that live across basic blocks are arrays of 32 in `frame`. So a warp can stop at the start of
 * any basic block, and the host thread can run another warp. */
#ifndef CUDASIM_DEVICE_ABI_H
#define CUDASIM_DEVICE_ABI_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define CS_ABI 25
#define CS_NO_PC 0xffffffffu
#define CS_AT(LINE, ELAPSED) ((uint64_t)(LINE) | (uint64_t)(ELAPSED) << 32)

enum {
    CS_SWITCH = 0,
    CS_WAIT = 1,
    CS_YIELD = 2
}; /* what a generated function returns: another function has to run; no lane can run; the budget is used up */

enum { /* collective operations */
       CS_OP_SYNC,
       CS_OP_SHFL_UP,
       CS_OP_SHFL_DOWN,
       CS_OP_SHFL_BFLY,
       CS_OP_SHFL_IDX,
       CS_OP_VOTE_ALL,
       CS_OP_VOTE_ANY,
       CS_OP_VOTE_UNI,
       CS_OP_VOTE_BALLOT,
       CS_OP_MATCH_ANY,
       CS_OP_MATCH_ALL,
       CS_OP_REDUX_ADD,
       CS_OP_REDUX_MINU,
       CS_OP_REDUX_MAXU,
       CS_OP_REDUX_MINS,
       CS_OP_REDUX_MAXS,
       CS_OP_REDUX_AND,
       CS_OP_REDUX_OR,
       CS_OP_REDUX_XOR,
       CS_OP_ELECT,
       CS_OP_REDUX_MINF,
       CS_OP_REDUX_MAXF,
       CS_OP_SYNC_TIMES
};
enum { CS_BAR_SYNC, CS_BAR_ARRIVE, CS_BAR_POPC, CS_BAR_AND, CS_BAR_OR };
enum {
    CS_FAULT_ILLEGAL_ADDRESS = 700,
    CS_FAULT_ASSERT = 710,
    CS_FAULT_ILLEGAL_INSTRUCTION = 715,
    CS_FAULT_MISALIGNED = 716,
    CS_FAULT_INVALID_PC = 718,
    CS_FAULT_LAUNCH_FAILED = 719
};
enum { CS_MOST_REPLICAS = 64 }; /* devices of a multicast object */
/* An address in the shared memory of a cluster: the rank of the block, and the offset in the block's shared memory. */
#define CS_MOST_BLOCKS 16u /* of a cluster */
#define CS_RANK_SHIFT 24
#define CS_SHARED_OFFSET ((1u << CS_RANK_SHIFT) - 1)
#define CS_PATCH_LINES \
    (1u << 24)             /* lines from here on are instructions of patch functions (translate/patches.py) */
#define CS_INSTRUCTION 16u /* bytes of program counters, for patch functions */
#define CS_OOB_NAN \
    0x7ff7 /* each 16 bits of a NaN that tensor copies fill with, and that fma.oob takes for 0 */
enum { CS_ROUND_NEAREST, CS_ROUND_DOWN, CS_ROUND_UP, CS_ROUND_ZERO }; /* values of MXCSR.RC */
enum {
    CS_F_ADD,
    CS_F_SUB,
    CS_F_MUL,
    CS_F_FMA,
    CS_F_DIV,
    CS_F_SQRT,
    CS_F_FROM_S64,
    CS_F_FROM_U64,
    CS_F_FROM_F64
};

enum { /* functions of the device runtime (translate/dynamic_parallelism.py) */
       CS_CALL_PARAMETER_BUFFER,
       CS_CALL_LAUNCH,
       CS_CALL_LAST_ERROR,
       CS_CALL_PEEK_ERROR,
       CS_CALL_ERROR_STRING,
       CS_CALL_DEVICE_COUNT,
       CS_CALL_DEVICE,
       CS_CALL_CREATE, /* of a stream or event: they need none, because grids run one after another */
       CS_CALL_NOTHING,
       CS_CALL_MALLOC,
       CS_CALL_FREE,
       CS_CALL_COPY,
       CS_CALL_SET,
       CS_CALL_SET_CONDITIONAL
};

enum { CS_TEX, CS_TEX_LEVEL, CS_TEX_GRAD, CS_TEX_GATHER };
enum { CS_1D = 1, CS_2D, CS_3D, CS_CUBE };
enum { CS_SURFACE_TRAP, CS_SURFACE_CLAMP, CS_SURFACE_ZERO };
enum { CS_QUERY_WIDTH, CS_QUERY_HEIGHT, CS_QUERY_DEPTH, CS_QUERY_LAYERS, CS_QUERY_LEVELS };

struct cs_texture_fetch { /* tex and tld4 of one lane. Floats are bit patterns. */
    uint64_t handle;
    uint32_t operation, geometry, layered;
    uint32_t integer; /* whether the coordinates are .s32 and count texels */
    uint32_t at[3], layer;
    uint32_t level;        /* CS_TEX_LEVEL */
    uint32_t dx[3], dy[3]; /* CS_TEX_GRAD */
    int32_t offset[3];     /* in texels */
    uint32_t component;    /* CS_TEX_GATHER */
    uint32_t result[4];
};

enum { /* what a bulk tensor copy does */
       CS_TENSOR_LOAD,
       CS_TENSOR_STORE,
       CS_TENSOR_ADD,
       CS_TENSOR_MIN,
       CS_TENSOR_MAX,
       CS_TENSOR_INC,
       CS_TENSOR_DEC,
       CS_TENSOR_AND,
       CS_TENSOR_OR,
       CS_TENSOR_XOR
};
enum { /* which elements a bulk tensor copy copies */
       CS_TENSOR_TILE,
       CS_TENSOR_IM2COL,
       CS_TENSOR_ROWS /* four rows: tile::gather4, tile::scatter4 */
};
struct cs_tensor_copy {   /* cp.async.bulk.tensor of one lane */
    uint64_t map, shared; /* generic address of the tensor map; address in the cluster's shared memory */
    uint32_t rank, operation, mode;
    int32_t at[5];      /* CS_TENSOR_ROWS: of the first dimension, and of the four rows */
    uint16_t offset[3]; /* CS_TENSOR_IM2COL: is added to the coordinates between the first and the last */
};

enum { /* fields of a tensor map that kernels change */
       CS_MAP_GLOBAL_ADDRESS,
       CS_MAP_RANK,
       CS_MAP_BOX_DIM,
       CS_MAP_GLOBAL_DIM,
       CS_MAP_GLOBAL_STRIDE,
       CS_MAP_ELEMENT_STRIDE,
       CS_MAP_ELEMTYPE,
       CS_MAP_SWIZZLE_MODE,
       CS_MAP_SWIZZLE_ATOMICITY,
       CS_MAP_INTERLEAVE_LAYOUT,
       CS_MAP_FILL_MODE
};
struct cs_map_change { /* tensormap.replace of one lane */
    uint64_t map;      /* generic address */
    uint32_t field, dimension;
    uint64_t value; /* as PTX defines it */
};

enum { CS_TMEM_ALLOCATE, CS_TMEM_RELEASE, CS_TMEM_LOAD, CS_TMEM_STORE, CS_TMEM_COPY, CS_TMEM_MULTIPLY };
enum { /* shapes of what tcgen05 moves */
       CS_TMEM_32X32B,
       CS_TMEM_16X64B,
       CS_TMEM_16X128B,
       CS_TMEM_16X256B,
       CS_TMEM_16X32BX2,
       CS_TMEM_128X256B,
       CS_TMEM_128X128B,
       CS_TMEM_64X128B_02_13,
       CS_TMEM_64X128B_01_23,
       CS_TMEM_32X128B
};
enum { CS_TMEM_F16, CS_TMEM_TF32, CS_TMEM_F8F6F4, CS_TMEM_I8, CS_TMEM_MXF8F6F4, CS_TMEM_MXF4 }; /* .kind */
struct cs_tensor_memory { /* tcgen05 of a warp, or of one lane */
    uint32_t operation;
    uint32_t address; /* in tensor memory */
    uint32_t count;   /* columns to allocate; repetitions of the shape */
    uint32_t shape;   /* CS_TMEM_*X* */
    uint32_t packed;  /* flag: a register has two columns (.pack::16b, .unpack::16b) */
    uint32_t split;   /* .16x32bx2: from the first address to the second one */
    uint32_t pair;    /* flag: .cta_group::2 */
    uint32_t (*registers)[32];
    /* CS_TMEM_MULTIPLY; a also of CS_TMEM_COPY */
    uint32_t kind, descriptor;
    uint32_t weights;     /* flag: .ws */
    uint32_t a_in_memory; /* flag: a is an address in tensor memory, not a descriptor */
    uint64_t a, b;
    uint32_t keeps;     /* flag: D is added */
    uint32_t halvings;  /* D is divided by two so often before (scale-input-d) */
    uint32_t hidden[8]; /* a bit for each lane, of both blocks of a pair, that D is not written to */
    uint32_t factors;   /* of each row in block scaling; 0: none */
    uint32_t scale_a, scale_b;
};

struct cs_surface_access { /* suld, sust and sured of one lane */
    uint64_t handle;
    uint32_t geometry, layered, outside; /* outside: CS_SURFACE_* */
    int32_t at[3];                       /* the first in bytes; in texels for surface_put and surface_texel */
    uint32_t layer;
    uint32_t size; /* bytes */
};

struct cs_warp;
struct cs_function;

struct cs_services { /* called by generated code; those marked * do not return after a fault */
    uint32_t (*pick)(struct cs_warp *w); /* chooses the lanes to run; 0: none can run */
    int (*collective)(struct cs_warp *w, uint32_t mask, uint32_t op,
                      uint32_t next_pc); /* 1: continue; 0: call pick */
    void (*barrier)(struct cs_warp *w, uint32_t mask, uint32_t kind, uint32_t next_pc); /* then call pick */
    void (*bar_sync)(struct cs_warp *w, uint32_t mask, uint32_t number, uint32_t count,
                     uint32_t next_pc); /* then call pick */
    void (*execute)(struct cs_warp *w, uint32_t mask,
                    uint32_t op); /* a collective that all its members have reached */
    void *(*resolve)(struct cs_warp *w, uint64_t address, uint32_t size,
                     uint32_t access); /* * host address of a generic address */
    void (*fault)(struct cs_warp *w, uint32_t code, uint64_t address, uint32_t size, uint32_t access); /* * */
    void (*push)(struct cs_warp *w, uint32_t mask, uint32_t function); /* * recursion */
    void (*pop)(struct cs_warp *w, uint32_t mask, uint32_t function);
    uint32_t (*indirect)(struct cs_warp *w, uint64_t address); /* * entry pc of a function's address */
    uint32_t (*vprintf)(struct cs_warp *w, uint64_t format, uint64_t arguments); /* * */
    uint64_t (*allocate)(struct cs_warp *w, uint64_t size);
    void (*release)(struct cs_warp *w, uint64_t address); /* * */
    void (*assertfail)(struct cs_warp *w, uint64_t message, uint64_t file, uint32_t line,
                       uint64_t function); /* * */
    uint64_t (*clock)(struct cs_warp *w);
    uint64_t (*globaltimer)(struct cs_warp *w);
    void (*nanosleep)(struct cs_warp *w, uint32_t mask, uint32_t next_pc); /* then call pick */
    float (*round32)(uint32_t op, uint32_t mode, float a, float b, float c);
    double (*round64)(uint32_t op, uint32_t mode, double a, double b, double c);
    float (*convert32)(uint32_t op, uint32_t mode, int64_t i, double d);
    double (*convert64)(uint32_t op, uint32_t mode, int64_t i);
    void (*texture_fetch)(struct cs_warp *w, struct cs_texture_fetch *fetch); /* * */
    void *(*surface)(struct cs_warp *w,
                     const struct cs_surface_access *access); /* * host address of the bytes */
    void (*surface_put)(struct cs_warp *w, const struct cs_surface_access *access, const uint32_t *values,
                        uint32_t count); /* * sust.p */
    void *(*surface_texel)(
        struct cs_warp *w, const struct cs_surface_access *access,
        uint32_t *is_signed); /* * sured.p: host address, and whether it has signed integers */
    uint32_t (*texture_query)(struct cs_warp *w, uint64_t handle, uint32_t what, uint32_t level); /* * */
    uint64_t (*runtime)(struct cs_warp *w, uint32_t call,
                        const uint64_t *arguments); /* * the device runtime, for the current lane */
    uint32_t (*tensor_copy)(struct cs_warp *w, const struct cs_tensor_copy *copy); /* * bytes of the box */
    void (*change_map)(struct cs_warp *w, const struct cs_map_change *change);     /* * */
    void (*cluster_barrier)(struct cs_warp *w, uint32_t mask, uint32_t waits,
                            uint32_t next_pc); /* * arrive, or wait; then call pick */
    void *(*cluster_shared)(
        struct cs_warp *w, uint64_t address, uint32_t size,
        uint32_t access); /* * host address of an address in the cluster's shared memory */
    uint32_t (*replicas)(struct cs_warp *w, uint64_t address, uint32_t size, uint32_t access,
                         uint8_t **out); /* * the memory of each device at an address of a multicast object */
    uint32_t (*tensor_memory)(
        struct cs_warp *w, const struct cs_tensor_memory *request); /* * the address of what it allocates */
};

struct cs_warp {
    /* control flow: the lanes `mask` run at `pc`; `next` is the lowest pc of the other runnable lanes */
    uint32_t mask, pc, next;
    uint32_t runnable, exited, parked; /* lanes that can run; that have exited; that wait in a collective */
    int32_t budget;                    /* backward jumps (virtual clock: ns) until the warp yields */
    volatile uint32_t lane;            /* of the current access, for faults */
    union {                            /* where it is: `at` is both, as CS_AT() makes it */
        struct {
            volatile uint32_t line,
                elapsed; /* PTX line; virtual clock: ns since the start of the basic block */
        };
        volatile uint64_t at;
    };
    const struct cs_services *api;
    uint8_t *frame; /* registers of the functions in the call chain */
    uint8_t *args;  /* 32 × args_stride: arguments and results of calls in flight */
    uint8_t *shared;
    uint8_t *local; /* 32 × local_stride */
    const uint8_t *params;
    const uint64_t *vars; /* addresses of module variables */
    uint64_t code_base;   /* a function's address is code_base + 16 * (index + 1) */
    const uint32_t *shared_offsets;
    uint64_t base, limit;              /* device region */
    uint64_t constants, constant_size; /* the part of it with constant variables */
    uint64_t shared_window, local_window, param_window;
    uint32_t shared_size, local_size, local_stride, param_size;
    /* Shared memory has `total_shared` bytes and begins at the address `shared_at` in the cluster. Only where that is 0, addresses
     * below shared_size are offsets from `shared`. In the other blocks of a cluster, shared_size is 0. */
    uint32_t total_shared, shared_at;
    uint32_t cluster_nctaid[3], explicit_cluster;
    uint32_t ntid[3], ctaid[3], nctaid[3];
    uint32_t warpid, nwarpid, smid, nsmid, dynamic_shared;
    uint32_t hostile;           /* hostile mode: 1, else 0 */
    uint64_t gridid, workspace; /* workspace: of the grid barrier (%envreg1, %envreg2); 0: none */
    uint64_t userdata,
        first_pc; /* of patch functions (translate/patches.py): their data, the module's first PC */
    void *block;
    uint32_t pcs[32];   /* by lane; valid for lanes outside of `mask` */
    uint32_t retpc[32]; /* by lane: return address for the function that is being called */
    uint32_t lsp[32];   /* recursion: bytes of local memory below the current activation */
    uint32_t sp[32],
        stack_floor; /* alloca: lowest allocated byte; lowest byte that alloca may use, in addition to lsp */
    uint32_t tid[3][32];
    uint64_t ca[32], cb[32], cc[32], cr[32]; /* operands and results of collectives and barriers */
    uint32_t cm[32], cop[32];
    uint8_t cp[32];
    uint32_t resume_mask, resume_pc; /* engine: all these lanes are at this pc; 0: not known */
    uint64_t time[32]
        __attribute__((aligned(32))); /* virtual clock: of each lane, at the start of the basic block */
    uint32_t asleep;                  /* engine: lanes that sleep (real clock) */
    uint32_t ordered, waiting_turn,
        turn_lanes; /* ordered kernel: whether it is one; lanes that wait for their turn to communicate; lanes whose turn it is */
};

struct cs_field {
    uint32_t offset, width;
}; /* width in bytes per lane; 0: one bit per lane (a predicate) */

struct cs_function {
    const char *name;
    uint32_t entry_pc, frame_offset, nfields, scc_local;
    const struct cs_field *fields;
};

struct cs_param {
    uint32_t offset, size, align;
};

struct cs_kernel {
    const char *name;
    uint32_t entry_pc, nparams, param_bytes, static_shared, local, registers, frame_bytes, recursive;
    uint32_t
        reserved_shared; /* bytes before static shared memory, reserved for the system (%reserved_smem_offset) */
    uint32_t
        ordered; /* virtual clock: its threads observe each other, so they must communicate in the order of time */
    uint32_t reqntid[3], maxntid[3], maxnreg;
    uint32_t reqnctapercluster[3], maxclusterrank, explicit_cluster;
    const struct cs_param *params;
    const uint32_t *shared_offsets;
    uint32_t nvars;
    const uint32_t *vars;
    uint32_t nparts; /* parts that contain its code, if the image does not */
    const uint32_t *parts;
    const char *refused; /* why it cannot run; null if it can */
};

struct cs_code {
    uint32_t function;
    int (*run)(struct cs_warp *w);
};

struct cs_part { /* exported by a shared object as `cudasim_part`: the code of some functions of an image */
    uint32_t abi, nfunctions;
    const struct cs_code *functions; /* a portable one has its number in the image: cs_portable */
    uint32_t
        nplaces; /* of a portable part: what the image says of its function, copied here before it runs */
    uint32_t *places;
};

/* A part with one function whose code is the same in every image that has it. All images share the compiled part. */
struct cs_portable {
    const char *digest; /* of its C text; null: this part is not portable */
    uint32_t function, nplaces;
    const uint32_t *places;
};

struct cs_reloc {
    uint64_t offset, mask;
    int64_t addend;
    uint32_t width, function, index, shift;
};

struct cs_variable {
    const char *name;
    uint64_t size, align;
    uint32_t constant, visible, external, managed;
    const uint8_t *initial;
    uint64_t initial_size;
    const struct cs_reloc *relocs;
    uint32_t nrelocs;
};

struct cs_image {
    uint32_t abi, ptx_version, target, args_stride;
    uint32_t nkernels, nfunctions, nvariables, npcs;
    uint32_t nshared; /* shared variables: the length of cs_kernel.shared_offsets */
    const struct cs_kernel *kernels;
    const struct cs_function *functions;
    const struct cs_variable *variables;
    const uint16_t *function_of_pc;
    uint32_t virtual_clock;
    uint32_t nparts;
    const struct cs_portable *portable; /* by number of a part */
};

#ifdef __cplusplus
}
#endif
#endif
