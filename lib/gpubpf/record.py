"""Classes of named fields that take no time to declare.

`dataclasses.dataclass` writes and compiles the methods of each class while its module is imported. That takes up to 0.7 ms a class,
and a tool imports a hundred of them before its probes are live. The classes here inherit their methods instead. They are declared like
dataclasses::

    class Site(Record):
        number: int
        source: str = ""
        counts: dict[str, int] = field(default_factory=dict)

Making an object takes longer than with a dataclass. So use `dataclass(slots=True)` for classes with hundreds of thousands of objects,
such as PTX statements. `replace` and `asdict` take both kinds of object.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import TYPE_CHECKING, Any, ClassVar, dataclass_transform

_REQUIRED: Any = object()
_set = object.__setattr__


class _Field:
    """What `field` returns."""

    def __init__(self, default: Any, factory: Callable[[], Any] | None, shown: bool, compared: bool) -> None:
        self.default = default
        self.factory = factory
        self.shown = shown
        self.compared = compared


def field(
    *,
    default: Any = _REQUIRED,
    default_factory: Callable[[], Any] | None = None,
    repr: bool = True,
    compare: bool = True,
) -> Any:
    """Describe a field, as `dataclasses.field` does.

    default: its value if the caller gives none. default_factory: makes this value for each object. repr: show it in `repr()`.
    compare: compare it in `==` and use it for the hash.
    """
    return _Field(default, default_factory, repr, compare)


class _Fields:
    """What `Record` and `MutableRecord` have in common."""

    _described: ClassVar[dict[str, _Field]] = {}
    __match_args__: tuple[str, ...]  # names of the fields, in order
    _defaults: dict[str, Any]
    _factories: dict[str, Callable[[], Any]]
    _shown: tuple[str, ...]
    # Takes an object, and returns its class and the values to compare.
    _compared: Callable[[Any], tuple[Any, ...]]

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        fields = dict(cls._described)  # the fields of the base class come first
        for name in cls.__annotations__:
            value = cls.__dict__.get(name, _REQUIRED)
            if isinstance(value, _Field):
                delattr(cls, name)
            fields[name] = value if isinstance(value, _Field) else _Field(value, None, True, True)
        cls._described = fields
        cls.__match_args__ = tuple(fields)  # type: ignore[misc]  # mypy makes its own
        cls._defaults = {name: one.default for name, one in fields.items() if one.default is not _REQUIRED}
        cls._factories = {name: one.factory for name, one in fields.items() if one.factory}
        cls._shown = tuple(name for name, one in fields.items() if one.shown)
        cls._compared = attrgetter("__class__", *(name for name, one in fields.items() if one.compared))

    def __init__(self, *values: Any, **named: Any) -> None:
        names = self.__match_args__
        complete = values if len(values) == len(names) and not named else self._complete(values, named)
        for name, value in zip(names, complete):  # noqa: B905  # `strict` takes time
            _set(self, name, value)
        self.__post_init__()

    def __post_init__(self) -> None:
        """Check the values. A class can define this method, as with dataclasses."""

    def _complete(self, values: tuple[Any, ...], named: dict[str, Any]) -> list[Any]:
        """Return the value of every field, in order. Raises TypeError for arguments that do not fit."""
        complete, defaults = [*values], self._defaults
        for name in self.__match_args__[len(values) :]:
            if name in named:
                complete.append(named.pop(name))
            elif name in defaults:
                complete.append(defaults[name])
            elif name in self._factories:
                complete.append(self._factories[name]())
            else:
                raise TypeError(f"{type(self).__name__}() lacks the argument {name}")
        if named or len(complete) > len(self.__match_args__):
            raise TypeError(f"{type(self).__name__}() has arguments too many: {[*values, *named]}")
        return complete

    def __repr__(self) -> str:
        fields = (f"{name}={getattr(self, name)!r}" for name in self._shown)
        return f"{type(self).__qualname__}({', '.join(fields)})"


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
class Record(_Fields):
    """A value. It never changes, equals another object of its class with the same values, and has a hash if they have."""

    def __eq__(self, other: object) -> bool:
        if other.__class__ is not self.__class__:
            return NotImplemented
        compared = type(self)._compared
        return compared(self) == compared(other)

    def __hash__(self) -> int:
        return hash(type(self)._compared(self))

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"{type(self).__name__}.{name} cannot be changed")

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"{type(self).__name__}.{name} cannot be deleted")


@dataclass_transform(eq_default=False, field_specifiers=(field,))
class MutableRecord(_Fields):
    """An object whose fields can be set. It equals only itself."""


if TYPE_CHECKING:
    from dataclasses import replace as replace  # mypy knows which fields an object has
else:

    def replace(record, /, **changes):
        """Return a copy of a record or dataclass with other values in some fields."""
        names = record.__match_args__
        values = [changes.pop(name) if name in changes else getattr(record, name) for name in names]
        return type(record)(*values, **changes)


def asdict(record: Any) -> dict[str, Any]:
    """Return the fields of a record or dataclass by name. Records in them, and in their lists, tuples and dicts, become dicts, too."""
    return {name: _plain(getattr(record, name)) for name in record.__match_args__}


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {_plain(key): _plain(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_plain(one) for one in value]
    if isinstance(value, tuple):
        made = (_plain(one) for one in value)
        return type(value)(*made) if hasattr(value, "_fields") else tuple(made)
    return asdict(value) if hasattr(value, "__match_args__") else value
