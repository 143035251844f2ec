"""PTX that is new with Blackwell: one short text for each construct of PTX ISA 8.6 to 9.0.

    CONSTRUCTS["elect"]      # "elect.sync %r4|%p1, -1;"
    kernel("elect")          # a kernel that uses it
    module(["elect"], "sm_100a", "8.7")

Each text uses the registers and variables that `kernel` declares.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

TARGETS = ("sm_100a", "sm_103a", "sm_110a", "sm_120a", "sm_121a", "sm_100f", "sm_110f", "sm_120f")
_BYTES = "mbarrier::complete_tx::bytes"


def _registers(count: int, first: int = 4) -> str:
    return f"{{{', '.join(f'%r{n}' for n in range(first, first + count))}}}"


def _tensor_memory() -> Iterator[tuple[str, str]]:
    """Yield what manages, moves and orders tensor memory."""
    for group in ("cta_group::1", "cta_group::2"):
        yield f"tcgen05.alloc.{group}", f"tcgen05.alloc.{group}.sync.aligned.shared::cta.b32 [tile], 32;"
        yield f"tcgen05.dealloc.{group}", f"tcgen05.dealloc.{group}.sync.aligned.b32 %r1, 32;"
        permit = f"tcgen05.relinquish_alloc_permit.{group}"
        yield permit, f"{permit}.sync.aligned;"
        commit = f"tcgen05.commit.{group}.mbarrier::arrive::one.shared::cluster"
        yield f"tcgen05.commit.{group}", f"{commit}.b64 [%r2];"
        yield (
            f"tcgen05.commit.{group}.multicast::cluster",
            f"{commit}.multicast::cluster.b64 [%r2], %h1;",
        )
        yield f"tcgen05.shift.{group}", f"tcgen05.shift.{group}.down [%r1];"
        for shape in (
            "128x256b",
            "4x256b",
            "128x128b",
            "64x128b.warpx2::02_13",
            "64x128b.warpx2::01_23",
            "32x128b.warpx4",
        ):
            yield f"tcgen05.cp.{group}.{shape}", f"tcgen05.cp.{group}.{shape} [%r1], %rd1;"
        for packed in ("b8x16.b4x16_p64", "b8x16.b6x16_p32"):
            yield (
                f"tcgen05.cp.{group}.128x256b.{packed}",
                f"tcgen05.cp.{group}.128x256b.{packed} [%r1], %rd1;",
            )
    for name in ("fence::before_thread_sync", "fence::after_thread_sync"):
        yield f"tcgen05.{name}", f"tcgen05.{name};"
    for name in ("wait::ld", "wait::st"):
        yield f"tcgen05.{name}", f"tcgen05.{name}.sync.aligned;"
    for shape, registers in (("32x32b", 1), ("16x64b", 1), ("16x128b", 2), ("16x256b", 4), ("16x32bx2", 1)):
        split = ", 2" if shape == "16x32bx2" else ""
        for count in (1, 8):
            values = _registers(registers * count)
            yield (
                f"tcgen05.ld.{shape}.x{count}",
                f"tcgen05.ld.sync.aligned.{shape}.x{count}.b32 {values}, [%r1]{split};",
            )
            yield (
                f"tcgen05.st.{shape}.x{count}",
                f"tcgen05.st.sync.aligned.{shape}.x{count}.b32 [%r1]{split}, {values};",
            )
        values = _registers(registers)
        yield (
            f"tcgen05.ld.{shape}.pack::16b",
            f"tcgen05.ld.sync.aligned.{shape}.x1.pack::16b.b32 {values}, [%r1]{split};",
        )
        yield (
            f"tcgen05.st.{shape}.unpack::16b",
            f"tcgen05.st.sync.aligned.{shape}.x1.unpack::16b.b32 [%r1]{split}, {values};",
        )


def _multiplications() -> Iterator[tuple[str, str]]:
    """Yield tcgen05.mma in its kinds."""
    a_of = (("", "%rd1"), (".A in tensor memory", "[%r2]"))
    for group, lanes in (("cta_group::1", 4), ("cta_group::2", 8)):
        for kind in ("f16", "tf32", "f8f6f4", "i8"):
            name = f"tcgen05.mma.{group}.kind::{kind}"
            for where, a in a_of:
                yield f"{name}{where}", f"{name} [%r1], {a}, %rd2, %r3, %p1;"
            yield (
                f"{name}.disable-output-lane",
                f"{name} [%r1], %rd1, %rd2, %r3, {_registers(lanes)}, %p1;",
            )
            yield f"{name}.collector", f"{name}.collector::a::fill [%r1], %rd1, %rd2, %r3, %p1;"
            sparse = name.replace(".mma", ".mma.sp")
            yield sparse, f"{sparse} [%r1], %rd1, %rd2, [%r4], %r3, %p1;"
            if kind in ("f16", "tf32"):
                yield f"{name}.scale-input-d", f"{name} [%r1], %rd1, %rd2, %r3, %p1, 3;"
            if group == "cta_group::1":
                ws = name.replace(".mma", ".mma.ws")
                for where, a in a_of:
                    yield f"{ws}{where}", f"{ws} [%r1], {a}, %rd2, %r3, %p1;"
                yield f"{ws}.zero-column-mask", f"{ws} [%r1], %rd1, %rd2, %r3, %p1, %rd3;"
                yield f"{ws}.collector", f"{ws}.collector::b1::fill [%r1], %rd1, %rd2, %r3, %p1;"
                sparse = ws.replace(".ws", ".ws.sp")
                yield sparse, f"{sparse} [%r1], %rd1, %rd2, [%r4], %r3, %p1;"
        for kind, sizes in (
            ("mxf8f6f4", ("", ".scale_vec::1X", ".block32")),
            ("mxf4", ("", ".scale_vec::2X", ".block32")),
            ("mxf4nvf4", (".scale_vec::2X", ".scale_vec::4X", ".block16", ".block32")),
        ):
            for size in sizes:
                name = f"tcgen05.mma.{group}.kind::{kind}.block_scale{size}"
                yield name, f"{name} [%r1], %rd1, %rd2, %r3, [%r4], [%r5], %p1;"
            yield f"{name}.A in tensor memory", f"{name} [%r1], [%r2], %rd2, %r3, [%r4], [%r5], %p1;"
            sparse = name.replace(".mma", ".mma.sp")
            yield sparse, f"{sparse} [%r1], %rd1, %rd2, [%r6], %r3, [%r4], [%r5], %p1;"


_SMALL = ("e4m3", "e5m2", "e3m2", "e2m3", "e2m1")


def _multiplications_of_warps() -> Iterator[tuple[str, str]]:
    """Yield mma.sync of floats of 8, 6 and 4 bits, with and without scales."""
    operands = f"{_registers(4)}, {_registers(4, 8)}, {_registers(2, 12)}, {_registers(4, 4)}"
    scales = ", {%r14}, {0, 1}, {%r15}, {0, 2}"
    for a in _SMALL:
        for d in ("f32", "f16"):
            name = f"mma.m16n8k32.kind::f8f6f4.{d}.{a}"
            few = operands if d == "f32" else (
                f"{_registers(2)}, {_registers(4, 8)}, {_registers(2, 12)}, {_registers(2)}"
            )  # fmt: skip
            yield name, f"mma.sync.aligned.m16n8k32.row.col.kind::f8f6f4.{d}.{a}.e2m1.{d} {few};"
        form = f"kind::mxf8f6f4.block_scale.scale_vec::1X.f32.{a}.e3m2.f32.ue8m0"
        yield f"mma.m16n8k32.{form}", f"mma.sync.aligned.m16n8k32.row.col.{form} {operands}{scales};"
    for form in (
        "kind::mxf4.block_scale.f32.e2m1.e2m1.f32.ue8m0",
        "kind::mxf4.block_scale.scale_vec::2X.f32.e2m1.e2m1.f32.ue8m0",
        "kind::mxf4nvf4.block_scale.scale_vec::2X.f32.e2m1.e2m1.f32.ue8m0",
        "kind::mxf4nvf4.block_scale.scale_vec::4X.f32.e2m1.e2m1.f32.ue4m3",
    ):
        yield f"mma.m16n8k64.{form}", f"mma.sync.aligned.m16n8k64.row.col.{form} {operands}{scales};"
    sparse = f"{_registers(4)}, {_registers(4, 8)}, {_registers(4, 12)}, {_registers(4)}, %r16, 0"
    for shape, form in (
        ("m16n8k64", "kind::f8f6f4.f32.e2m3.e2m1.f32"),
        ("m16n8k64", "kind::mxf8f6f4.block_scale.scale_vec::1X.f32.e2m3.e2m1.f32.ue8m0"),
        ("m16n8k128", "kind::mxf4.block_scale.scale_vec::2X.f32.e2m1.e2m1.f32.ue8m0"),
        ("m16n8k128", "kind::mxf4nvf4.block_scale.scale_vec::4X.f32.e2m1.e2m1.f32.ue4m3"),
    ):
        scaled = scales if "block_scale" in form else ""
        yield (
            f"mma.sp.{shape}.{form}",
            f"mma.sp::ordered_metadata.sync.aligned.{shape}.row.col.{form} {sparse}{scaled};",
        )


def _conversions() -> Iterator[tuple[str, str]]:
    """Yield cvt to and from floats of 8, 6 and 4 bits, and what else is new in arithmetic."""
    for kind in ("e2m3x2", "e3m2x2"):
        yield f"cvt.{kind}.f32", f"cvt.rn.satfinite.{kind}.f32 %h1, %r4, %r5;"
        yield f"cvt.f16x2.{kind}", f"cvt.rn.f16x2.{kind} %r4, %h1;"
    yield "cvt.e2m1x2.f32", "cvt.rn.satfinite.e2m1x2.f32 %b1, %r4, %r5;"
    yield "cvt.f16x2.e2m1x2", "cvt.rn.f16x2.e2m1x2 %r4, %b1;"
    yield "cvt.ue8m0x2.f32", "cvt.rz.satfinite.ue8m0x2.f32 %h1, %r4, %r5;"
    yield "cvt.ue8m0x2.bf16x2", "cvt.rp.satfinite.ue8m0x2.bf16x2 %h1, %r4;"
    yield "cvt.bf16x2.ue8m0x2", "cvt.rn.bf16x2.ue8m0x2 %r4, %h1;"
    yield "cvt.rs.f16x2.f32", "cvt.rs.f16x2.f32 %r4, %r5, %r6, %r7;"
    for kind in ("e4m3x4", "e5m2x4", "e2m3x4", "e3m2x4"):
        yield f"cvt.rs.{kind}.f32", f"cvt.rs.satfinite.{kind}.f32 %r4, {_registers(4, 5)}, %r9;"
    yield "cvt.rs.e2m1x4.f32", f"cvt.rs.satfinite.e2m1x4.f32 %h1, {_registers(4, 5)}, %r9;"
    yield "cvt.tf32.satfinite", "cvt.rn.satfinite.tf32.f32 %r4, %r5;"
    for name in ("add", "sub", "mul"):
        yield f"{name}.f32x2", f"{name}.rn.f32x2 %rd1, %rd2, %rd3;"
    yield "fma.f32x2", "fma.rn.f32x2 %rd1, %rd2, %rd3, %rd4;"
    for half in ("f16", "bf16"):
        yield f"add.f32.{half}", f"add.rn.f32.{half} %r4, %h1, %r5;"
        yield f"sub.f32.{half}", f"sub.rn.f32.{half} %r4, %h1, %r5;"
        yield f"fma.f32.{half}", f"fma.rn.f32.{half} %r4, %h1, %h2, %r5;"
    yield "min.f32 of three", "min.f32 %r4, %r5, %r6, %r7;"
    yield "max.f32 of three", "max.NaN.abs.f32 %r4, %r5, %r6, %r7;"
    yield "redux.f32", "redux.sync.min.f32 %r4, %r5, -1;"
    yield "redux.abs.NaN.f32", "redux.sync.max.abs.NaN.f32 %r4, %r5, -1;"


def _memory() -> Iterator[tuple[str, str]]:
    """Yield loads, stores, copies and their synchronization."""
    yield "ld.v8.b32", f"ld.global.v8.b32 {_registers(8)}, [%rd1];"
    yield "ld.v4.b64", "ld.global.L2::evict_last.v4.b64 {%rd2, %rd3, %rd4, %rd5}, [%rd1];"
    yield "st.v8.f32", f"st.global.v8.f32 [%rd1], {_registers(8)};"
    yield "st.v4.b64", "st.global.v4.b64 [%rd1], {%rd2, %rd3, %rd4, %rd5};"
    yield "st.bulk", "mov.u32 %r2, tile; st.bulk.weak.shared::cta [%r2], %rd2, 0;"
    yield "st.async.release", "st.async.release.gpu.global.b32 [%rd1], %r4;"
    yield "red.async.release", "red.async.release.gpu.global.add.u32 [%rd1], %r4;"
    for shape, count, kinds in (
        ("m16n16.x1.trans", 2, ("b8", "b8x16.b6x16_p32", "b8x16.b4x16_p64")),
        ("m8n16.x1", 1, ("b8x16.b6x16_p32", "b8x16.b4x16_p64")),
    ):
        for kind in kinds:
            # The type follows the space, and the name of a packed type follows `.b8x16`.
            name = f"ldmatrix.sync.aligned.{shape}.shared.{kind}"
            yield f"ldmatrix.{shape}.{kind}", f"{name} {_registers(count)}, [tile];"
    yield "stmatrix.m16n8.b8", "stmatrix.sync.aligned.m16n8.x1.trans.shared.b8 [tile], {%r4};"
    yield "cp.async.bulk.shared::cta", f"cp.async.bulk.shared::cta.global.{_BYTES} [tile], [%rd1], 16, [bar];"
    yield (
        "cp.async.bulk.cp_mask",
        "cp.async.bulk.global.shared::cta.bulk_group.cp_mask [%rd1], [tile], 16, %h1;",
    )
    tensor, map2, map3 = "cp.async.bulk.tensor", "[%rd1, {%r4, %r5}]", "[%rd1, {%r4, %r5, %r6}]"
    rows = "[%rd1, {%r4, %r5, %r6, %r7, %r8}]"
    yield f"{tensor}.shared::cta", f"{tensor}.2d.shared::cta.global.tile.{_BYTES} [tile], {map2}, [bar];"
    yield (
        f"{tensor}.cta_group::2",
        f"{tensor}.2d.shared::cluster.global.tile.{_BYTES}.cta_group::2 [tile], {map2}, [bar];",
    )
    yield (
        f"{tensor}.multicast::cluster.cta_group::1",
        f"{tensor}.2d.shared::cluster.global.tile.{_BYTES}.multicast::cluster.cta_group::1 [tile], {map2}, [bar], %h1;",
    )
    yield (
        f"{tensor}.tile::gather4",
        f"{tensor}.2d.shared::cta.global.tile::gather4.{_BYTES} [tile], {rows}, [bar];",
    )
    yield (
        f"{tensor}.tile::gather4.multicast::cluster",
        f"{tensor}.2d.shared::cluster.global.tile::gather4.{_BYTES}.multicast::cluster [tile], {rows}, [bar], %h1;",
    )
    yield (
        f"{tensor}.tile::scatter4",
        f"{tensor}.2d.global.shared::cta.tile::scatter4.bulk_group {rows}, [tile];",
    )
    for mode in ("im2col::w", "im2col::w::128"):
        offsets = "{%h1, %h2}"
        yield (
            f"{tensor}.{mode}",
            f"{tensor}.3d.shared::cluster.global.{mode}.{_BYTES} [tile], {map3}, [bar], {offsets};",
        )
        yield (
            f"{tensor}.prefetch.{mode}",
            f"cp.async.bulk.prefetch.tensor.3d.L2.global.{mode} {map3}, {offsets};",
        )
    yield (
        f"{tensor}.prefetch.tile::gather4",
        f"cp.async.bulk.prefetch.tensor.2d.L2.global.tile::gather4 {rows};",
    )
    yield (
        "tensormap.replace.swizzle_atomicity",
        "tensormap.replace.tile.swizzle_atomicity.shared::cta.b1024.b32 [tile], 2;",
    )
    for semantics, space in (("acquire", "cluster"), ("release", "cta")):
        restricted = f"{semantics}.sync_restrict::shared::{space}.cluster"
        yield f"fence.{semantics}.sync_restrict", f"fence.{restricted};"
        yield f"fence.proxy.async::generic.{semantics}", f"fence.proxy.async::generic.{restricted};"
    yield "mbarrier.arrive.relaxed", "mbarrier.arrive.relaxed.cta.shared::cta.b64 %rd1, [bar];"
    yield "mbarrier.try_wait.relaxed", "mbarrier.try_wait.relaxed.cta.shared::cta.b64 %p1, [bar], %rd1;"


def _control() -> Iterator[tuple[str, str]]:
    """Yield what concerns warps, clusters and launches."""
    cancel = f"clusterlaunchcontrol.try_cancel.async.shared::cta.{_BYTES}"
    query = "clusterlaunchcontrol.query_cancel"
    yield "clusterlaunchcontrol.try_cancel", f"{cancel}.b128 [tile], [bar];"
    yield (
        "clusterlaunchcontrol.try_cancel.multicast::cluster::all",
        f"{cancel}.multicast::cluster::all.b128 [tile], [bar];",
    )
    yield f"{query}.is_canceled", f"{query}.is_canceled.pred.b128 %p1, %q1;"
    yield f"{query}.get_first_ctaid", f"{query}.get_first_ctaid.v4.b32.b128 {_registers(4)}, %q1;"
    yield f"{query}.get_first_ctaid::x", f"{query}.get_first_ctaid::x.b32.b128 %r4, %q1;"
    yield "elect", "elect.sync %r4|%p1, -1;"
    yield "setmaxnreg", "setmaxnreg.inc.sync.aligned.u32 96;"
    yield "griddepcontrol.wait", "griddepcontrol.wait;"
    yield "griddepcontrol.launch_dependents", "griddepcontrol.launch_dependents;"


CONSTRUCTS: dict[str, str] = dict(
    pair
    for pairs in (
        _tensor_memory(),
        _multiplications(),
        _multiplications_of_warps(),
        _conversions(),
        _memory(),
        _control(),
    )
    for pair in pairs
)


def kernel(construct: str, name: str = "k") -> str:
    """Return a kernel that uses a construct, with what its text needs: registers, a tile and an mbarrier in shared memory."""
    directive = ".maxntid 256" if construct == "setmaxnreg" else ""
    return f""".visible .entry {name}(.param .u64 a) {directive} {{
.reg .b8 %b<4>; .reg .b16 %h<4>; .reg .b32 %r<48>; .reg .b64 %rd<8>; .reg .b128 %q<2>; .reg .pred %p<3>;
.shared .align 1024 .b8 tile[1024]; .shared .align 8 .b64 bar;
ld.param.u64 %rd1, [a]; mov.u32 %r1, %tid.x; setp.eq.u32 %p2, %r1, 0;
{CONSTRUCTS[construct]}
st.global.u32 [%rd1], %r1;
ret; }}
"""


def head(target: str, version: str = "9.0") -> str:
    return f".version {version}\n.target {target}\n.address_size 64\n"


def module(constructs: Iterable[str], target: str, version: str = "9.0") -> str:
    """Return a module with a kernel for each construct: k0, k1, …"""
    return head(target, version) + "".join(kernel(c, f"k{n}") for n, c in enumerate(constructs))
