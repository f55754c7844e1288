"""Compressed bodies of requests."""

from __future__ import annotations

import gzip
import sys
import zlib
from collections.abc import Callable

import pytest

from litellm_compaction.proxy.standards.encodings import Unreadable, encoding_of, plain

BODY = b'{"model": "small", "input": "Hi"}'


def _zstd(body: bytes) -> bytes:
    found: bytes = pytest.importorskip("zstandard").compress(body)
    return found


@pytest.mark.parametrize(("name", "pack"), [("gzip", gzip.compress), ("deflate", zlib.compress), ("zstd", _zstd)])
def test_a_body_is_read_as_it_was(name: str, pack: Callable[[bytes], bytes]) -> None:
    """And the word for its encoding goes; a damaged or an endless one is refused."""
    headers = [(b"Content-Encoding", name.encode()), (b"accept", b"*/*")]
    assert encoding_of(headers) == name.encode()
    assert plain(pack(BODY), headers, most_bytes=100) == (BODY, [(b"accept", b"*/*")])
    with pytest.raises(Unreadable, match="more than"):
        plain(pack(BODY * 9), headers, most_bytes=100)
    with pytest.raises(Unreadable, match=f"its content-encoding, {name}, says"):
        plain(b"{" + pack(BODY), headers, most_bytes=100)


def test_a_cut_body_is_refused() -> None:
    """Half a request is none."""
    with pytest.raises(Unreadable):
        plain(gzip.compress(BODY)[:-9], [(b"content-encoding", b"gzip")], most_bytes=100)


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the package, and with the client's own way out."""
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(Unreadable, match=r"install `zstandard`.*enable_request_compression"):
        plain(b"", [(b"content-encoding", b"zstd")], most_bytes=100)


@pytest.mark.parametrize("headers", [[], [(b"content-encoding", b"br")], [(b"content-encoding", b"identity")]])
def test_others_are_not_ours(headers: list[tuple[bytes, bytes]]) -> None:
    """LiteLLM has its own way with them."""
    assert encoding_of(headers) == b""
