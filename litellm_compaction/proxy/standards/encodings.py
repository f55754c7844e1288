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


# Of all bodies that are being decompressed at a time.
MOST_BYTES = 128_000_000
# JSON with text of transcripts takes a fifth to a twentieth of its size.
_ALWAYS_BYTES, _MOST_TIMES = 8_000_000, 20


class Unreadable(Exception):
    """A body cannot be decompressed; the text says why, and what to change.

    Attributes:
        status: of the answer.
    """

    status = 415


class TooLarge(Unreadable):
    """A body that is so large decompressed that it is not read."""

    status = 413


class Plain(NamedTuple):
    """A body without its encoding, and the request's headers without the word for it."""

    content: bytes
    headers: list[tuple[bytes, bytes]]


def encoding_of(headers: Sequence[tuple[bytes, bytes]]) -> bytes:
    """Returns the encoding of a body; b"" for none that is known here."""
    found = next((value.strip().lower() for name, value in headers if name.lower() == b"content-encoding"), b"")
    return found if found in _ZLIB_BITS or found == _ZSTD else b""


def most_plain_bytes(packed_bytes: int) -> int:
    """Returns the most that a body of so many bytes may have when it is decompressed; `plain` takes no more memory.

    Raises:
        TooLarge: it has more already.
    """
    if packed_bytes > MOST_BYTES:
        raise _too_large(packed_bytes)
    return min(max(_ALWAYS_BYTES, _MOST_TIMES * packed_bytes), MOST_BYTES)


def _too_large(packed_bytes: int) -> TooLarge:
    most_bytes = MOST_BYTES if packed_bytes > MOST_BYTES else most_plain_bytes(packed_bytes)
    return TooLarge(
        f"The body came compressed with {packed_bytes / 1e6:.2f} MB and has more than {most_bytes / 1e6:.1f} MB: above "
        f"{_ALWAYS_BYTES / 1e6:.0f} MB it may be {_MOST_TIMES} times as large as it came, and it may have "
        f"{MOST_BYTES / 1e6:.0f} MB at most. Send less, or send it without compression."
    )


def plain(content: bytes, headers: Sequence[tuple[bytes, bytes]]) -> Plain:
    """Returns a compressed body as it was.

    Raises:
        Unreadable: it is damaged, or its encoding needs a package that is not there.
        TooLarge: it has more than `most_plain_bytes`.
    """
    encoding, most_bytes = encoding_of(headers), most_plain_bytes(len(content))
    try:
        whole = (
            _zstd(content, most_bytes) if encoding == _ZSTD else _inflated(content, _ZLIB_BITS[encoding], most_bytes)
        )
    except (zlib.error, ValueError, EOFError):
        raise Unreadable(f"The body is not what its content-encoding, {encoding.decode()}, says.") from None
    if len(whole) > most_bytes:
        raise _too_large(len(content))
    kept = [(name, value) for name, value in headers if name.lower() != b"content-encoding"]
    return Plain(whole, kept)


def _inflated(content: bytes, bits: int, most_bytes: int) -> bytes:
    """At most one byte more than `most_bytes`, by which it is told."""
    reader = zlib.decompressobj(bits)
    whole = reader.decompress(content, most_bytes + 1)
    if not reader.eof and len(whole) <= most_bytes:
        raise EOFError
    return whole


def _zstd(content: bytes, most_bytes: int) -> bytes:
    """At most one byte more than `most_bytes`, by which it is told."""
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
    return whole
