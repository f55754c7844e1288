"""`demo`: its picture, and what it makes of answers; tests/processes has a real run."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from litellm_compaction.cli.demo import Filling, ask
from litellm_compaction.errors import ServerUnavailable


def test_a_cut_prompt_is_a_bar_with_a_gap() -> None:
    """The gap is as wide as the share that is lost, half of it here, and its tokens stand beside it in capitals."""
    assert Filling(10_000, 5_000).drawn(8192).rstrip() == "██████xxxxxxxxxxxx██████  10,000 CUT -5,000"
    assert Filling(0, has_failed=True).drawn(8192).rstrip() == "░░░░░░░░░░░░░░░░░░░░░░░░       0 FAILED"


@pytest.mark.parametrize(
    ("answered", "said"),
    [
        (httpx.Response(400, text="too long"), ({}, "HTTP 400: too long")),
        (httpx.Response(200, text="no JSON"), ({}, "JSONDecodeError: Expecting value: line 1 column 1 (char 0)")),
        (httpx.ReadError("reset"), ({}, "ReadError: reset")),
        (httpx.Response(200, json={"choices": [{"message": {"content": "Hello"}}]}), ({"content": "Hello"}, "")),
        (httpx.ConnectError("refused"), None),
    ],
)
def test_a_failure_is_an_error_of_the_answer(answered: Any, said: Any) -> None:
    """But a proxy that is gone ends the demo."""

    def answer(_: httpx.Request) -> httpx.Response:
        if isinstance(answered, Exception):
            raise answered
        return answered  # type: ignore[no-any-return]

    with httpx.Client(base_url="http://proxy", transport=httpx.MockTransport(answer)) as http:
        if said is None:
            with pytest.raises(ServerUnavailable):
                ask(http, "model", [])
        else:
            assert ask(http, "model", []) == said
