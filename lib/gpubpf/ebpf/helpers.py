"""The helpers that programs may call, by number: on a GPU, and on the host where it is not the kernel that runs them."""

from __future__ import annotations

from gpubpf.ebpf import ranges
from gpubpf.ebpf.maps import SHAPED
from gpubpf.ebpf.ranges import within

# Helpers: name, and the maps that the first argument may be (empty: takes no map).
_STORAGE = ("array", "percpu_array", "hash", "shared_array", *SHAPED)
HELPERS: dict[int, tuple[str, tuple[str, ...]]] = {
    1: ("map_lookup_elem", (*_STORAGE, "param")),
    2: ("map_update_elem", _STORAGE),
    3: ("map_delete_elem", ("hash",)),
    6: ("trace_printk", ()),
    14: ("get_current_pid_tgid", ()),
    25: ("perf_event_output", ("ringbuf",)),
    130: ("ringbuf_output", ("ringbuf",)),
    131: ("ringbuf_reserve", ("ringbuf",)),
    132: ("ringbuf_submit", ()),
    133: ("ringbuf_discard", ()),
    501: ("puts", ()),
    502: ("get_globaltimer", ()),
    503: ("get_block_idx", ()),
    504: ("get_block_dim", ()),
    505: ("get_thread_idx", ()),
    506: ("gpu_membar", ()),
    601: ("gpu_grid_dim", ()),
    602: ("gpu_lane", ()),
    603: ("gpu_warp", ()),
    604: ("gpu_sm", ()),
    605: ("gpu_clock", ()),
    606: ("gpu_global_thread", ()),
    607: ("gpu_max", ()),
    608: ("gpu_active", ()),
    609: ("gpu_log2", ()),
    610: ("gpu_match", ()),
    611: ("gpu_ballot", ()),
    612: ("gpu_shuffle", ()),
    613: ("gpu_kernel", ()),
    614: ("gpu_epoch", ()),
    615: ("gpu_popcount", ()),
    616: ("gpu_lanes_below", ()),
    617: ("gpu_first", ()),
}
# What a host program for launches may call where it runs in the traced process, and not in the kernel.
_NATIVE = ("shared_array",)
NATIVE_HELPERS: dict[int, tuple[str, tuple[str, ...]]] = {
    1: ("map_lookup_elem", (*_NATIVE, "param")),
    2: ("map_update_elem", _NATIVE),
    5: ("ktime_get_ns", ()),
    7: ("get_prandom_u32", ()),
    8: ("get_smp_processor_id", ()),
    14: ("get_current_pid_tgid", ()),
    15: ("get_current_uid_gid", ()),
    16: ("get_current_comm", ()),
    42: ("get_numa_node_id", ()),
    80: ("get_current_cgroup_id", ()),
    120: ("get_ns_current_pid_tgid", ()),
    123: ("get_current_ancestor_cgroup_id", ()),
    125: ("ktime_get_boot_ns", ()),
    160: ("ktime_get_coarse_ns", ()),
}
# Names for messages (enum bpf_func_id).
KERNEL_ONLY = {
    3: "map_delete_elem",
    4: "probe_read",
    6: "trace_printk",
    25: "perf_event_output",
    27: "get_stackid",
    35: "get_current_task",
    45: "probe_read_str",
    67: "get_stack",
    112: "probe_read_user",
    113: "probe_read_kernel",
    114: "probe_read_user_str",
    115: "probe_read_kernel_str",
    130: "ringbuf_output",
    131: "ringbuf_reserve",
    158: "get_current_task_btf",
}
OUT_POINTERS = (503, 504, 505, 601)
# Registers of arguments that may be any number.
ANY_NUMBER = {
    607: 1 << 2,
    609: 1 << 1,
    610: 1 << 1,
    611: 1 << 1,
    612: 1 << 1 | 1 << 2,
    615: 1 << 1,
    617: 1 << 1,
}
NUMBERS = {609: 1, 610: 1, 611: 1, 612: 2, 615: 1, 617: 1}  # helpers that take numbers only, and how many
_NONE = (14, 502, 506, 602, 603, 604, 605, 606, 608, 613, 614, 616)  # that take nothing
COUNTS = {
    **NUMBERS,
    **dict.fromkeys(_NONE, 0),
    1: 2,
    3: 2,
    607: 2,
}  # how many they take, where it is less than five
RESULTS = {
    602: within(0, 31),
    603: within(0, 1023),
    604: within(0, ranges.U32),
    608: within(1, ranges.U32),
    609: within(0, 63),
    610: within(1, ranges.U32),
    611: within(0, ranges.U32),
    615: within(0, 64),
    616: within(0, ranges.U32 >> 1),
    617: within(0, 1),
}
