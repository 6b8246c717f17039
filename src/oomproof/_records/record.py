"""What every record can do: print itself, and go to and from a dict, JSON text and a file."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import os
import pathlib
from collections.abc import Mapping
from types import NoneType, UnionType
from typing import Any, ClassVar, Self, get_args, get_origin, get_type_hints


@dataclasses.dataclass(frozen=True)
class Record:
    """Base class of the records: numbers, text, tuples, dicts and other records, by the types of the fields."""

    # Properties that are written along with the fields, for whoever reads the JSON.
    _derived: ClassVar[tuple[str, ...]] = ()

    def to_dict(self) -> dict[str, Any]:
        """Returns the record as a dict of what JSON has: numbers, text, lists and dicts."""
        names = [field.name for field in dataclasses.fields(self)]
        return {name: _plain(getattr(self, name)) for name in (*names, *self._derived)}

    def to_json(self) -> str:
        """Returns the record as JSON text."""
        return json.dumps(self.to_dict(), indent=2)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the record to a file, as JSON."""
        pathlib.Path(path).write_text(self.to_json() + "\n")

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Makes a record of what `to_dict` returned. Fields that are missing take their defaults."""
        kinds = _kinds_of(cls)  # type: ignore[arg-type]  # mypy takes no class for hashable
        given = {name: (kinds.get(name), value) for name, value in data.items() if name not in cls._derived}
        # An older version may have written null where there is always a value today.
        return cls(
            **{name: _read(*each) for name, each in given.items() if each[1] is not None or _is_optional(each[0])}
        )

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """Makes a record of JSON text."""
        return cls.from_dict(json.loads(text))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Reads a record from a file that `save` wrote."""
        return cls.from_json(pathlib.Path(path).read_text())


@functools.cache
def _kinds_of(record: type[Record]) -> dict[str, Any]:
    """{field: its type}."""
    return get_type_hints(record)


def _is_optional(kind: Any) -> bool:
    return NoneType in get_args(kind)


def _plain(value: Any) -> Any:
    if isinstance(value, Record):
        return value.to_dict()
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    return [_plain(each) for each in value] if isinstance(value, tuple | list) else value


def _read(kind: Any, value: Any) -> Any:
    """What stands in JSON for a value of a type, as that type."""
    if isinstance(kind, UnionType):
        return None if value is None else _read(get_args(kind)[0], value)
    if get_origin(kind) is tuple:
        first, *others = get_args(kind)
        kinds = itertools.repeat(first) if others == [...] else [first, *others]
        return tuple(_read(*each) for each in zip(kinds, value, strict=False))
    return kind.from_dict(value) if isinstance(kind, type) and issubclass(kind, Record) else value
