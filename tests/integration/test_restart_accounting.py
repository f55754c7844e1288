"""Who pays for an answer that took several upstream requests: rows of a second callback."""

from __future__ import annotations

import itertools
import json

import pytest

from tests.integration.restart_bench import (
    LONG,
    Restarting,
    Teller,
    asked,
    without_restarts,
)
from tests.lmstudio_double import Reply

_numbers = itertools.count()


def _new_key() -> tuple[str, dict[str, str]]:
    """A key that nobody has used, and the header that sends it."""
    name = f"sk-one-rows-{next(_numbers)}"
    return name, {"Authorization": f"Bearer {name}"}


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
def test_rows_of_a_restarted_answer(restarting: Restarting, stream: bool) -> None:
    """One row with the summed usage and one for each summary, all of the same key."""
    name, key = _new_key()
    restarting.watch("local", Teller(Reply("Hello.")))
    watch = restarting.watch("middle", Teller(Reply(LONG)))
    body = {"model": "middle", "messages": asked(f"rows {stream}"), "stream": stream}
    if stream:
        answer = restarting.proxy.stream_body(body, **key)
        assert without_restarts(answer.text) == LONG
    else:
        assert restarting.proxy.post(body, headers=key).json()["choices"][0]["message"]["content"] == LONG
    summaries = len(watch.summaries)
    assert len(watch.chats) >= 2
    assert summaries >= 1
    expected = summaries + 1
    rows = restarting.rows.of(name, expected)
    # A row too many would come at once, too: the next request's row is written after it.
    restarting.proxy.post({"model": "local", "messages": [{"role": "user", "content": "Hi."}]}, headers=key)
    assert len(restarting.rows.of(name, expected + 1)) == expected + 1
    assert [row["event"] for row in rows] == ["success"] * expected
    assert len({json.dumps(row["identity"]) for row in rows}) == 1
    assert (rows[0]["identity"]["user_id"], rows[0]["identity"]["team_id"]) == ("una", "solo")
    assert len({row["call_id"] for row in rows}) == expected
    own = [row for row in rows if not row["opening"].startswith("You write the record")]
    assert len(own) == 1
    generated = sum(record.completion_tokens for record in watch.chats)
    if not stream:
        assert own[0]["completion_tokens"] == generated
    # A stopped stream is counted with a stand-in for the model's vocabulary.
    assert own[0]["completion_tokens"] == pytest.approx(generated, rel=0.35)
    assert own[0]["prompt_tokens"] == pytest.approx(watch.chats[0].prompt_tokens, rel=0.35)
