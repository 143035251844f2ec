"""Device programs as the lowering makes them, written by hand for tests of the injector."""

from __future__ import annotations

from gpubpf.lower.fragment import Argument, Fragment


def tally(map_name: str = "tallies") -> Fragment:
    """tallies[thread].runs += 1, .work += work; its registers and labels have names that an application uses too."""
    return Fragment(
        "tally",
        f"""{{
.reg .pred %p<3>; .reg .b64 %rd<12>; .reg .b32 %r<12>;
mov.u32 %r1, %tid.x; mov.u32 %r2, %ctaid.x; mov.u32 %r3, %ntid.x; mad.lo.u32 %r4, %r2, %r3, %r1;
cvt.u64.u32 %rd1, %r4;
setp.ge.u64 %p1, %rd1, %gpubpf_{map_name}_room;
@%p1 bra $L__BB0_1;
shl.b64 %rd2, %rd1, 4;
add.u64 %rd3, %gpubpf_{map_name}, %rd2;
ld.u64 %rd4, [%rd3]; add.u64 %rd4, %rd4, 1; st.u64 [%rd3], %rd4;
ld.u64 %rd5, [%rd3+8]; add.u64 %rd5, %rd5, %gpubpf_work; st.u64 [%rd3+8], %rd5;
$L__BB0_1:
}}""",
        (
            Argument(map_name, "b64", "map_base", map_name),
            Argument(f"{map_name}_room", "b64", "map_capacity", map_name),
            Argument("work", "b64", "context", field="work"),
        ),
    )


# times[thread] = {globaltimer, site}
TIME = Fragment(
    "time",
    """{
.reg .b64 %rd<4>; .reg .b32 %r<3>;
mov.u64 %rd1, %globaltimer; mov.u32 %r1, %tid.x;
mul.wide.u32 %rd2, %r1, 16; add.u64 %rd2, %rd2, %gpubpf_times;
st.u64 [%rd2], %rd1; st.u32 [%rd2+8], %gpubpf_site;
}""",
    (Argument("times", "b64", "map_base", "times"), Argument("site", "b32", "context", field="site")),
)


# --- what programs at other points are told -------------------------------------------------------------

ROOM = 4096  # records of a log
FIELDS = {
    "access": ("site", "address", "width", "space", "kind", "active", "effect"),
    "function_entry": ("site", "args", "arg0", "arg1"),
    "function_exit": ("site", "low", "high"),
    "basic_block": ("site", "active"),
    "branch": ("site", "active", "taken"),
    "value": ("site", "type", "effect", "active", "low", "high", "old_low", "old_high"),
    "barrier_arrive": ("site", "barrier", "threads"),
    "barrier_leave": ("site", "barrier", "threads", "waited"),
}


def log(point: str, name: str = "log", *fields: str) -> Fragment:
    """NAME[n] = {%tid.x, context …} for the n-th thread that runs it: 9 words each behind 2, the first of which is n."""
    wanted = fields or FIELDS.get(point, ("site",))
    stores = " ".join(
        f"st.global.u64 [%rd3+{24 + 8 * n}], %gpubpf_{field};" for n, field in enumerate(wanted)
    )
    text = f"""{{
.reg .b64 %rd<6>; .reg .b32 %r<2>; .reg .pred %p<2>;
atom.global.add.u64 %rd1, [%gpubpf_{name}], 1;
setp.ge.u64 %p1, %rd1, {ROOM};
@%p1 bra $L_full;
mad.lo.u64 %rd3, %rd1, 72, %gpubpf_{name};
mov.u32 %r1, %tid.x; cvt.u64.u32 %rd2, %r1;
st.global.u64 [%rd3+16], %rd2; {stores}
$L_full:
}}"""
    arguments = tuple(Argument(field, "b64", "context", field=field) for field in wanted)
    return Fragment(name, text, (Argument(name, "b64", "map_base", name), *arguments))
