"""Compressed bodies of requests, which Codex sends and LiteLLM takes for empty ones (1.106.2).

LiteLLM then says that a field is missing. A body for a guarded model is handed on as it was before it was compressed.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from importlib import import_module
from typing import Any, NamedTuple

_ZLIB_BITS = {b"gzip": 31, b"x-gzip": 31, b"deflate": 15}
_ZSTD = b"zstd"


class Unreadable(Exception):
    """A body cannot be decompressed; the text says why, and what to change."""


class Plain(NamedTuple):
    """A body without its encoding, and the request's headers without the word for it."""

    content: bytes
    headers: list[tuple[bytes, bytes]]


def encoding_of(headers: Sequence[tuple[bytes, bytes]]) -> bytes:
    """Returns the encoding of a body; b"" for none that is known here."""
    found = next((value.strip().lower() for name, value in headers if name.lower() == b"content-encoding"), b"")
    return found if found in _ZLIB_BITS or found == _ZSTD else b""


def plain(content: bytes, headers: Sequence[tuple[bytes, bytes]], *, most_bytes: int) -> Plain:
    """Returns a compressed body as it was.

    Raises:
        Unreadable: it is damaged, larger than `most_bytes`, or its encoding needs a package that is not there.
    """
    encoding = encoding_of(headers)
    try:
        whole = (
            _zstd(content, most_bytes) if encoding == _ZSTD else _inflated(content, _ZLIB_BITS[encoding], most_bytes)
        )
    except (zlib.error, ValueError, EOFError):
        raise Unreadable(f"The body is not what its content-encoding, {encoding.decode()}, says.") from None
    kept = [(name, value) for name, value in headers if name.lower() != b"content-encoding"]
    return Plain(whole, kept)


def _inflated(content: bytes, bits: int, most_bytes: int) -> bytes:
    reader = zlib.decompressobj(bits)
    whole = reader.decompress(content, most_bytes)
    if reader.unconsumed_tail:
        raise Unreadable(f"The body has more than {most_bytes // 1_000_000} MB.")
    if not reader.eof:
        raise EOFError
    return whole


def _zstd(content: bytes, most_bytes: int) -> bytes:
    try:
        zstandard: Any = import_module("zstandard")
    except ImportError:
        raise Unreadable(
            "The body is compressed with zstd, which this proxy cannot read: install `zstandard` beside LiteLLM, or "
            "have the client send it as it is (Codex: `enable_request_compression = false` under `[features]`)."
        ) from None
    try:
        reader = zstandard.ZstdDecompressor().stream_reader(content)
        whole: bytes = reader.read(most_bytes + 1)
    except zstandard.ZstdError:
        raise EOFError from None
    if len(whole) > most_bytes:
        raise Unreadable(f"The body has more than {most_bytes // 1_000_000} MB.")
    return whole
