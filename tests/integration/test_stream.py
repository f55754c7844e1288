"""What a client of a compacted answer reads: notices, one well-formed stream, headers."""

from __future__ import annotations

import pytest

from tests.builders import ONE_ROUND, talk
from tests.integration.bench import Bench


@pytest.mark.parametrize("stream", [False, True])
def test_headers_say_what_was_done(guarded: Bench, stream: bool) -> None:
    """Headers tell none, compacted, then reused, with tokens before and after, the window and the round."""
    watch = guarded.watch("local")
    messages = talk(f"headers {stream}", ONE_ROUND)
    seen = []
    for sent in (messages[:3], messages, messages):
        body = {"model": "local", "messages": sent, "stream": stream}
        headers = guarded.proxy.post(body).headers
        prefix = "x-litellm-compaction"
        seen.append((headers[prefix], headers[f"{prefix}-round"]))
        before, after = int(headers[f"{prefix}-tokens-before"]), int(headers[f"{prefix}-tokens-after"])
        assert headers[f"{prefix}-window"] == "8192"
        assert (after < before) == (headers[prefix] != "none")
        if stream and headers[prefix] == "compacted":
            # The headers go out before the summary is written: an upper bound.
            assert watch.chats[-1].prompt_tokens <= after
        else:
            assert after == pytest.approx(watch.chats[-1].prompt_tokens, rel=0.3, abs=30)
    assert seen == [("none", "0"), ("compacted", "1"), ("reused", "1")]
