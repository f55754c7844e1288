"""Estimates images, sound and pages, from their first bytes or their size; `known.py` has what a server made of it.

Vision models pay by area (Qwen-VL, Pixtral) or a fixed price; only inline images show their size. Nothing is decoded
but the header, whose layout is the formats' own (PNG 1.2 §11.2.2, JPEG ITU T.81 B.2.2, GIF89a §18, RIFF WebP).
"""

from __future__ import annotations

import base64
import binascii
import math
import struct
from collections.abc import Mapping
from typing import NamedTuple

from litellm_compaction.core.messages import JsonValue

# Enough for a JPEG with a large EXIF block before its frame header.
_HEADER_CHARS = 128 * 1024
_JPEG_FRAMES = frozenset({0xC0, 0xC1, 0xC2, 0xC3, 0xC5, 0xC6, 0xC7, 0xC9, 0xCA, 0xCB, 0xCD, 0xCE, 0xCF})
_LEAST_TOKENS = 64
# An image at an address of the web may be of any size; usual ones are about a million pixels, 1,000 to 1,300 tokens of
# 28 pixels a side. The server's own number corrects it, and is asked for if that decides.
_REMOTE_TOKENS = 1024
# Published frame rates, not measured: Qwen2-Audio 25 tokens a second, Voxtral 12.5, Gemma 3n 6.25.
_TOKENS_PER_SECOND = 25
# 16 kHz mono, which models hear; what is recorded better is longer in bytes. Speech is not packed below 16 kbit/s.
_WAV_BYTES_PER_SECOND, _PACKED_BYTES_PER_SECOND = 32_000, 2_000


# Parts that a model sees as images, sound or pages: their data is never text.
_TYPES = frozenset(
    "image_url image input_image image_file input_audio audio video_url video file input_file".split()  # noqa: SIM905
)


class Pixels(NamedTuple):
    """The size of an image."""

    width: int
    height: int


def is_media(part: JsonValue) -> bool:
    has_text = isinstance(part, Mapping) and isinstance(part.get("text"), str)
    return isinstance(part, Mapping) and part.get("type") in _TYPES and not has_text


def image_tokens(part: JsonValue, *, limit_tokens: int, patch_px: int) -> int:
    """Tokens of one part that is not text: by area or length if that is known, else the family's upper limit.

    Args:
        part: of a message's content.
        limit_tokens: the most that one image costs.
        patch_px: pixels on a side of the square that one token sees; 0 if every image costs the limit.
    """
    sound = part.get("input_audio") if isinstance(part, Mapping) else None
    if isinstance(sound, Mapping):
        return max(limit_tokens, _sound_tokens(sound))
    if not patch_px:
        return limit_tokens
    size = inline_size(part)
    if size is None and _is_remote_image(part):
        return min(_REMOTE_TOKENS, limit_tokens)
    if size is None:
        # No format pays more than a token for eight bytes of its own; what is not inline may be of any size.
        data_chars = _inline_chars(part)
        return limit_tokens if data_chars is None else min(_LEAST_TOKENS + data_chars // 8, limit_tokens)
    columns, rows = math.ceil(size.width / patch_px), math.ceil(size.height / patch_px)
    # A separator for each row, begin and end markers.
    return min(max(columns * rows + rows + 8, _LEAST_TOKENS), limit_tokens)


def _sound_tokens(sound: Mapping[str, JsonValue]) -> int:
    """Tokens of inline sound by its length, as if it were packed as tightly as its format allows."""
    data = sound.get("data")
    data_bytes = len(data) * 3 // 4 if isinstance(data, str) else 0
    is_plain = sound.get("format") == "wav"
    return data_bytes * _TOKENS_PER_SECOND // (_WAV_BYTES_PER_SECOND if is_plain else _PACKED_BYTES_PER_SECOND)


def inline_size(part: JsonValue) -> Pixels | None:
    """The size of an inline image (a `data:` URL); None for anything else, or when its header says nothing."""
    url = _url(part)
    if not url.startswith("data:image/"):
        return None
    _, _, data = url[: _HEADER_CHARS + 64].partition(";base64,")
    try:
        header = base64.b64decode(data[: len(data) // 4 * 4], validate=False)
        size = _size(header)
    except (binascii.Error, struct.error, ValueError, IndexError):
        return None
    return size if size is not None and size.width > 0 and size.height > 0 else None


def _is_remote_image(part: JsonValue) -> bool:
    return isinstance(part, Mapping) and "image_url" in part and _url(part).startswith(("http://", "https://"))


def _inline_chars(part: JsonValue) -> int | None:
    url = _url(part)
    return len(url) if url.startswith("data:") else None


def _url(part: JsonValue) -> str:
    source = part.get("image_url") if isinstance(part, Mapping) else None
    url = source.get("url") if isinstance(source, Mapping) else source
    return url if isinstance(url, str) else ""


def _size(header: bytes) -> Pixels | None:
    if header.startswith(b"\x89PNG\r\n\x1a\n"):
        return Pixels(*struct.unpack(">II", header[16:24]))
    if header.startswith((b"GIF87a", b"GIF89a")):
        return Pixels(*struct.unpack("<HH", header[6:10]))
    if header.startswith(b"RIFF") and header[8:12] == b"WEBP":
        return _webp_size(header)
    if header.startswith(b"\xff\xd8"):
        return _jpeg_size(header)
    return None


def _webp_size(header: bytes) -> Pixels | None:
    kind = header[12:16]
    if kind == b"VP8X":
        return Pixels(1 + int.from_bytes(header[24:27], "little"), 1 + int.from_bytes(header[27:30], "little"))
    if kind == b"VP8L":
        bits = int.from_bytes(header[21:25], "little")
        return Pixels(1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF))
    if kind == b"VP8 ":
        width, height = struct.unpack("<HH", header[26:30])
        return Pixels(width & 0x3FFF, height & 0x3FFF)
    return None


def _jpeg_size(header: bytes) -> Pixels | None:
    position = 2
    while position + 9 <= len(header):
        if header[position] != 0xFF:
            return None
        marker = header[position + 1]
        if marker in _JPEG_FRAMES:
            height, width = struct.unpack(">HH", header[position + 5 : position + 9])
            return Pixels(width, height)
        position += 2 + int.from_bytes(header[position + 2 : position + 4], "big")
    return None
