"""A device program and where it is attached: one value, from the tool that attaches it to the injectors of PTX and AMD code."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

from gpubpf.record import Record, replace

if TYPE_CHECKING:
    from gpubpf.ebpf.sampling import Unit

# Loops that loads or atomics end, with the loops around them; the other loops.
LOOPS = ("all", "waiting", "others")
Program = TypeVar("Program", covariant=True)
Lowered = TypeVar("Lowered")


class Probe(Record, Generic[Program]):
    """A program and the places in kernels where it runs.

    program: the name of the C function; for the injectors, the program lowered for the device.
    point: one of `bytecode.DEVICE_POINTS`.
    accumulate: the kind of work to count for the program: one of `bytecode.WORK`, or of `cost.ADDED` and `cost.SKIPPED`.
    kinds: at `access` and `value`, the kinds of accesses (load, store, atomic, async); () means all.
    spaces: at `access` and `value`, the spaces of accesses (global, shared, local, const); () means all.
    functions: at `function_entry` and `function_exit`, globs of demangled names; () means all.
    opcodes: at `float` and `instruction`, globs of opcodes (`computation.is_chosen`); () means all.
    sampled: "block" or "warp" to run the program only in some blocks or warps, which each launch chooses again; "" for all. All
        programs of a kernel have the same value, except `cost.SAMPLED_COST`, which runs in all blocks and warps.
    alike: a number of bytes, a power of two, or 0. At `access`, two accesses by the same lanes are alike if their addresses differ
        by a multiple of `alike`, or by any constant where the addresses of all lanes are equal modulo `alike`. The program does the
        same for both, so only the first of the alike loads or stores in a basic block gets a probe (`Site.like`). A load and a store
        are alike if no program depends on which of both it is (`inject.alike.moves_alike`). 0: each access gets a probe.
    loops: at `basic_block`, one of LOOPS: run the program only at heads of these loops. At `value`, not "": only at loads and atomics
        that alone decide whether a loop ends (`ptx/loops.py`). At `entry` and `exit`, not "": only in kernels that may not end.
    repeats: at `access`, run the program only for loads and stores that are alike to an earlier access.
    keeps: at `access`, run the program only for accesses that can be deferred (`inject/deferral.py`), in place of those without this
        flag and `repeats`. It keeps a number for the program at `access_again` that is attached to the same kinds and spaces.
        `alike` is not 0.
    kernels: `--kernel` patterns; () means all kernels. The injectors do not read it: each kernel has its own list of probes.
    unconditional: set by the injector of PTX where only chosen threads reach the probe (split.py), so that the probe does not
        test whether its thread is chosen.
    """

    program: Program
    point: str
    accumulate: str | None = None
    kinds: tuple[str, ...] = ()
    spaces: tuple[str, ...] = ()
    functions: tuple[str, ...] = ()
    opcodes: tuple[str, ...] = ()
    sampled: Unit | Literal[""] = ""
    alike: int = 0
    repeats: bool = False
    keeps: bool = False
    loops: str = ""
    kernels: tuple[str, ...] = ()
    unconditional: bool = False

    def with_program(self, program: Lowered) -> Probe[Lowered]:
        """Return a probe at the same places with another form of its program."""
        changed: Any = replace(self, program=program)  # type: ignore[arg-type]
        return changed

    @property
    def checks_choice(self) -> bool:
        """Whether the probe tests that its thread is chosen."""
        return bool(self.sampled) and not self.unconditional
