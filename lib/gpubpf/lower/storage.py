"""LLVM IR of the shared map structures: hash tables and ring buffers, as `maps.py` lays them out. Inlined where they are used."""

from __future__ import annotations

from gpubpf.ebpf.maps import (
    BLOCK_PROBES,
    BLOCK_SLOTS,
    HEADER,
    MAX_PROBES,
    RING_MARGIN,
    RING_PAGE,
    RING_SHARD,
    MapDefinition,
    pad8,
    record_stride,
)

WAITS = 4096  # how often a lookup looks again at a slot that another thread is writing its key to


def chunks(size: int) -> list[tuple[int, int]]:
    """`size` bytes as naturally aligned pieces: (offset, width)."""
    result = []
    at = 0
    while at < size:
        width = next(w for w in (8, 4, 2, 1) if at + w <= size)
        result.append((at, width))
        at += width
    return result


def ring_function(name: str, definition: MapDefinition, pointer: str, scope: str, warps: bool) -> str:
    """`{ i64 address of a record or 0, i32 its mark } name(i64 base, i32 multiprocessor)`: reserves, or counts as lost.

    Where there are warps, the lowest of the lanes that run this together does it for all of them, so one atomic operation serves
    up to 32 records. Only low words take part: positions differ by less than 2^32.
    """
    device, system = f"{scope} monotonic", "monotonic"
    together = "1"
    before = "0"
    collect = ["  %got = xor i1 %ok, false", "  %common = add i32 %from, 0"]
    if warps:
        together, before = "%mask", "%below"
        collect = [
            "  %got = call i1 @llvm.nvvm.vote.any.sync(i32 %mask, i1 %ok)",
            "  %leader = call i32 @llvm.cttz.i32(i32 %mask, i1 true)",
            "  %common = call i32 @llvm.nvvm.shfl.sync.idx.i32(i32 %mask, i32 %from, i32 %leader, i32 31)",
        ]
    lines = [
        f"define internal {{ i64, i32 }} @{name}(i64 %base, i32 %sm) alwaysinline nounwind convergent {{",
        "entry:",
        f"  %control = inttoptr i64 %base to {pointer}",
        f"  %shards = load i32, {pointer} %control, align 8",
        f"  %capacity_at = getelementptr i8, {pointer} %control, i64 8",
        f"  %capacity = load i32, {pointer} %capacity_at, align 8",
        f"  %data_at = getelementptr i8, {pointer} %control, i64 16",
        f"  %data = load i64, {pointer} %data_at, align 8",
        "  %last = sub i32 %shards, 1",
        "  %shard = call i32 @llvm.umin.i32(i32 %sm, i32 %last)",
        "  %wide = zext i32 %shard to i64",
        f"  %own = mul i64 %wide, {RING_SHARD}",
        f"  %own_from = add i64 %own, {HEADER}",
        f"  %reserved_at = getelementptr i8, {pointer} %control, i64 %own_from",
        f"  %lost_at = getelementptr i8, {pointer} %reserved_at, i64 8",
        f"  %consumed_at = getelementptr i8, {pointer} %reserved_at, i64 16",
    ]
    if warps:
        lines += [
            "  %mask = call i32 @llvm.nvvm.activemask()",
            "  %lower = call i32 @llvm.nvvm.read.ptx.sreg.lanemask.lt()",
            "  %below = and i32 %mask, %lower",
        ]
    lines += [
        f"  %lanes = call i32 @llvm.ctpop.i32(i32 {together})",
        f"  %rank = call i32 @llvm.ctpop.i32(i32 {before})",
        "  %many = zext i32 %lanes to i64",
        f"  %first = icmp eq i32 {before}, 0",
        "  br i1 %first, label %reserve, label %join",
        "reserve:",
        f"  %needed = add i32 %lanes, {RING_MARGIN}",
        f"  %reserved = load atomic i32, {pointer} %reserved_at {device}, align 8",
        f"  %consumed = load atomic i32, {pointer} %consumed_at {device}, align 8",
        "  %used = sub i32 %reserved, %consumed",
        "  %end = add i32 %used, %needed",
        "  %fits = icmp ule i32 %end, %capacity",
        "  br i1 %fits, label %take, label %look",
        "look:",  # what the tool has taken since
        f"  %file = inttoptr i64 %data to {pointer}",
        f"  %told_at = getelementptr i8, {pointer} %file, i64 %own",
        f"  %told = load atomic i64, {pointer} %told_at {system}, align 8",
        f"  store atomic i64 %told, {pointer} %consumed_at {device}, align 8",
        "  %taken = trunc i64 %told to i32",
        "  %left = sub i32 %reserved, %taken",
        "  %end_now = add i32 %left, %needed",
        "  %fits_now = icmp ule i32 %end_now, %capacity",
        "  br i1 %fits_now, label %take, label %full",
        "full:",
        f"  %lost = atomicrmw add {pointer} %lost_at, i64 %many {device}",
        "  br label %join",
        "take:",
        f"  %before = atomicrmw add {pointer} %reserved_at, i64 %many {device}",
        "  %start = trunc i64 %before to i32",
        "  br label %join",
        "join:",
        "  %ok = phi i1 [ false, %entry ], [ false, %full ], [ true, %take ]",
        "  %from = phi i32 [ 0, %entry ], [ 0, %full ], [ %start, %take ]",
        *collect,
        "  br i1 %got, label %good, label %none",
        "none:",
        "  ret { i64, i32 } zeroinitializer",
        "good:",
        "  %position = add i32 %common, %rank",
        "  %modulo = sub i32 %capacity, 1",
        "  %slot = and i32 %position, %modulo",
        "  %row = mul i32 %shard, %capacity",
        "  %number = add i32 %row, %slot",
        "  %number_wide = zext i32 %number to i64",
        f"  %place = mul i64 %number_wide, {record_stride(definition)}",
        f"  %heads = mul i32 %shards, {RING_SHARD}",
        f"  %heads_up = add i32 %heads, {RING_PAGE - 1}",
        f"  %records = and i32 %heads_up, -{RING_PAGE}",
        "  %records_wide = zext i32 %records to i64",
        "  %records_at = add i64 %data, %records_wide",
        "  %address = add i64 %records_at, %place",
        "  %mark = add i32 %position, 1",
        "  %one = insertvalue { i64, i32 } zeroinitializer, i64 %address, 0",
        "  %both = insertvalue { i64, i32 } %one, i32 %mark, 1",
        "  ret { i64, i32 } %both",
        "}",
    ]
    return "\n".join(lines)


RING_DECLARATIONS = (
    "declare i32 @llvm.umin.i32(i32, i32)",
    "declare i32 @llvm.ctpop.i32(i32)",
)
WARP_DECLARATIONS = (
    "declare i32 @llvm.nvvm.activemask()",
    "declare i32 @llvm.nvvm.read.ptx.sreg.lanemask.lt()",
    "declare i1 @llvm.nvvm.vote.any.sync(i32, i1)",
    "declare i32 @llvm.nvvm.shfl.sync.idx.i32(i32, i32, i32, i32)",
    "declare i32 @llvm.cttz.i32(i32, i1)",
    "declare void @llvm.nvvm.bar.warp.sync(i32)",
)


def block_function(
    name: str,
    last: bool,
    pointer: str,
    scope: str,
    warps: bool,
    slots: int = BLOCK_SLOTS,
    probes: int = BLOCK_PROBES,
) -> str:
    """`i1 name(i64 base, i64 launch, i64 block, i32 threads)`: whether this is the first thread of its block that comes here,
    or with `last` the last, which then sees what the others did before. Each thread of a block comes once.

    The threads that come are counted in a slot of a hash table (`maps.py`), which the first of them takes and the last gives
    back. A block may be in any of `probes` slots from its home on; it takes the first that is free, and nobody waits. But a slot
    that becomes free in front of it must not be taken for the same block again. So who goes past a slot leaves a mark in it,
    and where there is a mark nothing is put: a mark stays while who left it looks further, and if he takes a slot, while that is
    taken. What finds no room is counted as lost (and may leave a slot taken; today's GPUs fill a quarter of the table).
    """
    lines = [
        f"define internal i1 @{name}(i64 %base, i64 %launch, i64 %block, i32 %threads) alwaysinline nounwind convergent {{",
        "entry:",
    ]
    if warps:  # lanes that come together are one: the lowest of them speaks for all
        lines += [
            "  %mask = call i32 @llvm.nvvm.activemask()",
            "  %lower = call i32 @llvm.nvvm.read.ptx.sreg.lanemask.lt()",
            "  %below = and i32 %mask, %lower",
            "  %many = call i32 @llvm.ctpop.i32(i32 %mask)",
            "  %speaks = icmp eq i32 %below, 0",
            "  br i1 %speaks, label %mix, label %silent",
            "silent:",
            "  ret i1 false",
        ]
    else:
        lines += ["  %many = add i32 0, 1", "  br label %mix"]
    fence = f"  fence {scope} acq_rel"
    lines += [
        "mix:",
        f"  %table = inttoptr i64 %base to {pointer}",
        "  %launch_1 = mul i64 %launch, -7046029254386353131",
        "  %launch_2 = lshr i64 %launch_1, 32",
        "  %launch_3 = xor i64 %launch_1, %launch_2",
        "  %number = add i64 %launch_3, %block",
        "  %mixed_1 = mul i64 %number, -4658895280553007687",
        "  %mixed_2 = lshr i64 %mixed_1, 32",
        "  %mixed_3 = xor i64 %mixed_1, %mixed_2",
        "  %mixed = mul i64 %mixed_3, -7723592293110705685",
        "  %mixed_high = and i64 %mixed, -65536",
        f"  %tag = or i64 %mixed_high, {-1 << 63}",
        "  %home = trunc i64 %number to i32",  # blocks of one launch lie side by side
        "  br label %slot",
        "slot:",
        "  %turn = phi i32 [ 0, %mix ], [ %past, %next ]",
        "  %place = add i32 %home, %turn",
        f"  %index = and i32 %place, {slots - 1}",
        "  %wide_index = zext i32 %index to i64",
        "  %offset = shl i64 %wide_index, 4",
        "  %from = add i64 %offset, 16",
        f"  %at = getelementptr i8, {pointer} %table, i64 %from",
        "  %past = add i32 %turn, 1",
        f"  %seen = load atomic i64, {pointer} %at {scope} monotonic, align 8",
        "  %empty = icmp eq i64 %seen, 0",
        "  br i1 %empty, label %claim, label %taken",
        "claim:",
        f"  %claimed = cmpxchg {pointer} %at, i64 0, i64 %tag {scope} monotonic monotonic",
        "  %won = extractvalue { i64, i1 } %claimed, 1",
        "  %winner = extractvalue { i64, i1 } %claimed, 0",
        "  br i1 %won, label %count, label %taken",
        "taken:",
        "  %there = phi i64 [ %seen, %slot ], [ %winner, %claim ]",
        "  %there_tag = and i64 %there, -65536",
        "  %there_own = icmp eq i64 %there_tag, %tag",
        "  br i1 %there_own, label %count, label %pass",
        "pass:",  # whatever is there by now
        f"  %passed = atomicrmw add {pointer} %at, i64 1 {scope} monotonic",
        "  %passed_tag = and i64 %passed, -65536",
        "  %passed_own = icmp eq i64 %passed_tag, %tag",
        "  br i1 %passed_own, label %count, label %next",
        "next:",
        f"  %on = icmp ult i32 %past, {probes}",
        "  br i1 %on, label %slot, label %full",
        "full:",
        f"  %lost = atomicrmw add {pointer} %table, i64 1 {scope} monotonic",
        "  br label %marks",
        "count:",
        # How many marks this thread takes away again: those of who took the slot stay.
        "  %own = phi i32 [ 0, %claim ], [ %turn, %taken ], [ %past, %pass ]",
        "  %first = phi i1 [ true, %claim ], [ false, %taken ], [ false, %pass ]",
        f"  %count_at = getelementptr i8, {pointer} %at, i64 8",
        *([fence] if last else []),
        f"  %came = atomicrmw add {pointer} %count_at, i32 %many {scope} monotonic",
        "  %now = add i32 %came, %many",
        "  %complete = icmp eq i32 %now, %threads",
        "  br i1 %complete, label %give_back, label %marks",
        "give_back:",
        f"  %zero = atomicrmw sub {pointer} %count_at, i32 %threads {scope} monotonic",
        fence,
        f"  %free = atomicrmw sub {pointer} %at, i64 %tag {scope} monotonic",
        "  br label %marks",
        "marks:",
        f"  %mine = phi i32 [ {probes}, %full ], [ %own, %count ], [ %own, %give_back ]",
        "  %theirs = phi i32 [ 0, %full ], [ 0, %count ], [ %turn, %give_back ]",
        f"  %elected = phi i1 [ false, %full ], [ {'false' if last else '%first'}, %count ],"
        f" [ {'true' if last else '%first'}, %give_back ]",
        "  br label %sweep",
        "sweep:",
        "  %k = phi i32 [ 0, %marks ], [ %next_k, %swept ]",
        "  %in_mine = icmp ult i32 %k, %mine",
        "  %in_theirs = icmp ult i32 %k, %theirs",
        "  %in_any = or i1 %in_mine, %in_theirs",
        "  br i1 %in_any, label %swept, label %done",
        "swept:",
        "  %one = zext i1 %in_mine to i64",
        "  %two = zext i1 %in_theirs to i64",
        "  %marks_there = add i64 %one, %two",
        "  %sweep_place = add i32 %home, %k",
        f"  %sweep_index = and i32 %sweep_place, {slots - 1}",
        "  %sweep_wide = zext i32 %sweep_index to i64",
        "  %sweep_offset = shl i64 %sweep_wide, 4",
        "  %sweep_from = add i64 %sweep_offset, 16",
        f"  %sweep_at = getelementptr i8, {pointer} %table, i64 %sweep_from",
        f"  %taken_away = atomicrmw sub {pointer} %sweep_at, i64 %marks_there {scope} monotonic",
        "  %next_k = add i32 %k, 1",
        "  br label %sweep",
        "done:",
        "  ret i1 %elected",
        "}",
    ]
    return "\n".join(lines)


def _hash(parts: list[tuple[int, int]]) -> tuple[list[str], str]:
    """IR that mixes the key's parts %k0 … into 64 bits, one round of a multiply and a shift for each."""
    lines = []
    mixed = "7046029254386353131"
    for n, (_, width) in enumerate(parts):
        word = f"%k{n}"
        if width < 8:
            lines.append(f"  %w{n} = zext i{8 * width} {word} to i64")
            word = f"%w{n}"
        lines += [
            f"  %x{n} = xor i64 {mixed}, {word}",
            f"  %m{n} = mul i64 %x{n}, -4658895280553007687",
            f"  %s{n} = lshr i64 %m{n}, 32",
            f"  %h{n} = xor i64 %m{n}, %s{n}",
        ]
        mixed = f"%h{n}"
    return lines, mixed


def hash_function(
    name: str, operation: str, definition: MapDefinition, pointer: str, scope: str, warps: bool
) -> str:
    """`i64 name(i64 base, key parts…[, value parts…])`.

    find: the value's address or 0. delete: 0 or -ENOENT. update (BPF_ANY), insert (BPF_NOEXIST), replace (BPF_EXIST): 0,
    -EEXIST, -ENOENT, or -E2BIG when no slot is free, which counts as lost.

    Open addressing without locks: a slot is claimed by compare-and-swap of its state, which holds a hash of the key, so
    that others know at once whose it is; whoever looks for the same key waits (a bounded time) until it is filled in. Lanes of a
    warp that try together go on together: none of them waits for one that cannot go on before it.
    """
    keys = chunks(definition.key_size)
    values = chunks(definition.value_size) if operation in ("update", "insert", "replace") else []
    slots = definition.slots
    keys_at = HEADER + 8 * slots
    values_at = keys_at + slots * pad8(definition.key_size)
    claims = operation in ("update", "insert")
    parameters = ["i64 %base", *(f"i{8 * w} %k{n}" for n, (_, w) in enumerate(keys))]
    parameters += [f"i{8 * w} %value{n}" for n, (_, w) in enumerate(values)]
    mix, mixed = _hash(keys)

    def stores(stem: str, at: str, parts: list[tuple[int, int]], prefix: str) -> list[str]:
        lines = []
        for n, (offset, width) in enumerate(parts):
            lines += [
                f"  %{stem}{n} = getelementptr i8, {pointer} {at}, i64 {offset}",
                f"  store i{8 * width} %{prefix}{n}, {pointer} %{stem}{n}, align {width}",
            ]
        return lines

    compare = []
    equal = "true"
    for n, (offset, width) in enumerate(keys):
        compare += [
            f"  %ka{n} = getelementptr i8, {pointer} %key_at, i64 {offset}",
            f"  %kv{n} = load i{8 * width}, {pointer} %ka{n}, align {width}",
            f"  %ke{n} = icmp eq i{8 * width} %kv{n}, %k{n}",
            f"  %kall{n} = and i1 {equal}, %ke{n}",
        ]
        equal = f"%kall{n}"
    # The key's own tombstone can be used again, and no other: then no other slot can hold the same key.
    claim = [
        "  %is_empty = icmp eq i64 %state, 0",
        "  %is_own = icmp eq i64 %state, %deleted",
        "  %is_free = or i1 %is_empty, %is_own",
        "  br i1 %is_free, label %claim, label %settled",
        "claim:",
        f"  %swap = cmpxchg {pointer} %state_at, i64 %state, i64 %busy {scope} acq_rel acquire",
        "  %won = extractvalue { i64, i1 } %swap, 1",
        "  br i1 %won, label %fill, label %settled",
        "fill:",
        *stores("kd", "%key_at", keys, "k"),
        *stores("vd", "%value_at", values, "value"),
        f"  store atomic i64 %full, {pointer} %state_at {scope} release, align 8",
        f"  %count = atomicrmw add {pointer} %origin, i64 1 {scope} monotonic",
        "  br label %settled",
        "settled:",
        "  %done = phi i1 [ false, %look ], [ false, %claim ], [ true, %fill ]",
        *(["  call void @llvm.nvvm.bar.warp.sync(i32 %mask)"] if warps else []),
        "  br i1 %done, label %inserted, label %judge",
        "judge:",
        "  br i1 %is_free, label %again, label %rest",
        "rest:",
    ]
    absent = {"find": "0", "delete": "-2", "replace": "-2"}.get(operation, "-7")
    lines = [
        f"define internal i64 @{name}({', '.join(parameters)}) alwaysinline nounwind convergent {{",
        "entry:",
        f"  %origin = inttoptr i64 %base to {pointer}",
        *mix,
        f"  %tag = shl i64 {mixed}, 2",
        "  %busy = or i64 %tag, 1",
        "  %full = or i64 %tag, 2",
        "  %deleted = or i64 %tag, 3",
        f"  %start = lshr i64 {mixed}, 24",
        "  br label %probe",
        "probe:",
        "  %turn = phi i64 [ 0, %entry ], [ %next_turn, %next ]",
        "  %place = add i64 %start, %turn",
        f"  %slot = and i64 %place, {slots - 1}",
        "  %state_offset = shl i64 %slot, 3",
        f"  %state_from = add i64 %state_offset, {HEADER}",
        f"  %state_at = getelementptr i8, {pointer} %origin, i64 %state_from",
        f"  %key_offset = mul i64 %slot, {pad8(definition.key_size)}",
        f"  %key_from = add i64 %key_offset, {keys_at}",
        f"  %key_at = getelementptr i8, {pointer} %origin, i64 %key_from",
        f"  %value_offset = mul i64 %slot, {pad8(definition.value_size)}",
        f"  %value_from = add i64 %value_offset, {values_at}",
        f"  %value_at = getelementptr i8, {pointer} %origin, i64 %value_from",
        "  br label %look",
        "look:",
        "  %looks = phi i64 [ 0, %probe ], [ %more_looks, %again ]",
        *(["  %mask = call i32 @llvm.nvvm.activemask()"] if claims and warps else []),
        f"  %state = load atomic i64, {pointer} %state_at {scope} acquire, align 8",
        *(claim if claims else []),
        "  %is_full = icmp eq i64 %state, %full",
        "  br i1 %is_full, label %match, label %other",
        "other:",
        *(
            []
            if claims
            else ["  %is_empty = icmp eq i64 %state, 0", "  br i1 %is_empty, label %none, label %taken"]
        ),
        *(["  br label %taken"] if claims else []),
        "taken:",
        "  %is_busy = icmp eq i64 %state, %busy",
        "  br i1 %is_busy, label %again, label %next",
        "again:",
        "  %more_looks = add i64 %looks, 1",
        f"  %patient = icmp ult i64 %more_looks, {WAITS}",
        "  br i1 %patient, label %look, label %gave_up",
        "match:",
        *compare,
        f"  br i1 {equal}, label %found, label %next",
        "next:",
        "  %next_turn = add i64 %turn, 1",
        f"  %on = icmp ult i64 %next_turn, {min(MAX_PROBES, slots)}",
        f"  br i1 %on, label %probe, label %{'gave_up' if claims else 'none'}",
        "gave_up:",
    ]
    if claims:
        lines += [
            f"  %lost_at = getelementptr i8, {pointer} %origin, i64 8",
            f"  %lost = atomicrmw add {pointer} %lost_at, i64 1 {scope} monotonic",
        ]
    lines += [f"  ret i64 {absent}"]
    lines += ["inserted:", "  ret i64 0"] if claims else ["none:", f"  ret i64 {absent}"]
    lines += ["found:"]
    if operation == "find":
        lines += [f"  %address = ptrtoint {pointer} %value_at to i64", "  ret i64 %address"]
    elif operation == "insert":
        lines += ["  ret i64 -17"]
    elif operation == "delete":
        lines += [
            f"  %swap = cmpxchg {pointer} %state_at, i64 %full, i64 %deleted {scope} acq_rel acquire",
            "  %won = extractvalue { i64, i1 } %swap, 1",
            "  br i1 %won, label %gone, label %none",
            "gone:",
            f"  %count = atomicrmw sub {pointer} %origin, i64 1 {scope} monotonic",
            "  ret i64 0",
        ]
    else:
        lines += [*stores("vu", "%value_at", values, "value"), "  ret i64 0"]
    return "\n".join([*lines, "}"])
