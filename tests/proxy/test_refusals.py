"""What a client reads when a request cannot be served."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import httpx
import litellm
import pytest
from fastapi import HTTPException
from litellm.proxy._types import ProxyException

from litellm_compaction import errors
from litellm_compaction.proxy import refusals
from litellm_compaction.proxy.answer.sse import Batches
from litellm_compaction.proxy.answer.transport import EventStream
from tests.proxy.scripted import Listening, Scene, Turn

TOO_LARGE = errors.DoesNotFit("9,000 tokens do not fit into 8,192.", shares=(), window_tokens=8192, needed_tokens=9300)
SECRET = "GET http://10.0.0.7:1234/api/v1/models: no connection (All connection attempts failed)"
REFUSED = "GET http://10.0.0.7:1234/api/v1/models: HTTP 401, the API key was refused"
_TOO_LARGE, _BAD = litellm.ContextWindowExceededError, litellm.BadRequestError
_DOWN = litellm.ServiceUnavailableError


@pytest.mark.parametrize(
    ("error", "status", "code", "alone", "among"),
    [
        (TOO_LARGE, 400, "context_length_exceeded", _TOO_LARGE, _TOO_LARGE),
        (errors.WindowUnknown("m", tried=REFUSED), 400, "400", _BAD, _DOWN),
        (errors.ModelNotLoaded("m"), 400, "400", _BAD, _DOWN),
        (errors.WindowUnread("m", tried=SECRET), 503, "503", _DOWN, _DOWN),
        (errors.ServerUnavailable(SECRET), 503, "503", _DOWN, _DOWN),
        (errors.ServerGone("http://10.0.0.7:1234/v1"), 503, "503", _DOWN, _DOWN),
        (errors.Overloaded("m", tokens=9, in_use_tokens=8, window_tokens=8, waited_s=1.0), 503, "503", _DOWN, _DOWN),
    ],
    ids=["too large", "unknown", "not loaded", "unread", "unavailable", "gone", "busy"],
)
def test_each_error_has_its_status_and_code(
    error: errors.CompactionError, status: int, code: str, alone: type[Exception], among: type[Exception]
) -> None:
    """The same in all three places in which LiteLLM takes an error from us; an address in none of them.

    Too large is for `context_window_fallbacks`; a dead server is not asked again, but its neighbors are.
    """
    refusal = refusals.Refusal(error)
    assert isinstance(refusal, ProxyException)
    assert isinstance(refusal, HTTPException)
    assert (int(refusal.code), refusal.status_code, refusal.to_dict()["code"]) == (status, status, code)
    assert refusal.to_dict()["message"] == refusal.message == refusal.detail
    mapped: Any = refusals.litellm_error_of(error, {"model": "m"})
    response = refusals.response_of(error)
    assert (mapped.status_code, response.status_code) == (status, status)
    for said in (refusal.message, str(mapped), response.text):
        assert "10.0.0.7" not in said
        assert error.for_clients in said.replace('\\"', '"')
    neighbors: Any = refusals.litellm_error_of(error, {"metadata": {"model_group_size": 2}})
    assert (type(mapped), type(neighbors)) == (alone, among)
    assert (mapped.num_retries, neighbors.num_retries) == (0 if status == 503 else None, None)


@pytest.mark.parametrize(
    ("status", "is_overflow"), [(400, True), (500, True), (429, False)], ids=["chats", "other routes", "another error"]
)
def test_an_overflow_is_told_as_one(status: int, is_overflow: bool) -> None:
    """Whatever status its server gives it; not if the words are the client's own."""
    said = "tokens to keep from the initial prompt is greater than the context length"
    error = litellm.APIError(status, f"Error: {said}.", "lm_studio", "m")
    told = refusals.reworded(None, error, is_guarded=True)
    assert (told is not None) is is_overflow
    if told is not None:
        assert (told.status_code, told.to_dict()["code"]) == (400, "context_length_exceeded")
    assert refusals.reworded(None, error, is_guarded=True, client_text=lambda: said) is None


@pytest.mark.parametrize(
    ("error", "is_lmstudio", "is_gone"),
    [
        (httpx.ConnectError("refused"), True, True),
        (httpx.ConnectError("refused"), False, False),
        (httpx.ConnectError("ssl:True [SSLCertVerificationError: …]"), True, False),
        (httpx.ReadError("reset"), True, False),
        (httpx.ConnectTimeout("slow"), True, False),
    ],
    ids=["refused", "another server", "certificate", "broken", "slow"],
)
async def test_only_an_lm_studio_that_takes_no_connection_is_to_be_started(
    error: httpx.TransportError, is_lmstudio: bool, is_gone: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Other servers and other failures are told as LiteLLM tells them, in an answer that has begun as well."""
    scene = Scene([], [Turn()], is_lmstudio=is_lmstudio)
    context = replace(scene.context, target=replace(scene.context.target, api_base="http://u:p@10.0.0.7:1234/v1"))
    gone = refusals.server_gone(error, context)
    assert (gone is not None) is is_gone
    if gone is not None:
        assert str(gone).startswith("LM Studio at http://10.0.0.7:1234/v1 does not answer. Start its server")

    async def broken() -> Batches:
        raise error
        yield

    exchange: Any = Listening()
    with pytest.raises(_DOWN if is_gone else type(error)):
        assert [each async for each in EventStream([], broken(), exchange, context)] == [b""]
    assert ("refused model=" in caplog.text) is is_gone


def _fail(depth: int) -> None:
    if depth == 1:
        raise ValueError("Never say this.")
    _fail(depth - 1)


def test_the_log_says_where_a_failure_came_from_and_none_of_its_words(caplog: pytest.LogCaptureFixture) -> None:
    """The last four lines, the innermost first; a refusal that the engine logs is not told twice."""
    for depth, lines in ((1, 2), (3, 4), (4, 4)):
        with pytest.raises(ValueError, match="Never") as failed:
            _fail(depth)
        refusals.log_failure("pre_call", failed.value)
        assert caplog.messages[-1].startswith("failed_open hook=pre_call error=ValueError at=test_refusals.py:")
        assert (caplog.messages[-1].count("test_refusals.py:"), "Never" in caplog.messages[-1]) == (lines, False)
    for error in (TOO_LARGE, errors.ClientLeft(), errors.ModelNotLoaded("m")):
        refusals.log_refused("served", error)
    assert [each[:21] for each in caplog.messages[3:]] == ["refused model=served:"]
