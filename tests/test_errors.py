"""The error tree, and the overflow messages of every server and version that we know."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from litellm_compaction import errors
from litellm_compaction.errors import Overflow, overflow_from_text

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

RECORDED = tomllib.loads(Path(__file__).with_name("recorded_overflows.toml").read_text(encoding="utf-8"))["recorded"]


@pytest.mark.parametrize("recorded", [pytest.param(each, id=each["server"]) for each in RECORDED])
def test_recorded_bodies_are_recognized(recorded: dict[str, Any]) -> None:
    """With the numbers that they name, as they came, in upper case, and quoted inside of other text."""
    body = recorded["body"]
    revealed = Overflow(recorded.get("prompt"), recorded.get("window"))
    assert overflow_from_text(body) == revealed
    assert overflow_from_text(body.upper()) == revealed
    assert overflow_from_text(f"litellm.BadRequestError: OpenAIException -\n{body}\nTraceback …") == revealed
    assert overflow_from_text(json.dumps({"error": {"message": body}, "message": body})) == revealed


@pytest.mark.parametrize(
    "text",
    [
        "",
        "The model has crashed without additional information. (Exit code: 18446744072635810000)",
        'Error rendering prompt with jinja template: "Only user and assistant roles are supported!"',
        "The context length of a model can be changed in its settings; 4096 tokens are the default.",
        "n_ctx = 4096, n_batch = 512, n_predict = 512, n_keep = 42",
    ],
)
def test_other_texts_are_no_overflow(text: str) -> None:
    """A mistaken overflow would compact conversations for nothing."""
    assert overflow_from_text(text) is None


@pytest.mark.parametrize(("chars", "found"), [(20_000, Overflow(None, 4096)), (20_001, None)])
def test_a_servers_own_words_come_first(chars: int, found: Overflow | None) -> None:
    """Behind them it may quote megabytes of a request."""
    assert overflow_from_text("reached context length of 4096 tokens".rjust(chars)) == found


BUSY = errors.Overloaded("m", tokens=5, in_use_tokens=6, window_tokens=7, waited_s=8.04)
TRIED = "GET http://lan:1/api/v1/models: timed out"


@pytest.mark.parametrize(
    ("error", "status", "kind", "param", "said"),
    [
        (errors.WindowUnknown("m", tried=TRIED), 400, "invalid_request_error", "model", "its server: timed out."),
        (errors.WindowUnread("m", tried=TRIED), 503, "service_unavailable", None, "Its server does not answer."),
        (errors.WindowUnread("m", address="http://lan:1"), 503, "service_unavailable", None, "or correct api_base."),
        (BUSY, 503, "overloaded_error", None, "with a larger context length."),
        (errors.ClientLeft(), 499, "client_disconnect", "model", "nothing for 30 s, or had left. Send it again."),
    ],
)
def test_a_client_reads_what_it_can_do(
    error: errors.CompactionError, status: int, kind: str, param: str | None, said: str
) -> None:
    """OpenAI's fields, by which it tries again or not; no address of a server."""
    assert (error.status, error.kind, error.param, error.code) == (status, kind, param, "")
    assert error.for_clients.endswith(said)
    assert "lan" not in error.for_clients
