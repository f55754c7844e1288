"""Prices of images, sound and pages: an estimate from their first bytes or their size, and servers' own prices.

Vision models pay by area (Qwen-VL, Pixtral) or a fixed price; only inline images show their size. Nothing is decoded
but the header, whose layout is the formats' own (PNG 1.2 §11.2.2, JPEG ITU T.81 B.2.2, GIF89a §18, RIFF WebP).

Real prices are learned from a deployment's usage. They differ by server and settings (an image scaled down before it is
seen, a model that sees none), never much between two images of one client; the highest of late counts. Four
conversations with an image in every third message, priced in six ways (2026-11-23): error 0.0 % at the 90th percentile,
and 13 of 2,496 counts too low; by the estimate alone 7.5 % and 76.
"""

from __future__ import annotations

import base64
import binascii
import math
import struct
from collections.abc import Mapping, Sequence
from math import inf
from typing import NamedTuple

from litellm_compaction.core.messages import JsonValue
from litellm_compaction.tokens.samples import Samples, Stamps

# Enough for a JPEG with a large EXIF block before its frame header.
_HEADER_CHARS = 128 * 1024
_JPEG_FRAMES = frozenset({0xC0, 0xC1, 0xC2, 0xC3, 0xC5, 0xC6, 0xC7, 0xC9, 0xCA, 0xCB, 0xCD, 0xCE, 0xCF})
_LEAST_TOKENS = 64
# The most that an encoder takes which charges the same for each image, however small (Llama vision).
MOST_FIXED_TOKENS = 1616
# An image at an address of the web may be of any size; usual ones are about a million pixels, 1,000 to 1,300 tokens of
# 28 pixels a side. The server's own number corrects it, and is asked for if that decides.
_REMOTE_TOKENS = 1024
# Published frame rates, not measured: Qwen2-Audio 25 tokens a second, Voxtral 12.5, Gemma 3n 6.25.
_TOKENS_PER_SECOND = 25
# 16 kHz mono, which models hear; what is recorded better is longer in bytes. Speech is not packed below 16 kbit/s.
_WAV_BYTES_PER_SECOND, _PACKED_BYTES_PER_SECOND = 32_000, 2_000
# Of the estimate: what a server adds to each image, or an estimate by area that is far too low, explains no more.
_MAX_RATIO = 4.0
# What is observed may be wrong by this part of the estimate: the text beside it is an estimate too.
_MAX_DOUBT_RATIO = 0.2
# Below this a template's marks around an image decide.
_LEAST_PRICED_TOKENS = 16
_KEPT = 8
_FIRST_ERROR, _SETTLED_ERROR, _SETTLED_SAMPLES = 0.15, 0.05, 3
_OPTIMISM_ERROR = 0.5


class Pixels(NamedTuple):
    """The size of an image."""

    width: int
    height: int


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


class Price(NamedTuple):
    """True tokens of media, per estimated one.

    Attributes:
        doubt_ratio: true tokens ≤ estimate × (factor + this); None if nothing is known.
    """

    factor: float = 1.0
    doubt_ratio: float | None = None


UNKNOWN = Price()


class _Sample(NamedTuple):
    ratio: float
    each_tokens: float


def _sample(numbers: Sequence[float]) -> _Sample | None:
    if len(numbers) != 2 or not 0 <= numbers[0] <= _MAX_RATIO or numbers[1] <= 0:
        return None
    return _Sample(*numbers)


class MediaPrices:
    """True tokens per estimated one, of one deployment's images and sound."""

    def __init__(self, stamps: Stamps | None = None) -> None:
        self.samples = Samples(stamps or Stamps(), _KEPT, _sample, digits=4)

    def price(self) -> Price:
        """The expected price of the next image."""
        ratios = [sample.ratio for sample in self.samples.values]
        if not ratios:
            return UNKNOWN
        factor = max(ratios)
        doubt = _SETTLED_ERROR * factor
        if len(ratios) < _SETTLED_SAMPLES:
            # The next one may be of another kind, at its full estimate.
            doubt = max(_FIRST_ERROR * factor, _OPTIMISM_ERROR * (1 - factor))
        return Price(factor, max(doubt, factor - min(ratios)))

    def between(self, estimated_tokens: float, images: int) -> tuple[float, float]:
        """The least and the most that media take; inf if nothing is known.

        Servers charge by area, or the same for each image; without knowing which, only what both say is known.
        """
        if not images:
            return 0.0, 0.0
        samples = self.samples.values
        if not samples:
            return 0.0, inf
        by_area = max(sample.ratio for sample in samples) * estimated_tokens
        by_number = max(sample.ratio * sample.each_tokens for sample in samples) * images
        return min(by_area, by_number), max(by_area, by_number)

    def note(self, estimated_tokens: float, observed_tokens: float, doubt_tokens: float, *, images: float = 1) -> None:
        """Learns a server's count of media, unless other things may explain it.

        Args:
            estimated_tokens: ours, of so many `images`.
            observed_tokens: the server's number for the prompt, without what its text takes.
            doubt_tokens: by how much that text may take more or less.
        """
        if estimated_tokens < _LEAST_PRICED_TOKENS or doubt_tokens > _MAX_DOUBT_RATIO * estimated_tokens:
            return
        ratio = observed_tokens / estimated_tokens
        # Text that is a little shorter than we count looks like a price below nothing.
        if -_MAX_DOUBT_RATIO <= ratio <= _MAX_RATIO:
            self.samples.add(_Sample(max(0.0, ratio), estimated_tokens / images))

    def change_key(self) -> tuple[int, ...]:
        """Changes only if the next price changes noticeably: by 5 % of the estimate."""
        return min(len(self.samples.values), _SETTLED_SAMPLES), round(20 * self.price().factor)
