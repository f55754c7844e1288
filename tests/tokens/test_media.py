"""Images cost what their size says, as far as their first bytes say it."""

from __future__ import annotations

import base64
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from litellm_compaction.core.messages import JsonValue
from litellm_compaction.tokens.prompt import image_tokens, inline_size

PNG = b"\x89PNG\r\n\x1a\n" + b"\0\0\0\rIHDR" + struct.pack(">II", 640, 480) + b"\x08\x06\0\0\0"
GIF = b"GIF89a" + struct.pack("<HH", 640, 480) + b"\0"
JPEG = b"\xff\xd8\xff\xe0\x00\x10JFIF" + bytes(10) + b"\xff\xc0\x00\x11\x08" + struct.pack(">HH", 480, 640) + bytes(9)
WEBP_X = b"RIFF\0\0\0\0WEBPVP8X" + bytes(8) + (639).to_bytes(3, "little") + (479).to_bytes(3, "little") + bytes(6)
WEBP = b"RIFF\0\0\0\0WEBPVP8 " + bytes(10) + struct.pack("<HH", 640, 480) + bytes(8)


def url(data: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


def part(data: bytes) -> JsonValue:
    return {"type": "image_url", "image_url": {"url": url(data)}}


@pytest.mark.parametrize("data", [PNG, GIF, JPEG, WEBP, WEBP_X])
def test_the_header_tells_the_size(data: bytes) -> None:
    """Each format that browsers send, whatever it calls itself; one writes a pixel less."""
    assert inline_size(url(data)) == pytest.approx((640, 480), abs=1)


@pytest.mark.parametrize(
    "unknown",
    [
        {"type": "image_url", "image_url": {"url": "https://host/x.png"}},
        {"type": "image_url", "image_url": 3},
        {"type": "input_audio", "input_audio": {"data": "AAAA"}},
        "text",
        None,
    ],
)
def test_an_unknown_size_costs_the_limit(unknown: JsonValue) -> None:
    """Where nobody can say, the count errs high."""
    assert image_tokens(unknown, limit_tokens=1000, patch_px=28) == 1000


def test_an_unknown_format_is_bounded_by_its_bytes() -> None:
    """Three bytes are no picture, and a hundred thousand in a format of tomorrow may be a large one."""
    assert image_tokens(part(b"\0\0\0"), limit_tokens=4096, patch_px=28) < 80
    assert image_tokens(part(bytes(100_000)), limit_tokens=4096, patch_px=28) == 4096


@given(st.binary(max_size=200), st.sampled_from([b"", PNG[:8], b"\xff\xd8", b"GIF89a", b"RIFF\0\0\0\0WEBPVP8 "]))
def test_any_bytes_are_survived(data: bytes, start: bytes) -> None:
    """Hostile headers give a number between the least and the limit, never an error."""
    assert 64 <= image_tokens(part(start + data), limit_tokens=4096, patch_px=16) <= 4096


@pytest.mark.parametrize(
    ("sound", "tokens"),
    [
        ({"format": "wav", "data": "A" * 4 * 3_200_000}, 7500),
        ({"format": "mp3", "data": "A" * 4 * 200_000}, 7500),
        ({"format": "wav", "data": "AAAA"}, 1600),
        ({"format": "wav"}, 1600),
        ({"format": 7, "data": ["x"]}, 1600),
    ],
)
def test_sound_costs_by_its_length(sound: dict[str, JsonValue], tokens: int) -> None:
    """Five minutes are more than an image; what says nothing of its length costs the family's limit."""
    part: JsonValue = {"type": "input_audio", "input_audio": sound}
    assert image_tokens(part, limit_tokens=1600, patch_px=28) == tokens
