"""The table of helpers: what the library knows about each function that an eBPF program calls by number.

The verifier, its stand-in for the kernel, and the lowering take these facts from here. A test compares the table with the C
header, the agent, and the documentation.

Numbers below 500 are the Linux kernel's (enum bpf_func_id in include/uapi/linux/bpf.h), 501 to 511 bpftime's, from 601 on ours.
Programs run on one of three sides: on the GPU; on the host in the traced process ("native"); on the host in the Linux kernel,
whose verifier knows its helpers itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum, auto
from functools import cached_property
from typing import NamedTuple

from gpubpf.ebpf.bytecode import STACK_SIZE
from gpubpf.ebpf.maps import LONG_PRINT_ARGUMENTS, MAX_RECORD, PRINT_ARGUMENTS, SHAPED
from gpubpf.record import Record

_FIRST_NOT_OF_KERNEL = 500
_U32, _U64 = (1 << 32) - 1, (1 << 64) - 1


class ArgumentKind(Enum):
    """What an argument must be."""

    CONTEXT = auto()  # the context that the program was given, or NULL
    MAP = auto()
    KEY = auto()  # address of a readable key of the map
    VALUE = auto()  # address of a readable value of the map
    UPDATE_FLAGS = auto()  # constant: BPF_ANY, BPF_NOEXIST or BPF_EXIST
    NO_FLAGS = auto()  # constant 0
    NUMBER = auto()  # anything but an address
    SIZE = auto()  # constant, in bytes: how long the argument of kind BUFFER or TEXT is
    RECORD = auto()  # address of a readable record for the ring buffer
    RECORD_SIZE = auto()  # constant, in bytes: the size of the ring buffer's records
    SHORT_RECORD_SIZE = auto()  # constant, in bytes: at most the size of the ring buffer's records
    RESERVED = auto()  # address of a record that was reserved; the call ends the reservation
    BUFFER = auto()  # address of memory that the helper fills
    RESULT = auto()  # address of a u64 that the helper writes, below 2^32
    CELL = auto()  # address of a u64 in the value of a map, which the helper changes atomically
    TEXT = auto()  # address of a constant text on the stack
    PRINTED = auto()  # a number, if the text has a conversion for this argument
    VALUES = auto()  # address of an array of u64 on the stack, with a value for each conversion of the text; NULL if there are none
    VALUES_SIZE = auto()  # constant: the size of this array in bytes


class HelperArgument(NamedTuple):
    """One argument, with its name in the C header. `least` and `most`: bounds of a size, in bytes."""

    kind: ArgumentKind
    name: str
    least: int = 0
    most: int = 0


class Pointer(Enum):
    """A result that is an address, or NULL."""

    VALUE = auto()  # the address of a value of the map
    RECORD = auto()  # the address of a record in the ring buffer


class StandIn(Enum):
    """What takes the helper's place in the program that the kernel's verifier checks."""

    ITSELF = auto()  # the kernel has this helper
    NUMBER = auto()  # a helper without arguments that returns an unknown number
    STORES = auto()  # stores of unknown numbers through the arguments of kind RESULT
    UPDATE = auto()  # a load and a store through the argument of kind CELL
    PRINTK = auto()  # bpf_trace_printk, with the length of the text
    VPRINTK = auto()  # loads of the argument of kind VALUES, then as PRINTK: older kernels than 5.16 have no bpf_trace_vprintk
    RINGBUF = auto()  # bpf_ringbuf_output, which takes no context


class Use(Record):
    """How programs of one side use a helper.

    lowering  the name of the function that lowers the call (LOWERINGS in `lower/helper_calls.py`)
    operand   the operand of that function
    maps      the kinds of map that the helper works on
    points    the points where the helper may be called; () for all
    """

    lowering: str
    operand: str = ""
    maps: tuple[str, ...] = ()
    points: tuple[str, ...] = ()


class Helper(Record):
    """A helper.

    name            what programs call it in C
    result          the least and the greatest number that it returns, as a u64; or the kind of address
    device, native  its use on this side; None on a side that does not have the helper
    wide            `result` in warps of 64 lanes, if it differs
    real_time       whether it returns the real time even if the measurement's clock is virtual
    instead         for a helper that GPUs do not have: the helper to use there
    """

    number: int
    name: str
    arguments: tuple[HelperArgument, ...] = ()
    result: tuple[int, int] | Pointer = (0, _U64)
    device: Use | None = None
    native: Use | None = None
    stand_in: StandIn = StandIn.ITSELF
    real_time: bool = False
    wide: tuple[int, int] | None = None
    instead: str = ""

    def result_in(self, lanes: int) -> tuple[int, int] | Pointer:
        """Return the helper's result in warps of at most `lanes` lanes."""
        return self.wide if self.wide is not None and lanes > 32 else self.result

    @property
    def in_kernel(self) -> bool:
        return self.number < _FIRST_NOT_OF_KERNEL

    @cached_property
    def registers(self) -> Mapping[ArgumentKind, tuple[int, ...]]:
        """The registers of the arguments of each kind, from 1."""
        found: dict[ArgumentKind, tuple[int, ...]] = {}
        for register, argument in enumerate(self.arguments, 1):
            found[argument.kind] = (*found.get(argument.kind, ()), register)
        return found

    def register(self, kind: ArgumentKind) -> int:
        """Return the register of the only argument of this kind."""
        (register,) = self.registers[kind]
        return register


_STORAGE = ("array", "percpu_array", "hash", "shared_array", *SHAPED)
_SHARED, _RING = ("shared_array",), ("ringbuf",)
_CTX = HelperArgument(ArgumentKind.CONTEXT, "ctx")
_MAP = HelperArgument(ArgumentKind.MAP, "map")
_KEY = HelperArgument(ArgumentKind.KEY, "key")
_MAP_VALUE = HelperArgument(ArgumentKind.VALUE, "value")
_UPDATE_FLAGS = HelperArgument(ArgumentKind.UPDATE_FLAGS, "flags")
_NO_FLAGS = HelperArgument(ArgumentKind.NO_FLAGS, "flags")
_FLAGS = HelperArgument(ArgumentKind.NUMBER, "flags")
_DATA = HelperArgument(ArgumentKind.RECORD, "data")
_RESERVED = HelperArgument(ArgumentKind.RESERVED, "data")
_RECORD_SIZE = HelperArgument(ArgumentKind.RECORD_SIZE, "size", 1, MAX_RECORD)
_SHORT_RECORD_SIZE = HelperArgument(ArgumentKind.SHORT_RECORD_SIZE, "size", 1, MAX_RECORD)
_TEXT = HelperArgument(ArgumentKind.TEXT, "text")
_PRINTED = tuple(HelperArgument(ArgumentKind.PRINTED, f"value{n}") for n in range(1, PRINT_ARGUMENTS + 1))
_BUFFER = HelperArgument(ArgumentKind.BUFFER, "buffer")
_XYZ = tuple(HelperArgument(ArgumentKind.RESULT, axis) for axis in "xyz")
_CELL = HelperArgument(ArgumentKind.CELL, "cell")
_VALUE = HelperArgument(ArgumentKind.NUMBER, "value")
_ANY, _32_BITS = (0, _U64), (0, _U32)
# The host's clocks are related to the GPU's only afterwards, from readings before and after (docs/timing.md).
_TIMER = "bpf_get_globaltimer"
_FUNCTION = Use("function")  # a C function of the agent with the same arguments


def _number(name: str) -> HelperArgument:
    return HelperArgument(ArgumentKind.NUMBER, name)


def _size(least: int, most: int) -> HelperArgument:
    return HelperArgument(ArgumentKind.SIZE, "size", least, most)


# fmt: off
_TABLE = (
    # Maps and output.
    Helper(1, "bpf_map_lookup_elem", (_MAP, _KEY), Pointer.VALUE,
           Use("lookup", maps=(*_STORAGE, "param")), Use("lookup", maps=(*_SHARED, "param"))),
    Helper(2, "bpf_map_update_elem", (_MAP, _KEY, _MAP_VALUE, _UPDATE_FLAGS), _ANY,
           Use("update", maps=_STORAGE), Use("update", maps=_SHARED)),
    Helper(3, "bpf_map_delete_elem", (_MAP, _KEY), _ANY, Use("delete", maps=_STORAGE)),
    Helper(6, "bpf_trace_printk", (_TEXT, _size(1, STACK_SIZE), *_PRINTED), _ANY, Use("print")),
    Helper(177, "bpf_trace_vprintk",
           (_TEXT, _size(1, STACK_SIZE), HelperArgument(ArgumentKind.VALUES, "values"),
            HelperArgument(ArgumentKind.VALUES_SIZE, "size", 0, 8 * LONG_PRINT_ARGUMENTS)),
           _ANY, Use("print_array"), stand_in=StandIn.VPRINTK),
    Helper(25, "bpf_perf_event_output", (_CTX, _MAP, _FLAGS, _DATA, _SHORT_RECORD_SIZE), _ANY,
           Use("output", maps=_RING), stand_in=StandIn.RINGBUF),
    Helper(130, "bpf_ringbuf_output", (_MAP, _DATA, _RECORD_SIZE, _FLAGS), _ANY, Use("output", maps=_RING)),
    Helper(131, "bpf_ringbuf_reserve", (_MAP, _RECORD_SIZE, _NO_FLAGS), Pointer.RECORD,
           Use("reserve", maps=_RING)),
    Helper(132, "bpf_ringbuf_submit", (_RESERVED, _FLAGS), _ANY, Use("submit")),
    Helper(133, "bpf_ringbuf_discard", (_RESERVED, _FLAGS), _ANY, Use("discard")),
    # The running thread, and the time.
    Helper(5, "bpf_ktime_get_ns", native=_FUNCTION, real_time=True, instead=_TIMER),
    Helper(7, "bpf_get_prandom_u32", native=_FUNCTION),
    Helper(8, "bpf_get_smp_processor_id", native=_FUNCTION, instead="bpf_get_sm_id"),
    Helper(14, "bpf_get_current_pid_tgid", (), _ANY, Use("argument", "pid_tgid"), _FUNCTION),  # on a GPU: the thread that launched
    Helper(15, "bpf_get_current_uid_gid", native=_FUNCTION),
    Helper(16, "bpf_get_current_comm", (_BUFFER, _size(1, 64)), native=_FUNCTION),
    Helper(42, "bpf_get_numa_node_id", native=_FUNCTION),
    Helper(80, "bpf_get_current_cgroup_id", native=_FUNCTION),
    # Returns -EINVAL: a process knows only its own PID namespace, for which helper 14 returns the numbers.
    Helper(120, "bpf_get_ns_current_pid_tgid",
           (_number("device"), _number("inode"), _BUFFER, _size(8, 8)),
           native=Use("error", "-22")),
    Helper(123, "bpf_get_current_ancestor_cgroup_id", (_number("level"),), native=_FUNCTION),
    Helper(125, "bpf_ktime_get_boot_ns", native=_FUNCTION, real_time=True, instead=_TIMER),
    Helper(160, "bpf_ktime_get_coarse_ns", native=_FUNCTION, real_time=True, instead=_TIMER),
    # Helpers that only the kernel has, and whose arguments the kernel checks. The table has their names, and which take the context.
    Helper(4, "bpf_probe_read"),
    Helper(27, "bpf_get_stackid", (_CTX, _MAP, _FLAGS)),
    Helper(35, "bpf_get_current_task"),
    Helper(45, "bpf_probe_read_str"),
    Helper(67, "bpf_get_stack", (_CTX, _BUFFER, _size(0, 0), _FLAGS)),
    Helper(112, "bpf_probe_read_user"),
    Helper(113, "bpf_probe_read_kernel"),
    Helper(114, "bpf_probe_read_user_str"),
    Helper(115, "bpf_probe_read_kernel_str"),
    Helper(158, "bpf_get_current_task_btf"),
    Helper(173, "bpf_get_func_ip", (_CTX,)),
    Helper(174, "bpf_get_attach_cookie", (_CTX,)),
    Helper(208, "bpf_ktime_get_tai_ns", real_time=True, instead=_TIMER),
    # Helpers of bpftime.
    Helper(501, "gpu_puts", (_TEXT,), _ANY, Use("print"), stand_in=StandIn.PRINTK),
    Helper(502, "bpf_get_globaltimer", (), _ANY, Use("special", "globaltimer"), stand_in=StandIn.NUMBER),
    Helper(503, "bpf_get_block_idx", _XYZ, _ANY, Use("index", "ctaid"), stand_in=StandIn.STORES),
    Helper(504, "bpf_get_block_dim", _XYZ, _ANY, Use("index", "ntid"), stand_in=StandIn.STORES),
    Helper(505, "bpf_get_thread_idx", _XYZ, _ANY, Use("index", "tid"), stand_in=StandIn.STORES),
    Helper(506, "bpf_gpu_membar", (), _ANY, Use("special", "membar"), stand_in=StandIn.NUMBER),
    Helper(507, "bpf_cuda_exit", (), _ANY, Use("special", "exit", points=("entry",)), stand_in=StandIn.NUMBER),
    Helper(508, "bpf_get_grid_dim", _XYZ, _ANY, Use("index", "nctaid"), stand_in=StandIn.STORES),
    Helper(509, "bpf_get_sm_id", (), _32_BITS, Use("special", "sm"), stand_in=StandIn.NUMBER),
    Helper(510, "bpf_get_warp_id", (), _32_BITS, Use("special", "warp_slot"), stand_in=StandIn.NUMBER),
    Helper(511, "bpf_get_lane_id", (), (0, 63), Use("special", "lane"), stand_in=StandIn.NUMBER),
    # Helpers of gpubpf.
    Helper(601, "gpu_grid_dim", _XYZ, _ANY, Use("index", "nctaid"), stand_in=StandIn.STORES),
    Helper(602, "gpu_lane", (), (0, 31), Use("special", "lane"), stand_in=StandIn.NUMBER, wide=(0, 63)),
    Helper(603, "gpu_warp", (), (0, 1023), Use("warp"), stand_in=StandIn.NUMBER),
    Helper(604, "gpu_sm", (), _32_BITS, Use("special", "sm"), stand_in=StandIn.NUMBER),
    Helper(605, "gpu_clock", (), _ANY, Use("special", "clock"), stand_in=StandIn.NUMBER),
    Helper(606, "gpu_global_thread", (), _ANY, Use("thread"), stand_in=StandIn.NUMBER),
    Helper(607, "gpu_max", (_CELL, _VALUE), _ANY, Use("maximum"), stand_in=StandIn.UPDATE),
    Helper(608, "gpu_active", (), (1, _U32), Use("lanes", "active"), stand_in=StandIn.NUMBER, wide=(1, _U64)),
    Helper(609, "gpu_log2", (_VALUE,), (0, 63), Use("logarithm"), stand_in=StandIn.NUMBER),
    Helper(610, "gpu_match", (_VALUE,), (1, _U32), Use("lanes", "match"), stand_in=StandIn.NUMBER, wide=(1, _U64)),
    Helper(611, "gpu_ballot", (_number("predicate"),), _32_BITS, Use("lanes", "ballot"), stand_in=StandIn.NUMBER, wide=_ANY),
    Helper(612, "gpu_shuffle", (_VALUE, _number("lane")), _ANY, Use("shuffle"), stand_in=StandIn.NUMBER),
    Helper(613, "gpu_kernel", (), _ANY, Use("argument", "kernel"), stand_in=StandIn.NUMBER),
    Helper(614, "gpu_epoch", (), _ANY, Use("argument", "epoch"), stand_in=StandIn.NUMBER),
    Helper(615, "gpu_popcount", (_VALUE,), (0, 64), Use("popcount"), stand_in=StandIn.NUMBER),
    Helper(616, "gpu_lanes_below", (), (0, _U32 >> 1), Use("special", "lanes_below"), stand_in=StandIn.NUMBER, wide=(0, _U64 >> 1)),
    Helper(617, "gpu_first", (_number("lanes"),), (0, 1), Use("first"), stand_in=StandIn.NUMBER),
    Helper(618, "gpu_warp_size", (), (32, 32), Use("warp_size"), stand_in=StandIn.NUMBER, wide=(32, 64)),
    Helper(619, "gpu_uniform", (_VALUE,), (0, 1), Use("uniform"), stand_in=StandIn.NUMBER),
    Helper(620, "gpu_seldom", (), _ANY, Use("special", "seldom"), stand_in=StandIn.NUMBER),
    Helper(621, "gpu_any", (_number("predicate"),), (0, 1), Use("any"), stand_in=StandIn.NUMBER),
    Helper(622, "gpu_group", (), _32_BITS, Use("special", "group"), stand_in=StandIn.NUMBER),
    Helper(623, "gpu_global_warp", (), _32_BITS, Use("global_warp"), stand_in=StandIn.NUMBER),
    Helper(624, "gpu_keep", (_VALUE,), _ANY, Use("keep", points=("access",)), stand_in=StandIn.NUMBER),
)
# fmt: on
HELPERS: Mapping[int, Helper] = {helper.number: helper for helper in _TABLE}
REAL_TIME = frozenset(helper.number for helper in _TABLE if helper.real_time)
TAKE_CONTEXT = frozenset(helper.number for helper in _TABLE if ArgumentKind.CONTEXT in helper.registers)


def number_of(name: str) -> int:
    """Return the number of the helper that C text calls `name`."""
    return next(helper.number for helper in _TABLE if helper.name == name)
