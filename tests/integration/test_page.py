"""The page through LiteLLM's application: who may look and write, what a change does, and what it may not do.

That a change made in one proxy holds in another: `tests/processes/test_shared_store.py`.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import httpx
import pytest

from litellm_compaction.config import LIVE
from tests.integration.app import proxy, serve
from tests.integration.bench import KEY, answers
from tests.integration.harness import Proxy, lm_studio, write_config
from tests.integration.page_forms import (
    ADMIN,
    ANNA,
    ARNO,
    BERT,
    KEYS,
    PAGE,
    VIEWER,
    chosen,
    hidden,
    look,
    save,
    send,
)
from tests.lmstudio_double import Model, Simulator

# Of Anna's team; of nobody's.
TEAM_MATES = [f"sk-page-{name}" for name in ("reader", "team")]
STRANGERS = [f"sk-page-{name}" for name in ("org", "customer", "plain")]
_HI = [{"role": "user", "content": "Hi."}]


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proxy]:
    folder = tmp_path_factory.mktemp("page")
    shutil.copy(KEYS, folder)
    simulator = Simulator([Model(KEY, publisher="qwen", architecture="qwen2")])
    simulator.script = answers()
    simulator.load(KEY, 8192)
    simulator.sdk.overflow_policy = "rollingWindow"
    with ExitStack() as stack:
        base_url = stack.enter_context(serve(simulator)).base_url
        entries = [
            lm_studio("local", KEY, base_url),
            lm_studio("small", KEY, base_url),
            lm_studio("strict", KEY, base_url, compaction={"streaming_ratio": 0.82}),
        ]
        auth = {"custom_auth": "page_keys.user_api_key_auth"}
        config = write_config(folder, entries, {"pre_request_ratio": 0.7}, general_settings=auth)
        yield stack.enter_context(proxy(config))


@pytest.fixture(autouse=True)
def _as_configured(running: Proxy) -> Iterator[None]:
    """Every test leaves config.yaml in force."""
    yield
    send(running, {"do": "reset", "reset": "*"})
    assert guarded(running)


def ask(running: Proxy, model: str, messages: Any, key: str = ADMIN) -> httpx.Response:
    """A client's request."""
    body = {"model": model, "messages": messages, "max_tokens": 16}
    return running.post(body, headers={"Authorization": f"Bearer {key}"})


def guarded(running: Proxy) -> bool:
    """Whether a request is guarded, as its answer's headers say."""
    return "x-litellm-compaction" in ask(running, "local", _HI).raise_for_status().headers


def browser_of(running: Proxy, key: str = ADMIN) -> httpx.Client:
    """A browser in whose password box somebody has entered a key."""
    return httpx.Client(base_url=running.base_url, trust_env=False, timeout=300, auth=("any", key))


def talk(turns: int, words: int) -> list[dict[str, Any]]:
    """A conversation of so many long turns."""
    said: list[dict[str, Any]] = [{"role": "user", "content": "A secret of the red team."}]
    for number in range(turns):
        said += [
            {"role": "assistant", "content": "Understood."},
            {"role": "user", "content": f"{number} " + "alpha beta gamma delta " * words},
        ]
    return said


@pytest.mark.parametrize("key", [None, "sk-nobody", ""])
def test_without_a_key_there_is_only_a_question_for_one(running: Proxy, key: str | None) -> None:
    """401, nothing of the proxy, and nothing that a browser keeps or embeds."""
    answer = look(running, key)
    assert answer.status_code == 401
    assert answer.headers["cache-control"] == "no-store"
    policy = answer.headers["content-security-policy"]
    assert all(part in policy for part in ("default-src 'none'", "form-action 'self'", "frame-ancestors 'none'"))
    assert "needs a key of this LiteLLM proxy" in answer.text
    assert "local" not in re.sub(r"(?s)<(style|script)>.*?</\1>", "", answer.text)
    assert running.client.post(PAGE, data={"do": "save", "mode": "off"}).status_code == 401
    assert not running.logged("failed_open")


@pytest.mark.parametrize("key", ["", "x" * 5000, "sk\nnewline", "schlüssel", "\x00", "a:" + ADMIN])
def test_a_wrong_key_stays_outside(running: Proxy, key: str) -> None:
    """401, and the key is not repeated."""
    with browser_of(running, key) as browser:
        origin = {"Origin": running.base_url}
        for answer in (browser.get(PAGE), browser.post(PAGE, data={"do": "save"}, headers=origin)):
            assert answer.status_code == 401
            assert not key or key not in answer.text


def test_settings_of_lm_studio_that_work_against_the_plug_in_are_told(running: Proxy) -> None:
    """As soon as a request was large enough to ask about its model, with what to choose instead."""
    ask(running, "local", [{"role": "user", "content": "word " * 2_500}]).raise_for_status()
    text = look(running).text
    assert "in LM Studio: a prompt that is too long: rollingWindow" in text
    assert "stopAtLimit" in text


def test_a_change_counts_at_once(running: Proxy) -> None:
    """For the next request, whoever looks; `off` can be switched on again, and a reset gives the file's value back."""
    for mode in ("observe", "off"):
        assert save(running, mode=mode).status_code == 303
        assert not guarded(running)
        assert chosen(look(running).text, "mode") == mode
        running.expect_logged(f"settings_changed mode={mode}")
        assert send(running, {"do": "reset", "reset": "mode"}).status_code == 303
        assert guarded(running)


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("pre_request_ratio", "1.5", "“1.5” is not a share (above 0, below 1; 35 % is 0.35)."),
        ("target_ratio", "a lot", "“a lot” is not a share"),
        ("output_buffer_ratio", "0,2", "“0,2” is not a share (at least 0, below 1;"),
        ("mode", "<i>", "“&lt;i&gt;” is not one of guard, observe, off."),
        ("pruning_model", "nobody", "“nobody” is not a model of this proxy."),
        # A contradiction with what is in force.
        ("target_ratio", "0.95", "(now 0.95, 0.7 and 0.93 of the window)."),
    ],
)
def test_a_bad_value_is_refused_and_nothing_is_changed(running: Proxy, key: str, value: str, said: str) -> None:
    """422 that names the value and what is allowed; what was entered beside it is kept in the form, and not saved."""
    before = look(running).text
    answer = save(running, **{"notices": "reasoning", "streaming_ratio": "0.93", key: value})
    assert answer.status_code == 422
    assert said in answer.text
    assert chosen(answer.text, "notices") == "reasoning"
    after = look(running).text
    assert all(chosen(after, each) == chosen(before, each) for each in LIVE)


def test_two_administrators_do_not_overwrite_each_other(running: Proxy) -> None:
    """Whoever saves what he has seen before the other's change is told, keeps his entries, and may save again."""
    revision = hidden(look(running).text, "revision")
    assert save(running, notices="off").status_code == 303
    answer = send(running, {"do": "save", "mode": "observe", "revision": revision})
    assert answer.status_code == 409
    assert chosen(answer.text, "mode") == "observe"
    again = send(running, {"do": "save", "mode": "observe", "revision": hidden(answer.text, "revision")})
    assert again.status_code == 303
    text = look(running).text
    assert (chosen(text, "mode"), chosen(text, "notices")) == ("observe", "off")


def test_a_change_that_contradicts_a_deployment_does_not_reach_it(running: Proxy) -> None:
    """It goes on by config.yaml, the page says so, and its clients notice nothing."""
    assert save(running, pre_request_ratio="0.85").status_code == 303
    assert "Changes made here do not reach it" in look(running).text
    answer = ask(running, "strict", _HI).raise_for_status()
    assert "x-litellm-compaction" in answer.headers
    running.expect_logged("settings changed at run time do not reach model=strict")


def test_a_browser_s_password_opens_the_page_alone(running: Proxy) -> None:
    """Without a cookie; LiteLLM's own routes do not take it, so it must not be sent to them."""
    with browser_of(running) as browser:
        answer = browser.get(PAGE)
        assert answer.status_code == 200
        assert "set-cookie" not in answer.headers
        assert ADMIN not in answer.text
        assert browser.get("/v1/models").status_code == 401


def test_others_read_what_is_theirs(running: Proxy) -> None:
    """A team sees its own compactions; another tenant, none of them, and only its own models; nobody, the words."""
    turns = 6
    while ask(running, "local", talk(turns, 120), ANNA).headers["x-litellm-compaction"] != "compacted":
        turns += 1
    for key in (ADMIN, VIEWER, ANNA, ARNO, *TEAM_MATES):
        text = look(running, key).text
        assert "before the request</td>" in text, key
        assert "secret of the red" not in text
    for key in (BERT, *STRANGERS):
        text = look(running, key).text
        assert "before the request</td>" not in text, key
        assert "None yet of your team, user or key." in text
    assert "<bdi>local</bdi>" not in look(running, BERT).text
    assert "<bdi>small</bdi>" in look(running, BERT).text


@pytest.mark.parametrize("key", [VIEWER, ANNA, BERT, *TEAM_MATES, *STRANGERS])
def test_only_administrators_write(running: Proxy, key: str) -> None:
    """The others have no form, and a form that they make themselves is refused."""
    text = look(running, key).text
    assert "<form" not in text
    assert "Only proxy administrators may change these." in text
    for form in ({"do": "save", "mode": "off"}, {"do": "reset", "reset": "*"}, {}):
        assert send(running, form, key).status_code == 403
    with browser_of(running, key) as browser:
        own = {"Origin": running.base_url}
        assert browser.post(PAGE, data={"do": "save", "mode": "off"}, headers=own).status_code == 403
    assert guarded(running)
