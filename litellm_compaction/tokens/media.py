"""Estimates images, sound and pages, from their first bytes or their size; `known.py` has what a server made of it.

Vision models pay by area (Qwen-VL, Pixtral) or a fixed price; only inline images show their size, in their headers.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping
from math import ceil
from typing import Literal

from litellm_compaction.core.messages import JsonValue

# Enough for a JPEG with a large EXIF block before its frame header.
_HEADER_CHARS = 128 * 1024
_LEAST_TOKENS, _CHARS_PER_TOKEN = 64, 8
# An image of the web may be of any size; usual ones are a million pixels, 1,000 to 1,300 tokens of 28 pixels a side.
_REMOTE_TOKENS = 1024
# Sound by published frame rates, not measured: Qwen2-Audio 25 tokens a second, Voxtral 12.5, Gemma 3n 6.25. Plain sound
# is 16 kHz mono, which models hear; what is recorded better is longer in bytes. Speech is not packed below 16 kbit/s.
_WAV_BYTES_PER_TOKEN, _PACKED_BYTES_PER_TOKEN = 32_000 // 25, 2_000 // 25
# Parts that a model sees as images, sound or pages: their data is never text.
_TYPES = frozenset(
    "image_url image input_image image_file input_audio audio video_url video file input_file".split()  # noqa: SIM905
)
# Width and height in a header, and their order of bytes.
_SIZES: tuple[tuple[re.Pattern[bytes], Literal["big", "little"]], ...] = (
    (re.compile(rb"\x89PNG\r\n\x1a\n.{8}(.{4})(.{4})", re.DOTALL), "big"),
    (re.compile(rb"GIF8[79]a(..)(..)", re.DOTALL), "little"),
    (re.compile(rb"RIFF.{4}WEBPVP8 .{10}(..)(..)", re.DOTALL), "little"),
    (re.compile(rb"RIFF.{4}WEBPVP8X.{8}(...)(...)", re.DOTALL), "little"),
    # Behind segments, each of which says its length.
    (re.compile(rb"\xff[\xc0-\xc3\xc5-\xc7\xc9-\xcb\xcd-\xcf]...(..)(..)", re.DOTALL), "big"),
)


def is_media(part: JsonValue) -> bool:
    return isinstance(part, Mapping) and str(part.get("type")) in _TYPES and not isinstance(part.get("text"), str)


def image_tokens(part: JsonValue, *, limit_tokens: int, patch_px: int) -> int:
    """Tokens of one part that is not text: by area or length if that is known, else the family's upper limit.

    One token sees a square of `patch_px` pixels a side; 0 if every image costs the limit.
    """
    fields = part if isinstance(part, Mapping) else {}
    sound, source = fields.get("input_audio"), fields.get("image_url")
    if isinstance(sound, Mapping):
        data, is_plain = sound.get("data"), sound.get("format") == "wav"
        data_bytes = len(data) * 3 // 4 if isinstance(data, str) else 0
        return max(limit_tokens, data_bytes // (_WAV_BYTES_PER_TOKEN if is_plain else _PACKED_BYTES_PER_TOKEN))
    url = source.get("url") if isinstance(source, Mapping) else source
    if not patch_px or not isinstance(url, str) or not url.startswith(("data:", "http://", "https://")):
        return limit_tokens
    if not url.startswith("data:"):
        return min(_REMOTE_TOKENS, limit_tokens)
    width, height = inline_size(url)
    # A separator for each row, begin and end markers. No format pays more than a token for eight bytes of its own.
    columns, rows = ceil(width / patch_px), ceil(height / patch_px)
    tokens = columns * rows + rows + 8 if width and height else _LEAST_TOKENS + len(url) // _CHARS_PER_TOKEN
    return min(max(tokens, _LEAST_TOKENS), limit_tokens)


def inline_size(url: str) -> tuple[int, int]:
    """Width and height of an inline image (a `data:` URL) in pixels; 0 if its header says nothing."""
    data = url[: _HEADER_CHARS + _LEAST_TOKENS].partition(";base64,")[2]
    try:
        header = base64.b64decode(data[: len(data) // 4 * 4])
    except ValueError:
        return 0, 0
    start = 2 if header.startswith(b"\xff\xd8") else 0
    while start and header[start : start + 1] == b"\xff" and not _SIZES[-1][0].match(header, start):
        start += 2 + int.from_bytes(header[start + 2 : start + 4], "big")
    for pattern, order in _SIZES[-1:] if start else _SIZES[:-1]:
        if found := pattern.match(header, start):
            one, other = (int.from_bytes(number, order) for number in found.groups())
            return (other, one) if start else (one, other)
    return 0, 0
