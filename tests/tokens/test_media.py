"""Images whose first bytes are anything; what their sizes cost is recorded in `goldens/counts.txt`."""

from __future__ import annotations

import base64

from hypothesis import given
from hypothesis import strategies as st

from litellm_compaction.tokens.prompt import image_tokens


@given(
    st.binary(max_size=200),
    st.sampled_from([b"", b"\x89PNG\r\n\x1a\n", b"\xff\xd8", b"GIF89a", b"RIFF\0\0\0\0WEBPVP8 "]),
)
def test_any_bytes_are_survived(data: bytes, start: bytes) -> None:
    """Hostile headers give a number between the least and the limit, never an error."""
    url = f"data:image/png;base64,{base64.b64encode(start + data).decode()}"
    part = {"type": "image_url", "image_url": {"url": url}}
    assert 64 <= image_tokens(part, limit_tokens=4096, patch_px=16) <= 4096
