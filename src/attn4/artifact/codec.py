"""Frozen dataclasses to and from JSON values, checked against their annotations."""

from __future__ import annotations

import types
import typing
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any, TypeVar

T = TypeVar("T")


def encode(kind: Any, value: Any) -> Any:
    """``value``, annotated as ``kind``, in JSON values. A whole number in a float field becomes a float."""
    if is_dataclass(kind):
        hints = _hints(typing.cast(type, kind))
        return {field.name: encode(hints[field.name], getattr(value, field.name)) for field in fields(kind)}
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is tuple:
        return [encode(arguments[0], item) for item in value]
    if origin is dict:
        return {name: encode(arguments[1], item) for name, item in value.items()}
    if origin in (types.UnionType, typing.Union):
        return None if value is None else encode(_without_none(kind), value)
    return kind(value) if kind in (bool, int, float) else value


def decode(kind: type[T], value: Any, where: str) -> T:
    """Inverse of ``encode``. Raises ValueError that names the place in ``where`` that does not fit."""
    decoded: T = _decode(kind, value, where)
    return decoded


def _decode(kind: Any, value: Any, where: str) -> Any:
    if kind is Any:
        return value
    if is_dataclass(kind):
        return _decode_dataclass(typing.cast(type, kind), value, where)
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is tuple:
        items = _expect(list, value, where)
        return tuple(_decode(arguments[0], item, f"{where}[{i}]") for i, item in enumerate(items))
    if origin is dict:
        entries = _expect(dict, value, where)
        return {name: _decode(arguments[1], item, f"{where}.{name}") for name, item in entries.items()}
    if origin in (types.UnionType, typing.Union):
        return None if value is None else _decode(_without_none(kind), value, where)
    if origin is typing.Literal:
        if value not in arguments:
            raise ValueError(f"{where} is {value!r}; allowed are {', '.join(arguments)}.")
        return value
    return _expect(kind, float(value) if kind is float and type(value) is int else value, where)


def _decode_dataclass(kind: type, value: Any, where: str) -> Any:
    hints = _hints(kind)
    entries = _expect(dict, value, where)
    unknown = sorted(entries.keys() - {field.name for field in fields(kind)})
    if unknown:
        raise ValueError(f"{where} has {', '.join(unknown)}, which a {kind.__name__} has not.")
    decoded = {name: _decode(hints[name], entry, f"{where}.{name}") for name, entry in entries.items()}
    try:
        return kind(**decoded)
    except TypeError as error:
        raise ValueError(f"{where} is not a whole {kind.__name__}: {error}.") from None


def _expect(kind: type, value: Any, where: str) -> Any:
    if type(value) is not kind:
        raise ValueError(f"{where} is {value!r}; a value of type {kind.__name__} is expected.")
    return value


def _without_none(kind: Any) -> Any:
    """``X`` of ``X | None``, the only unions that are used."""
    (only,) = (entry for entry in typing.get_args(kind) if entry is not type(None))
    return only


@cache
def _hints(kind: type) -> dict[str, Any]:
    return typing.get_type_hints(kind)
