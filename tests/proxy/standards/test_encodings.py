"""Compressed bodies of requests."""

from __future__ import annotations

import gzip
import sys
import zlib
from collections.abc import Callable

import pytest

from litellm_compaction.proxy.standards.encodings import TooLarge, Unreadable, encoding_of, most_plain_bytes, plain

BODY = b'{"model": "small", "input": "Hi"}'


def _zstd(body: bytes) -> bytes:
    found: bytes = pytest.importorskip("zstandard").compress(body)
    return found


@pytest.mark.parametrize(("name", "pack"), [("gzip", gzip.compress), ("deflate", zlib.compress), ("zstd", _zstd)])
def test_a_body_is_read_as_it_was(name: str, pack: Callable[[bytes], bytes]) -> None:
    """And the word for its encoding goes; a damaged or an endless one is refused."""
    headers = [(b"Content-Encoding", name.encode()), (b"accept", b"*/*")]
    assert encoding_of(headers) == name.encode()
    assert plain(pack(BODY), headers) == (BODY, [(b"accept", b"*/*")])
    most = b" " * 8_000_000
    assert plain(pack(most), headers).content == most
    with pytest.raises(TooLarge, match=r"has more than 8\.0 MB"):
        plain(pack(most + b" "), headers)
    with pytest.raises(Unreadable, match=f"its content-encoding, {name}, says"):
        plain(b"{" + pack(BODY), headers)


def test_a_cut_body_is_refused() -> None:
    """Half a request is none."""
    with pytest.raises(Unreadable):
        plain(gzip.compress(BODY)[:-9], [(b"content-encoding", b"gzip")])


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the package, and with the client's own way out."""
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(Unreadable, match=r"install `zstandard`.*enable_request_compression"):
        plain(b"", [(b"content-encoding", b"zstd")])


@pytest.mark.parametrize(
    ("packed_bytes", "most_bytes"),
    [(0, 8_000_000), (400_000, 8_000_000), (1_000_000, 20_000_000), (9_000_000, 128_000_000)],
)
def test_the_most_that_a_body_may_have(packed_bytes: int, most_bytes: int) -> None:
    """By what was sent; never more than all bodies may have together."""
    assert most_plain_bytes(packed_bytes) == most_bytes
    with pytest.raises(TooLarge, match=r"has more than 128\.0 MB"):
        most_plain_bytes(128_000_001)
