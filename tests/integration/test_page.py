"""The page through real proxies: who may look and write, what a change does, and in which workers.

Two proxies share one store, as the workers of one proxy do.
"""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from litellm_compaction.config import LIVE
from litellm_compaction.simulator import Model, Simulator
from tests.integration.app import proxy, serve
from tests.integration.bench import KEY, answers
from tests.integration.harness import Proxy, lm_studio, write_config
from tests.integration.page_forms import (
    ADMIN,
    ANNA,
    ARNO,
    BERT,
    KEYS,
    OPENED,
    PAGE,
    VIEWER,
    chosen,
    hidden,
    look,
    save,
    send,
)

# Of Anna's team; of nobody's.
TEAM_MATES = [f"sk-page-{name}" for name in ("reader", "team")]
STRANGERS = [f"sk-page-{name}" for name in ("org", "customer", "plain")]
_HI = [{"role": "user", "content": "Hi."}]


@dataclass
class Workers:
    """Two proxies over one store."""

    one: Proxy
    two: Proxy
    folder: Path


@pytest.fixture(scope="module")
def workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workers]:
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
            lm_studio("<b>&'\"", KEY, base_url),
            lm_studio("lm_studio/*", "*", base_url),
        ]
        auth = {"custom_auth": "page_keys.user_api_key_auth"}
        config = write_config(folder, entries, {"pre_request_ratio": 0.7}, general_settings=auth)
        one, two = (stack.enter_context(proxy(config)) for _ in range(2))
        yield Workers(one, two, folder)


@pytest.fixture(autouse=True)
def _as_configured(workers: Workers) -> Iterator[None]:
    """Every test leaves config.yaml in force, in both workers."""
    yield
    if "changed here to" in look(workers.one).text:
        assert send(workers.one, {"do": "reset", "reset": "*"}).status_code == 303
        assert _soon(lambda: "changed here to" not in look(workers.two).text)
        assert _soon(lambda: guarded(workers.two))


def _soon(is_so: Callable[[], bool]) -> bool:
    """Whether the other worker, which looks at the store once a second, comes to know; every look is a request."""
    until_s = time.monotonic() + 60
    while not is_so():
        if time.monotonic() > until_s:
            return False
    return True


def ask(running: Proxy, model: str, messages: Any, key: str = ADMIN) -> httpx.Response:
    """A client's request."""
    body = {"model": model, "messages": messages, "max_tokens": 16}
    return running.post(body, headers={"Authorization": f"Bearer {key}"})


def without_styles(text: str) -> str:
    """A page without its style sheet and its script."""
    return re.sub(r"(?s)<(style|script)>.*?</\1>", "", text)


def marked(text: str) -> list[str]:
    """The keys of the fields whose values were refused."""
    return re.findall(r'<(?:input|select) id="(\w+)"[^>]*aria-invalid="true"', text)


def guarded(running: Proxy, key: str = ADMIN) -> bool:
    """Whether a request is guarded, as its answer's headers say."""
    answer = ask(running, "local", _HI, key)
    answer.raise_for_status()
    return "x-litellm-compaction" in answer.headers


@contextmanager
def browser_of(running: Proxy, key: str = ADMIN) -> Iterator[httpx.Client]:
    """A browser in whose password box somebody has entered a key."""
    with httpx.Client(base_url=running.base_url, trust_env=False, timeout=300, auth=("any", key)) as client:
        yield client


@pytest.mark.parametrize("key", [None, "sk-nobody", ""])
def test_without_a_key_there_is_only_a_question_for_one(workers: Workers, key: str | None) -> None:
    """401, nothing of the proxy, and nothing that a browser keeps or embeds."""
    answer = look(workers.one, key)
    assert answer.status_code == 401
    assert answer.headers["www-authenticate"].startswith("Basic ")
    assert answer.headers["cache-control"] == "no-store"
    policy = answer.headers["content-security-policy"]
    for part in ("default-src 'none'", "style-src 'sha256-", "form-action 'self'", "frame-ancestors 'none'"):
        assert part in policy
    assert (
        re.findall("script-src ([^;]*);", policy)
        == re.findall("script-src ('sha256-[A-Za-z0-9+/]{43}=');", policy)
        != []
    )
    assert "needs a key of this LiteLLM proxy" in answer.text
    assert "local" not in without_styles(answer.text)
    opened = workers.one.client.get(OPENED)
    assert (opened.status_code, opened.headers["location"], opened.text) == (303, "compaction/", "")
    assert workers.one.client.post(PAGE, data={"do": "save", "mode": "off"}).status_code == 401
    assert not workers.one.logged("failed_open")


def test_settings_of_lm_studio_that_work_against_the_plug_in_are_told(workers: Workers) -> None:
    """As soon as a request was large enough to ask about its model, with what to choose instead."""
    ask(workers.one, "local", [{"role": "user", "content": "word " * 2_500}]).raise_for_status()
    text = look(workers.one).text
    assert "in LM Studio: a prompt that is too long: rollingWindow" in text
    assert "choose `stopAtLimit` as its context overflow policy" in text.replace("&#96;", "`")


def test_an_administrator_sees_everything(workers: Workers) -> None:
    """All settings with their source, all deployments, all models to choose from; client's names are only text."""
    assert guarded(workers.one)
    text = look(workers.one).text
    assert "Signed in as proxy_admin" in text
    for key in LIVE:
        assert f'name="{key}"' in text
    assert chosen(text, "pre_request_ratio") == "0.7"
    assert chosen(text, "pruning_model") == "__same__"
    about = (
        "Model used to compact conversation history when approaching the context limit. Choose a fast, capable model."
    )
    assert f'<p id="pruning_model-about">{about}</p>' in text
    assert '<option value="__same__" selected>Same as current model (default)</option>' in text
    assert f'<option value="small">small (lm_studio/{KEY})</option>' in text
    assert f'<option value="lm_studio/{KEY}">' in text
    assert "<b>&'" not in text
    assert "&lt;b&gt;&amp;&#39;&#34;" in text
    assert "8,192" in text
    assert "api/v1" in text
    assert "transport" in text
    assert "raw: the model goes on inside its answer" in text
    assert "streaming_ratio: 0.82" in text
    assert re.search(r"[+-]\d+\.\d % \(\d+ counted, \d+ reported\)", text)


def test_a_change_counts_at_once_and_in_all_workers(workers: Workers) -> None:
    """For the next request here, within a second there; a reset likewise."""
    assert guarded(workers.one)
    assert guarded(workers.two)
    answer = save(workers.one, mode="observe")
    assert (answer.status_code, answer.headers["location"]) == (303, "?done=saved")
    assert not guarded(workers.one)
    assert _soon(lambda: not guarded(workers.two))
    text = look(workers.two).text
    assert chosen(text, "mode") == "observe"
    changed = r"The default is guard, changed here to observe at <time [^>]*>\d{4}-[-0-9: ]*</time> by proxy_admin\."
    assert re.search(changed, text)
    assert "mode is observe: no request is changed." in text
    assert send(workers.two, {"do": "reset", "reset": "mode"}).headers["location"] == "?done=reset"
    assert guarded(workers.two)
    assert _soon(lambda: guarded(workers.one))
    assert workers.one.expect_logged("settings_changed mode=observe")
    assert workers.two.expect_logged("settings_changed mode=observe")


@pytest.mark.parametrize(("done", "unfolds"), [("saved", True), ("undone", False), ("", False)])
def test_settings_unfold_for_news_of_their_own(workers: Workers, done: str, unfolds: bool) -> None:
    """A record that was forgotten is none."""
    text = workers.one.client.get(f"{PAGE}?done={done}", headers={"Authorization": f"Bearer {ADMIN}"}).text
    assert ("<details open>" in text) == unfolds


def test_off_can_be_switched_on_again(workers: Workers) -> None:
    """The page itself does not sleep, and a request under way keeps the settings that it began with."""
    assert save(workers.one, mode="off").status_code == 303
    assert not guarded(workers.one)
    assert save(workers.one, mode="guard").status_code == 303
    assert guarded(workers.one)


def test_a_ratio_changes_when_a_conversation_is_compacted(workers: Workers) -> None:
    """The same messages pass below the trigger, and are compacted above a lower one."""
    talk = [{"role": "user", "content": "Begin."}]
    for number in range(8):
        talk += [
            {"role": "assistant", "content": "Understood."},
            {"role": "user", "content": f"{number} " + "alpha beta gamma delta " * 80},
        ]
    assert ask(workers.one, "local", talk).headers["x-litellm-compaction"] == "none"
    assert save(workers.one, pre_request_ratio="0.3", target_ratio="0.2").status_code == 303
    assert ask(workers.one, "local", talk).headers["x-litellm-compaction"] == "compacted"


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("pre_request_ratio", "1.5", "Compact a prompt above: “1.5” is not a share (above 0, below 1; 35 % is 0.35)."),
        ("target_ratio", "a lot", "Compact down to: “a lot” is not a share"),
        ("output_buffer_ratio", "0,2", "Set aside for the answer: “0,2” is not a share (at least 0, below 1;"),
        ("mode", "<i>", "Mode: “&lt;i&gt;” is not one of guard, observe, off."),
        ("pruning_model", "nobody", "Pruning model: “nobody” is not a model of this proxy."),
    ],
)
def test_a_bad_value_is_refused_and_nothing_is_lost(workers: Workers, key: str, value: str, said: str) -> None:
    """422 with the form as it was filled in; the error names field, value and range; nothing has changed."""
    before = look(workers.one).text
    answer = save(workers.one, **{"notices": "reasoning", "streaming_ratio": "0.93", key: value})
    assert answer.status_code == 422
    # At the top, and at the field, which alone is marked and takes the focus.
    assert answer.text.count(said) == 2
    assert marked(answer.text) == [key]
    assert re.search(f'id="{key}"[^>]* autofocus>', answer.text)
    assert chosen(answer.text, "notices") == "reasoning"
    if key != "mode":
        assert chosen(answer.text, key) == value
    if key != "streaming_ratio":
        assert chosen(answer.text, "streaming_ratio") == "0.93"
    after = look(workers.one).text
    assert all(chosen(after, each) == chosen(before, each) for each in LIVE)


def test_a_contradiction_names_and_marks_its_three_fields(workers: Workers) -> None:
    """As the form calls them, whether a value is saved or the change that made room for it is taken back."""
    said = (
        "“Compact down to” must be below “Compact a prompt above”, and that not above “Carry an answer over at” "
        "(now {}, {} and {} of the window)."
    )
    three = ["pre_request_ratio", "streaming_ratio", "target_ratio"]
    answer = save(workers.one, target_ratio="0.95")
    assert (answer.status_code, marked(answer.text)) == (422, three)
    assert answer.text.count(said.format(0.95, 0.7, 0.9)) == 4
    assert save(workers.one, pre_request_ratio="0.3", target_ratio="0.2").status_code == 303
    answer = send(workers.one, {"do": "reset", "reset": "target_ratio"})
    assert (answer.status_code, marked(answer.text)) == (422, three)
    assert answer.text.count(said.format(0.4, 0.3, 0.9)) == 4


def test_two_administrators_do_not_overwrite_each_other(workers: Workers) -> None:
    """Whoever saves what he has seen before the other's change is told, keeps his entries, and may save again."""
    revision = hidden(look(workers.one).text, "revision")
    assert save(workers.two, notices="off").status_code == 303
    answer = send(workers.one, {"do": "save", "mode": "observe", "revision": revision})
    assert answer.status_code == 409
    assert "Somebody else has changed the settings" in answer.text
    assert chosen(answer.text, "mode") == "observe"
    again = send(workers.one, {"do": "save", "mode": "observe", "revision": hidden(answer.text, "revision")})
    assert again.status_code == 303
    text = look(workers.one).text
    assert (chosen(text, "mode"), chosen(text, "notices")) == ("observe", "off")


def test_reset_of_one_and_of_all(workers: Workers) -> None:
    """One key goes back and the others stay; then all; a value as in the file needs no reset."""
    save(workers.one, notices="off", mode="observe", pruning_model="small", target_ratio="0.35")
    text = look(workers.one).text
    assert text.count("changed here to") == 4
    assert 'value="notices" form="reset-form"' in text
    send(workers.one, {"do": "reset", "reset": "notices"})
    text = look(workers.one).text
    assert (chosen(text, "notices"), chosen(text, "mode")) == ("auto", "observe")
    save(workers.one, target_ratio="0.4")
    assert look(workers.one).text.count("changed here to") == 2
    send(workers.one, {"do": "reset", "reset": "*"})
    text = look(workers.one).text
    assert "changed here to" not in text
    assert chosen(text, "pruning_model") == "__same__"
    assert save(workers.one, mode="guard").headers["location"] == "?done=same"


def test_a_change_that_contradicts_a_deployment_does_not_reach_it(workers: Workers) -> None:
    """It goes on by config.yaml, the page says so, and its clients notice nothing."""
    assert save(workers.one, pre_request_ratio="0.85").status_code == 303
    assert "Changes made here do not reach it" in look(workers.one).text
    answer = ask(workers.one, "strict", _HI)
    assert answer.status_code == 200
    assert "x-litellm-compaction" in answer.headers
    assert workers.one.expect_logged("settings changed at run time do not reach model=strict")


def test_a_browser_s_password_opens_the_page(workers: Workers) -> None:
    """In every worker, without a cookie; LiteLLM's own routes do not take it, so it must not be sent to them."""
    for worker in (workers.one, workers.two):
        with browser_of(worker) as browser:
            answer = browser.get(PAGE)
            assert "Signed in as proxy_admin" in answer.text
            assert "set-cookie" not in answer.headers
            assert ADMIN not in answer.text
            assert browser.get(OPENED).status_code == 200
            assert browser.get("/v1/models").status_code == 401


@pytest.mark.parametrize("key", ["", "sk-nobody", "x" * 5000, "sk\nnewline", "schlüssel", "\x00", "a:" + ADMIN])
def test_a_wrong_key_stays_outside(workers: Workers, key: str) -> None:
    """401, and the key is not repeated."""
    with browser_of(workers.one, key) as browser:
        origin = {"Origin": workers.one.base_url}
        for answer in (browser.get(PAGE), browser.post(PAGE, data={"do": "save"}, headers=origin)):
            assert answer.status_code == 401
            assert not key or key not in answer.text


def test_another_site_cannot_use_a_browser_s_key(workers: Workers) -> None:
    """No origin, another origin, another port of this machine: nothing is changed and nothing is read."""
    foreign: list[dict[str, str]] = [
        {},
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Origin": "http://127.0.0.1:1", "Sec-Fetch-Site": "same-site"},
        {"Sec-Fetch-Site": "cross-site"},
    ]
    with browser_of(workers.one) as browser:
        form = {"do": "save", "mode": "off", "revision": hidden(browser.get(PAGE).text, "revision")}
        for path in (OPENED, PAGE):
            assert [browser.post(path, data=form, headers=headers).status_code for headers in foreign] == [403] * 5
        read = browser.get(PAGE, headers={"Origin": "http://127.0.0.1:1", "Sec-Fetch-Site": "same-site"})
        assert read.status_code == 403
        assert browser.post(PAGE, json=form).status_code == 415
        assert browser.post(PAGE, data={**form, "x": "x" * 70_000}).status_code == 415
        assert guarded(workers.one)
        assert browser.post(PAGE, data=form, headers={"Origin": workers.one.base_url}).status_code == 303
        assert not guarded(workers.one)


def test_others_read_what_is_theirs(workers: Workers) -> None:
    """A team sees its own compactions and conversations; another tenant, none of them, and only its own models.

    So it is in every worker, whichever has served them.
    """
    talk = [{"role": "user", "content": "A secret of the red team."}]
    while True:
        answer = ask(workers.one, "local", talk, ANNA)
        if answer.headers["x-litellm-compaction"] == "compacted":
            break
        talk += [
            {"role": "assistant", "content": "Understood."},
            {"role": "user", "content": "alpha beta gamma delta " * 120},
        ]
    row = re.compile(r"[\d,]+ → [\d,]+</td>\s*<td .*</td>\s*<td>.*</td>\s*<td>before the request</td>")
    turns = re.compile(r"since <time [^>]*>[\d :-]+</time> · (\d+) turns")
    for running in (workers.one, workers.two):
        assert _soon(lambda: row.search(look(running, ANNA).text) and turns.search(look(running, ANNA).text))  # noqa: B023
    shown = turns.search(look(workers.one, ANNA).text)
    assert shown is not None
    for running in (workers.one, workers.two):
        for key in (ADMIN, VIEWER, ANNA, ARNO, *TEAM_MATES):
            text = look(running, key).text
            assert row.search(text), key
            assert shown[0] in text, key
            assert 'class="compact"' in text
            assert "secret of the red" not in text
        for key in (BERT, *STRANGERS):
            text = look(running, key).text
            assert not row.search(text), key
            assert "<figure" not in text
            assert "None yet of your team, user or key." in text
        text = look(running, BERT).text
        assert "<bdi>small</bdi>" in text
        assert "local" not in without_styles(text)


def test_a_conversation_of_two_workers_is_one_plot(workers: Workers) -> None:
    """All its turns, whoever has served them and whoever is asked."""
    talk = [{"role": "user", "content": "One conversation, two workers."}]
    for number in range(5):
        ask(workers.two if number % 2 else workers.one, "small", talk, ARNO)
        talk += [{"role": "assistant", "content": "Yes."}, {"role": "user", "content": f"And {number}?"}]
    for running in (workers.one, workers.two):
        assert _soon(lambda: " · 5 turns · " in look(running, ADMIN).text)  # noqa: B023


@pytest.mark.parametrize("key", [VIEWER, ANNA, BERT, *TEAM_MATES, *STRANGERS])
def test_only_administrators_write(workers: Workers, key: str) -> None:
    """The others have no form, and a form that they make themselves is refused."""
    text = look(workers.one, key).text
    assert "<form" not in text
    assert "Only proxy administrators may change these." in text
    assert "guard" in text
    for form in ({"do": "save", "mode": "off"}, {"do": "reset", "reset": "*"}, {}):
        assert send(workers.one, form, key).status_code == 403
    with browser_of(workers.one, key) as browser:
        own = {"Origin": workers.one.base_url}
        answer = browser.post(PAGE, data={"do": "save", "mode": "off"}, headers=own)
        assert (answer.status_code, "Only proxy administrators" in answer.text) == (403, True)
    assert guarded(workers.one)
