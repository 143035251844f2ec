/*
 * clang.h: what bcc provides to a C text, for clang alone (clang.py). Only what device programs need is here: maps are read with the
 * helpers of the Linux kernel, by their numbers (enum bpf_func_id in include/uapi/linux/bpf.h).
 */
typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef signed char s8;
typedef short s16;
typedef int s32;
typedef long long s64;

#define NULL ((void *)0)
#define PAGE_SIZE 4096
#define BPF_NOEXIST 1
#define BPF_F_NO_PREALLOC 1
#define BPF_F_MMAPABLE 1024
#define __always_inline inline __attribute__((always_inline))
#define inline inline __attribute__((always_inline)) /* bcc's programs have no calls either */

struct bpf_pidns_info {
    u32 pid, tgid;
};

static void *(*bpf_map_lookup_elem)(void *map, const void *key) = (void *)1;
static long (*bpf_map_update_elem)(void *map, const void *key, const void *value, u64 flags) = (void *)2;
static long (*bpf_map_delete_elem)(void *map, const void *key) = (void *)3;
static long (*gpubpf_trace_printk)(const char *text, u32 size, ...) = (void *)6;
static u64 (*bpf_get_current_pid_tgid)(void) = (void *)14;
static long (*bpf_get_current_comm)(void *buffer, u32 size) = (void *)16;
static long (*bpf_perf_event_output)(void *ctx, void *map, u64 flags, void *data, u64 size) = (void *)25;
static long (*bpf_get_ns_current_pid_tgid)(u64 device, u64 inode, struct bpf_pidns_info *to,
                                           u32 size) = (void *)120;
static u64 (*bpf_get_current_ancestor_cgroup_id)(int level) = (void *)123;
static long (*bpf_ringbuf_output)(void *map, void *data, u64 size, u64 flags) = (void *)130;
static void *(*bpf_ringbuf_reserve)(void *map, u64 size, u64 flags) = (void *)131;
static void (*bpf_ringbuf_submit)(void *data, u64 flags) = (void *)132;
static void (*bpf_ringbuf_discard)(void *data, u64 flags) = (void *)133;

/* The text is an array on the stack, as bcc makes one of it. */
#define bpf_trace_printk(_text, ...)                                                    \
    ({                                                                                  \
        char _gpubpf_text[] = _text;                                                    \
        gpubpf_trace_printk(_gpubpf_text, sizeof(_gpubpf_text), ##__VA_ARGS__);         \
    })

/* What clang.py makes of MAP.lookup(key) and the like. */
#define GPUBPF_lookup(_map, _key) ((typeof(_map.leaf) *)bpf_map_lookup_elem(&_map, _key))
#define GPUBPF_update(_map, _key, _value) bpf_map_update_elem(&_map, _key, _value, 0)
#define GPUBPF_insert(_map, _key, _value) bpf_map_update_elem(&_map, _key, _value, BPF_NOEXIST)
#define GPUBPF_delete(_map, _key) bpf_map_delete_elem(&_map, _key)
#define GPUBPF_lookup_or_try_init(_map, _key, _value)                        \
    ({                                                                       \
        typeof(_map.leaf) *_gpubpf_there = bpf_map_lookup_elem(&_map, _key); \
        if (!_gpubpf_there) {                                                \
            bpf_map_update_elem(&_map, _key, _value, BPF_NOEXIST);           \
            _gpubpf_there = bpf_map_lookup_elem(&_map, _key);                \
        }                                                                    \
        _gpubpf_there;                                                       \
    })
#define GPUBPF_ringbuf_output(_map, _data, _size, _flags) bpf_ringbuf_output(&_map, _data, _size, _flags)
#define GPUBPF_ringbuf_reserve(_map, _size) bpf_ringbuf_reserve(&_map, _size, 0)
#define GPUBPF_ringbuf_submit(_map, _data, _flags) bpf_ringbuf_submit(_data, _flags)
#define GPUBPF_ringbuf_discard(_map, _data, _flags) bpf_ringbuf_discard(_data, _flags)
