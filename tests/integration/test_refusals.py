"""What clients read when nothing can be served, on every route, with LiteLLM's own retries and fallbacks."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from tests.builders import prose
from tests.integration.bench import KEY, Bench, Group, open_bench
from tests.integration.forms import PATHS, ROUTES, ask, streams
from tests.integration.harness import entry, free_port, lm_studio
from tests.integration.plain_server import PlainServer
from tests.lmstudio_double import Fault, Reply


@pytest.fixture(scope="module")
def strict(tmp_path_factory: pytest.TempPathFactory, plain: PlainServer) -> Iterator[Bench]:
    """LiteLLM's router as it is: it retries, cools down, and falls back where it is told to."""
    dead = f"http://127.0.0.1:{free_port()}"
    with open_bench(
        tmp_path_factory.mktemp("strict"),
        [Group("local", 4096)],
        {"window_cache_s": 0.2},
        entries=[
            entry("plain", "openai/plain", f"{plain.base_url}/v1"),
            lm_studio("dead", KEY, dead),
            lm_studio("rescued", KEY, dead),
        ],
        router_settings={"fallbacks": [{"rescued": ["plain"]}]},
    ) as bench:
        yield bench


def _question(content: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


@streams
@pytest.mark.parametrize("route", ROUTES)
def test_too_large_is_said_in_our_words_with_the_code(strict: Bench, route: str, stream: bool) -> None:
    """SDKs go by `code`, people by the first words; neither has to read LiteLLM's frame."""
    watch = strict.watch("local")
    said = ask(strict, route, "local", _question(prose(f"giant {route} {stream}", 6000)), stream=stream)
    assert said.status == 400
    (told,) = said.events
    if route == "messages":
        assert (told["type"], told["error"]["type"]) == ("error", "invalid_request_error")
    else:
        assert (told["error"]["type"], told["error"]["code"]) == ("invalid_request_error", "context_length_exceeded")
    assert told["error"]["message"].startswith("This model's maximum context length is 4096 tokens.")
    assert told["error"]["message"].endswith("or set `oversized_user_message: excerpt`.")
    assert watch.chats == []


@pytest.mark.parametrize(
    ("route", "group"), [*((route, "local") for route in ROUTES), ("chat", "dead"), ("messages", "dead")]
)
def test_a_refusal_is_one_line_in_the_log(strict: Bench, route: str, group: str) -> None:
    """Ours: LiteLLM would write the same error again, with up to three tracebacks."""
    since = len(strict.proxy.lines)
    ask(strict, route, group, _question(prose(f"one line {route}", 6000)))
    # What this asks for is served, and its line comes after all of theirs.
    strict.proxy.post({"model": "local", "messages": [{"role": "user", "content": "Hello."}]})
    said = [line for line in strict.proxy.lines[since:] if line.strip() and "INFO" not in line]
    (line,) = [each for each in said if "refused" in each]
    assert f"litellm_compaction:WARNING: refused model={group}" in line
    assert [each for each in said if "Traceback" in each or "Exception occured" in each] == []
    if group == "dead":
        wanted = r"LM Studio at http://127\.0\.0\.1:\d+/v1 does not answer\. Start its server \(lms server start\)"
        assert re.search(wanted, line)


@pytest.mark.parametrize("route", list(PATHS))
def test_server_that_is_down_is_a_503_at_once(strict: Bench, route: str) -> None:
    """Not asked again and again for one request, and never named; the next request is told the same."""
    # LiteLLM makes an error that it retries of the one behind generateContent.
    since = len(strict.proxy.logged("LiteLLM Retried|Retrying request"))
    for _ in range(3):
        said = ask(strict, route, "dead", _question("Hello."))
        assert said.status == 503, said.events
        message = said.events[0]["error"]["message"]
        assert message.startswith(f"Context limit not available for {KEY}. Please ensure model metadata is correct.")
        assert re.search(r"127\.0\.0\.1|:\d{4,5}\b", message) is None
    assert strict.proxy.logged(r"LiteLLM Retried|Retrying request")[since:] == []


def test_server_that_is_down_is_answered_by_a_fallback(strict: Bench, plain: PlainServer) -> None:
    """A 503 is what LiteLLM's fallbacks are for; the answer's headers tell nothing of the deployment that failed."""
    since = len(plain.requests)
    answer = strict.proxy.chat("rescued", [{"role": "user", "content": "Hello."}])
    assert answer.status_code == 200
    assert len(plain.posts(since)) == 1
    assert [name for name in answer.headers if "x-litellm-compaction" in name] == []


def test_overflow_that_the_server_reports_has_the_code_too(strict: Bench) -> None:
    """However it came: the client may compact its side."""
    said = "Trying to keep the first 9000 tokens when context the overflows. However, the model is loaded with context "
    said += "length of only 4096 tokens, which is not enough."
    strict.watch("local", lambda _: Reply(fault=Fault("400", message=said)))
    answer = strict.proxy.chat("local", [{"role": "user", "content": f"Overflow. {prose('over', 300)}"}])
    strict.forgive("local")
    assert answer.status_code == 400
    error = json.loads(answer.text)["error"]
    assert error["code"] == "context_length_exceeded"
    assert "litellm." not in error["message"]
