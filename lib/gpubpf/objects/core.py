"""CO-RE: adapt code to the types of the running kernel ("Compile Once, Run Everywhere", as libbpf does it).

    relocation = Relocations(local_types, kernel_types)
    relocation.value(root, access, kind)       # the value for the instruction

A relocation says which member an instruction means, in the types with which the object was compiled. In the kernel's types, a member
is found by its name, and a type by its name and kind. A name may end in a flavor, `task_struct___old`, which is ignored.
"""

from __future__ import annotations

import functools

from gpubpf.ebpf import btf
from gpubpf.ebpf import bytecode as b
from gpubpf.ebpf.btf import Types, essential_name
from gpubpf.ebpf.bytecode import Instruction
from gpubpf.errors import ImageError
from gpubpf.record import Record, replace

# enum bpf_core_relo_kind in the kernel's include/uapi/linux/bpf.h.
FIELD_OFFSET, FIELD_SIZE, FIELD_EXISTS, FIELD_SIGNED, FIELD_LSHIFT, FIELD_RSHIFT = range(6)
TYPE_ID_LOCAL, TYPE_ID_TARGET, TYPE_EXISTS, TYPE_SIZE, ENUM_EXISTS, ENUM_VALUE, TYPE_MATCHES = range(6, 13)
_FIELD = range(FIELD_OFFSET, FIELD_RSHIFT + 1)
_TYPE = (TYPE_ID_TARGET, TYPE_EXISTS, TYPE_SIZE, TYPE_MATCHES)
_ABSENT_IS_ZERO = (FIELD_EXISTS, TYPE_EXISTS, TYPE_SIZE, ENUM_EXISTS, TYPE_MATCHES)
_DEEPEST = 32  # maximum depth of members in members
_MOST_CANDIDATES = 64
_KEPT = 64  # types whose members are kept


class _Place(Record):
    """A member in a type: the member's type, its offset in bits, and its size in bits if it is a bit field."""

    type: int
    offset: int
    bits: int = 0


class Relocations:
    """Computes values of relocations. Raises ImageError if the object's data is damaged, or for a kind that is not supported."""

    def __init__(self, local: Types, kernel: Types) -> None:
        self._local, self._kernel = local, kernel
        # An object may have a million relocations about a type with 65,535 members.
        keep = functools.lru_cache(_KEPT)
        self._members, self._values = keep(local.members), keep(local.values)
        self._kernel_members, self._kernel_values = keep(kernel.members), keep(kernel.values)

    def value(self, root: int, access: str, kind: int) -> tuple[int | None, _Place | None]:
        """Return the value for an instruction, and the place of a member in the kernel's type.

        The value is None if the kernel lacks the type or member. The place is None if the relocation is not about a member."""
        if kind == TYPE_ID_LOCAL:
            return root, None
        try:
            steps = [int(step) for step in access.split(":")]
        except ValueError:
            raise ImageError(
                f"a CO-RE relocation has the access string {access!r}; compile it again"
            ) from None
        if any(step < 0 for step in steps) or len(steps) > _DEEPEST:
            raise ImageError(f"a CO-RE relocation has the access string {access!r}; compile it again")
        found: tuple[int | None, _Place | None]
        if kind in _TYPE:
            found = self._type_value(root, kind), None
        elif kind in (ENUM_EXISTS, ENUM_VALUE):
            found = self._enum_value(root, steps[0], kind), None
        elif kind in _FIELD:
            found = self._field_value(root, steps, kind)
        else:
            raise ImageError(
                f"a CO-RE relocation is of kind {kind}, which is not supported; compile it with an older clang"
            )
        if found[0] is None and kind in _ABSENT_IS_ZERO:
            return 0, None
        return found

    def _candidates(self, root: int) -> list[int]:
        """Return the kernel's types that have the same name and kind as a type of the object."""
        local = self._local
        root = local.plain(root) if local.kind(root) != btf.TYPEDEF else root
        kind, name = local.kind(root), essential_name(local.name(root))
        kinds = {btf.ENUM: (btf.ENUM, btf.ENUM64), btf.ENUM64: (btf.ENUM, btf.ENUM64)}.get(kind, (kind,))
        found = self._kernel.by_name.get(name, ()) if name else ()
        return [number for number in found if self._kernel.kind(number) in kinds][:_MOST_CANDIDATES]

    def _type_value(self, root: int, kind: int) -> int | None:
        candidates = self._candidates(root)
        if not candidates:
            return None
        if kind == TYPE_MATCHES:
            raise ImageError(
                "a CO-RE relocation compares the members of types (bpf_core_type_matches), which is not supported;"
                " use bpf_core_type_exists or bpf_core_field_exists"
            )
        return {TYPE_ID_TARGET: candidates[0], TYPE_SIZE: self._kernel.size(candidates[0])}.get(kind, 1)

    def _enum_value(self, root: int, index: int, kind: int) -> int | None:
        values = self._values(self._local.plain(root))
        if index >= len(values):
            raise ImageError(
                "a CO-RE relocation is about an enumerator that its type does not have; compile it again"
            )
        wanted = essential_name(values[index][0])
        for candidate in self._candidates(root):
            for name, value in self._kernel_values(candidate):
                if essential_name(name) == wanted:
                    return 1 if kind == ENUM_EXISTS else value
        return None

    # --- members ---

    def _field_value(self, root: int, steps: list[int], kind: int) -> tuple[int | None, _Place | None]:
        names = self._named(root, steps)
        for candidate in self._candidates(root):
            place = self._place(candidate, steps[0], names)
            if place is not None:
                return self._of_place(place, kind), place
        return None, None

    def _named(self, root: int, steps: list[int]) -> list[tuple[str | int, int]]:
        """Return the steps after the first: a member's name, or the index of an array, each with the type that it leads to."""
        types, number, found = self._local, self._local.plain(root), []
        for step in steps[1:]:
            key: str | int
            if types.kind(number) in btf.COMPOSITE:
                members = self._members(number)
                if step >= len(members):
                    raise ImageError(
                        "a CO-RE relocation is about a member that its type does not have; compile it again"
                    )
                key, number = members[step].name, types.plain(members[step].type)
                if key == "":  # an anonymous structure or union: its members are found by their names
                    continue
            elif types.kind(number) == btf.ARRAY:
                key, number = step, types.plain(types.array(number)[0])
            else:
                raise ImageError("a CO-RE relocation is about a member of a number; compile it again")
            found.append((key, number))
        return found

    def _place(self, root: int, index: int, names: list[tuple[str | int, int]]) -> _Place | None:
        """Return where the kernel's type has the member; None if it has no such member, or one whose type is not similar."""
        types, place = self._kernel, _Place(self._kernel.plain(root), 0)
        place = replace(place, offset=8 * index * types.size(root))
        for key, local in names:
            if isinstance(key, int):
                if types.kind(place.type) != btf.ARRAY:
                    return None
                element, count = types.array(place.type)
                if key >= count > 0:
                    return None
                place = _Place(types.plain(element), place.offset + 8 * key * types.size(element))
            elif (inner := self._member(place.type, key, 0)) is not None:
                place = replace(inner, offset=place.offset + inner.offset)
            else:
                return None
            if not self._similar(local, place.type):
                return None
        return place

    def _member(self, number: int, name: str, depth: int) -> _Place | None:
        """Return a member by name, including members of anonymous structures and unions inside the type."""
        if depth > _DEEPEST:
            return None
        for member in self._kernel_members(number):
            of = self._kernel.plain(member.type)
            if member.name == name:
                return _Place(of, member.offset, member.bits)
            if not member.name and (inner := self._member(of, name, depth + 1)) is not None:
                return replace(inner, offset=member.offset + inner.offset)
        return None

    def _similar(self, local: int, kernel: int) -> bool:
        """Return whether a member's types are compatible by libbpf's rules: any numbers, any pointers, structures and arrays."""
        numbers = (btf.INT, btf.ENUM, btf.ENUM64)
        mine, theirs = self._local.kind(local), self._kernel.kind(kernel)
        if mine in btf.COMPOSITE and theirs in btf.COMPOSITE:
            return True
        if mine in numbers and theirs in numbers:
            return True
        return mine == theirs

    def _of_place(self, place: _Place, kind: int) -> int:
        types = self._kernel
        size = types.size(place.type)
        at = place.offset // 8
        if place.bits:  # the smallest aligned word that has all of the bits
            size = size or 4
            at = place.offset // (8 * size) * size
            while place.offset + place.bits > 8 * (at + size) and size < 8:
                size *= 2
                at = place.offset // (8 * size) * size
        bits = place.bits or 8 * size
        if kind == FIELD_OFFSET:
            return at
        if kind == FIELD_SIZE:
            return size
        if kind == FIELD_EXISTS:
            return 1
        if kind == FIELD_SIGNED:
            return int(types.signed(place.type))
        if kind == FIELD_LSHIFT:
            return 64 - (bits + place.offset - 8 * at)
        return 64 - bits

    def patched(self, code: list[Instruction], pc: int, root: int, access: str, kind: int) -> None:
        """Write the value of a relocation into an instruction."""
        value, place = self.value(root, access, kind)
        i = code[pc]
        if value is None:
            call = Instruction(b.JMP | b.CALL, imm=b.POISON, line=i.line)
            code[pc] = call
            if i.opcode == b.LD_IMM64:
                code[pc + 1] = call
        elif i.opcode == b.LD_IMM64 or i.cls in (b.ALU, b.ALU64):
            code[pc] = replace(i, imm=value if i.opcode == b.LD_IMM64 else b.signed(value, 32))
        elif i.cls in (b.LDX, b.ST, b.STX):
            if value > 0x7FFF:
                raise ImageError(
                    f"a member is {value} bytes from the beginning of its type, too far for one instruction"
                )
            code[pc] = replace(self._resized(i, place), offset=value)
        else:
            raise ImageError(
                "a CO-RE relocation is about an instruction that cannot have one; compile it again"
            )

    def _resized(self, i: Instruction, place: _Place | None) -> Instruction:
        """Return a load or store of a number with the size that the kernel's member has."""
        if (
            place is None
            or place.bits
            or self._kernel.kind(place.type) not in (btf.INT, btf.ENUM, btf.ENUM64, btf.POINTER)
        ):
            return i
        codes = {width: code for code, width in b.WIDTH.items()}
        size = self._kernel.size(place.type)
        if size not in codes or size == b.WIDTH[i.opcode & 0x18] or self._kernel.signed(place.type):
            return i
        return replace(i, opcode=i.opcode & ~0x18 | codes[size])
