"""Plain data as bytes, for crossing the wall in both directions. Reading it never runs code, unlike pickle.

One byte of tag, then: length and bytes (int, str, bytes), eight bytes (float), or a count and items (containers).
Types are asked for with `type(x)` and read through the slots of the built-in types, never through the value's own
methods, so that a class that overrides them has no say in what is written.
"""

from __future__ import annotations

import struct
import sys
from typing import Any

MAX_DEPTH = 64
MAX_HASHED = 50_000  # entries of one untrusted dict or set
_COUNT = struct.Struct("<I")
_FLOAT = struct.Struct("<d")


class NotData(ValueError):
    """The value cannot be written, or the bytes are not what `encode` writes."""


def encode(value: Any, limit: int) -> bytes:
    """At most `limit` bytes. Raises NotData for other types, deeper nesting than MAX_DEPTH, and more bytes."""
    out = _Writer(limit)
    out.write(value, 0)
    return b"".join(out.parts)


def decode(data: bytes, *, trusted: bool = False) -> Any:
    """Inverse of `encode`; raises NotData. Untrusted: large dicts and sets, whose keys could be chosen to collide, are
    refused, and lone surrogates are replaced."""
    reader = _Reader(data, trusted)
    try:
        value = reader.read(0)
    except (IndexError, struct.error, TypeError, UnicodeDecodeError) as error:
        raise NotData(f"malformed data: {error}") from None
    if reader.position != len(data):
        raise NotData("malformed data: bytes after its end")
    return value


class _Writer:
    def __init__(self, limit: int) -> None:
        self.parts: list[bytes] = []
        self.room = limit

    def put(self, part: bytes) -> None:
        self.room -= len(part)
        if self.room < 0:
            raise NotData("too large")
        self.parts.append(part)

    def write(self, value: Any, depth: int) -> None:
        if depth > MAX_DEPTH:
            raise NotData(f"nested deeper than {MAX_DEPTH}")
        kind = type(value)
        if value is None or kind is bool:
            self.put(b"N" if value is None else b"T" if value else b"F")
        elif kind is float:
            self.put(b"d" + _FLOAT.pack(value))
        elif kind in _SIZED:
            self.sized(value, kind)
        elif kind in _CONTAINERS:
            self.container(value, kind, depth)
        else:
            self.write(_as_builtin(value, kind), depth + 1)

    def sized(self, value: Any, kind: type) -> None:
        if kind is int:
            raw = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
        else:
            raw = value.encode("utf-8", "surrogatepass") if kind is str else bytes(value)
        self.put(_SIZED[kind] + _COUNT.pack(len(raw)))
        self.put(raw)

    def container(self, value: Any, kind: type, depth: int) -> None:
        self.put(_CONTAINERS[kind] + _COUNT.pack(len(value)))
        items = value if kind is not dict else (part for pair in value.items() for part in pair)
        for item in items:
            self.write(item, depth + 1)


_SIZED: dict[type, bytes] = {int: b"i", str: b"s", bytes: b"b", bytearray: b"b"}
_CONTAINERS: dict[type, bytes] = {list: b"l", tuple: b"t", set: b"S", frozenset: b"Z", dict: b"D"}
# How an instance of a subclass becomes an exact instance, by the base's own slots
_PLAIN: dict[type, Any] = {
    int: lambda x: int.__add__(x, 0),
    float: lambda x: float.__add__(x, 0.0),
    str: str.__str__,
    bytes: lambda x: bytes.__getitem__(x, slice(None)),
    list: lambda x: list.__getitem__(x, slice(None)),
    tuple: lambda x: tuple.__getitem__(x, slice(None)),
    set: lambda x: set.union(set(), set.__iter__(x)),
    frozenset: lambda x: frozenset.union(frozenset(), frozenset.__iter__(x)),
    dict: lambda x: dict.__or__({}, x),
}


def _as_builtin(value: Any, kind: type) -> Any:
    bases = type.__dict__["__mro__"].__get__(kind)
    for base, plain in _PLAIN.items():
        if base in bases:
            return plain(value)
    numpy = sys.modules.get("numpy")
    if numpy is not None and (numpy.generic in bases or numpy.ndarray in bases):
        return numpy.ndarray.tolist(numpy.asarray(value))
    name = type.__dict__["__name__"].__get__(kind)
    raise NotData(f"{name} is not plain data")


class _Reader:
    def __init__(self, data: bytes, trusted: bool) -> None:
        self.data = data
        self.position = 0
        self.trusted = trusted

    def take(self, n: int) -> bytes:
        end = self.position + n
        if end > len(self.data):
            raise IndexError("cut short")
        part = self.data[self.position : end]
        self.position = end
        return part

    def read(self, depth: int) -> Any:
        if depth > 2 * MAX_DEPTH:  # a subclass takes two levels in the writer
            raise NotData("malformed data: nested too deep")
        tag = self.take(1)
        if tag in b"NTF":
            return {b"N": None, b"T": True, b"F": False}[tag]
        if tag == b"d":
            return _FLOAT.unpack(self.take(8))[0]
        (count,) = _COUNT.unpack(self.take(4))
        if tag in b"isb":
            return self.sized(tag, self.take(count))
        if tag in b"ltSZD" and count <= len(self.data) - self.position:  # an item takes a byte at least
            return self.container(tag, count, depth)
        raise NotData(f"malformed data: tag {tag!r}")

    def sized(self, tag: bytes, raw: bytes) -> Any:
        if tag == b"i":
            return int.from_bytes(raw, "little", signed=True)
        if tag == b"s":
            return raw.decode("utf-8", "surrogatepass" if self.trusted else "replace")
        return raw

    def container(self, tag: bytes, count: int, depth: int) -> Any:
        if tag == b"D":
            keys, values = [], []
            for _ in range(count):
                keys.append(self.read(depth + 1))
                values.append(self.read(depth + 1))
            self.check_keys(keys)
            return dict(zip(keys, values, strict=True))
        items = [self.read(depth + 1) for _ in range(count)]
        if tag == b"l":
            return items
        if tag == b"t":
            return tuple(items)
        self.check_keys(items)
        return set(items) if tag == b"S" else frozenset(items)

    def check_keys(self, keys: list[Any]) -> None:
        """Keys chosen to hash alike would make the reader's dict quadratic: minutes of the judge for a megabyte."""
        if self.trusted or len(keys) < 64:
            return
        if len(keys) > MAX_HASHED:
            raise NotData(f"a dict or set of more than {MAX_HASHED} entries")
        if 2 * len({hash(key) for key in keys}) < len(keys):
            raise NotData("keys that hash alike")
