"""Small .gguf files for a real llama.cpp (docs/gguf.md of the ggml repository): metadata, and tensors of zeros."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from math import prod
from typing import NamedTuple

CODES = {"u8": 0, "i8": 1, "u16": 2, "i16": 3, "u32": 4, "i32": 5, "f32": 6, "bool": 7, "str": 8, "arr": 9}
CODES |= {"u64": 10, "i64": 11, "f64": 12}
_PACKED = {"u8": "B", "i8": "b", "u16": "H", "i16": "h", "u32": "I", "i32": "i", "f32": "f", "bool": "?"}
_PACKED |= {"u64": "Q", "i64": "q", "f64": "d"}


class Array(NamedTuple):
    """An array value; `kind` is that of its elements."""

    kind: str
    values: Sequence[object]


Value = tuple[str, object] | Array | str


class Tensor(NamedTuple):
    """The shape of a tensor, the innermost dimension first; `kind` is f32 or q4_0 (32 numbers in 18 bytes)."""

    shape: tuple[int, ...]
    kind: str = "f32"

    @property
    def bytes(self) -> int:
        """Its size."""
        numbers = prod(self.shape)
        return 4 * numbers if self.kind == "f32" else numbers // 32 * 18


def gguf(
    fields: dict[str, Value] | Sequence[tuple[str, Value]],
    *,
    version: int = 3,
    zeros: Mapping[str, Tensor] | None = None,
) -> bytes:
    """A file with these metadata fields: a text, (kind, number), or an Array; and these tensors, of zeros only."""
    pairs = list(fields.items()) if isinstance(fields, dict) else list(fields)
    body = b"".join(string(key) + _typed(value) for key, value in pairs)
    infos, data_bytes = b"", 0
    for name, tensor in (zeros or {}).items():
        infos += string(name) + struct.pack(f"<I{len(tensor.shape)}Q", len(tensor.shape), *tensor.shape)
        infos += struct.pack("<IQ", 0 if tensor.kind == "f32" else 2, data_bytes)
        data_bytes += _aligned(tensor.bytes)
    head = b"GGUF" + struct.pack("<IQQ", version, len(zeros or {}), len(pairs)) + body + infos
    if data_bytes:
        head = head.ljust(_aligned(len(head)), b"\0") + bytes(data_bytes)
    return head


def string(text: str | bytes) -> bytes:
    """A length and its bytes."""
    raw = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(raw)) + raw


def _aligned(size: int) -> int:
    return -(-size // 32) * 32


def _typed(value: Value) -> bytes:
    if isinstance(value, str):
        value = ("str", value)
    kind = "arr" if isinstance(value, Array) else value[0]
    return struct.pack("<I", CODES[kind]) + _plain(kind, value if isinstance(value, Array) else value[1])


def _plain(kind: str, value: object) -> bytes:
    if isinstance(value, Array):
        head = struct.pack("<IQ", CODES[value.kind], len(value.values))
        return head + b"".join(_plain(value.kind, element) for element in value.values)
    if kind == "str":
        assert isinstance(value, str | bytes)
        return string(value)
    return struct.pack(f"<{_PACKED[kind]}", value)
