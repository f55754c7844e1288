"""The page's JSON routes through LiteLLM's application: who sees and changes what, and what a change does.

That a change made in one proxy holds in another: `tests/processes/test_shared_store.py`. The page itself, in a browser:
`tests/processes/test_page_browser.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import httpx
import pytest

from tests.integration.app import proxy, serve
from tests.integration.bench import AUTH, KEY, Bench, answers, write_beside
from tests.integration.harness import MASTER_KEY, Proxy, lm_studio, write_config
from tests.integration.page_forms import ADMIN, ANNA, ARNO, BERT, PAGE, VIEWER, look, reset, save
from tests.lmstudio_double import Model, Simulator

# Of Anna's team; of nobody's.
TEAM_MATES = [f"sk-page-{name}" for name in ("reader", "team")]
STRANGERS = [f"sk-page-{name}" for name in ("org", "customer", "plain")]
ROUTES = ["settings", "deployments", "events", "records/0123456789abcdef"]
_HI = [{"role": "user", "content": "Hi."}]


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proxy]:
    folder = tmp_path_factory.mktemp("page")
    write_beside(folder)
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
        config = write_config(folder, entries, {"pre_request_ratio": 0.7}, general_settings=AUTH)
        yield stack.enter_context(proxy(config))


@pytest.fixture
def unchanged(running: Proxy) -> Iterator[Proxy]:
    """A test leaves config.yaml in force."""
    yield running
    reset(running)
    assert guarded(running)


def ask(running: Proxy, model: str, messages: Any, key: str = ADMIN) -> httpx.Response:
    """A client's request."""
    return running.by(key).chat(model, messages, max_tokens=16)


def guarded(running: Proxy) -> bool:
    """Whether a request is guarded, as its answer's headers say."""
    return "x-litellm-compaction" in ask(running, "local", _HI).raise_for_status().headers


def talk(turns: int, words: int) -> list[dict[str, Any]]:
    """A conversation of so many long turns."""
    said: list[dict[str, Any]] = [{"role": "user", "content": "A secret of the red team."}]
    for number in range(turns):
        said += [
            {"role": "assistant", "content": "Understood."},
            {"role": "user", "content": f"{number} " + "alpha beta gamma delta " * words},
        ]
    return said


def test_the_page_itself_has_nothing_to_hide(running: Proxy) -> None:
    """One file for everybody, without a cookie; nothing else than its own script and the proxy's routes may be used."""
    for path in (PAGE, f"{PAGE}/", f"{PAGE}/?done=<script>alert(1)</script>"):
        page = running.client.get(path)
        assert (page.status_code, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
        assert "alert(1)" not in page.text
        assert "local" not in page.text.partition("<script>")[0].partition("</style>")[2]
    policy = dict(part.split(" ", 1) for part in page.headers["content-security-policy"].split("; "))
    assert policy["default-src"] == policy["form-action"] == policy["frame-ancestors"] == policy["base-uri"] == "'none'"
    assert policy["connect-src"] == "'self'"
    assert [policy[name].partition("-")[0] for name in ("script-src", "style-src")] == ["'sha256"] * 2
    assert (page.headers["cache-control"], page.headers["referrer-policy"]) == ("no-store", "no-referrer")
    assert "set-cookie" not in page.headers
    assert running.client.post(PAGE, data={"do": "save", "mode": "off"}).status_code == 405


@pytest.mark.parametrize("key", [None, "sk-stranger", "", "x" * 5000, "\x00"])
def test_without_a_key_there_is_nothing(running: Proxy, key: str | None) -> None:
    """The same 401 at every route, and the key is not repeated."""
    for route in ROUTES:
        answer = look(running, route, key)
        assert (answer.status_code, answer.headers["www-authenticate"]) == (401, "Bearer"), route
        assert answer.json()["error"]["code"] == 401
        assert not key or key not in answer.text
        assert answer.headers["cache-control"] == "no-store"
    assert save(running, {"mode": "off"}, key or "").status_code == 401
    assert not running.logged("failed_open")


def test_a_deployment_is_told(running: Proxy) -> None:
    """Its window, its counter, its way to go on, and what LM Studio has been set to that works against the plug-in."""
    ask(running, "local", [{"role": "user", "content": "word " * 2_500}]).raise_for_status()
    told = look(running, "deployments").json()
    row, _, strict = told["deployments"]
    assert (row["model_name"], row["model"], row["window_tokens"]) == ("local", KEY, 8192)
    assert [*row["facts"]] == ["server", "window", "settings", "counting", "carrier", "goes on"]
    assert row["facts"]["window"].startswith("8,192 tokens, from ")
    assert row["facts"]["carrier"].startswith("transport")
    assert row["facts"]["settings"] == "a prompt that is too long: rollingWindow"
    assert any("stopAtLimit" in note for note in row["notes"])
    assert strict["notes"][0] == "streaming_ratio: 0.82"


def test_a_change_counts_at_once(unchanged: Proxy) -> None:
    """For the next request, whoever looks; `off` can be switched on again, and null gives the file's value back."""
    for mode in ("observe", "off"):
        assert save(unchanged, {"mode": mode}).status_code == 200
        assert not guarded(unchanged)
        told = look(unchanged).json()
        assert next(row for row in told["settings"] if row["key"] == "mode")["is_changed"]
        assert told["notices"] == [f"mode is {mode}: nothing is changed where a deployment has no mode of its own."]
        unchanged.expect_logged(f"settings_changed mode={mode} .* by proxy_admin")
        assert save(unchanged, {"mode": None}).status_code == 200
        assert guarded(unchanged)


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("pre_request_ratio", "1.5", "pre_request_ratio = '1.5': Input should be less than 1"),
        ("target_ratio", "a lot", "target_ratio = 'a lot': Input should be a valid number"),
        ("target_ratio", "0,2", "target_ratio = '0,2': Input should be a valid number"),
        ("mode", "<i>", "mode = '<i>': Input should be 'guard', 'observe' or 'off'"),
        ("mode", ["guard"], "Input should be 'guard', 'observe' or 'off'"),
        ("pruning_model", "x" * 101, f"pruning_model = '{'x' * 100}': not a model of this proxy"),
        ("pruning_model", {"a": 1}, "not a model of this proxy"),
        # A contradiction with what is in force.
        ("target_ratio", "0.95", "(now 0.95, 0.7 and 0.93 of the window)"),
        ("store", "memory://", "store cannot be changed while the proxy runs."),
    ],
)
def test_a_bad_value_is_refused_at_its_field_and_nothing_is_changed(
    unchanged: Proxy, key: str, value: Any, said: str
) -> None:
    """422 that names the setting, the value and what is allowed; what was right beside it is not saved either."""
    before = look(unchanged).content
    answer = save(unchanged, {"notices": "reasoning", "streaming_ratio": "0.93", key: value})
    assert answer.status_code == 422
    error = answer.json()["error"]
    assert said in error["problems"][key]
    assert said in error["message"]
    assert look(unchanged).content == before


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"\xff", b'{"values": 3}', b'{"values": {}}?'])
def test_a_body_that_is_no_change_is_refused(running: Proxy, body: bytes) -> None:
    """Whatever an administrator's key sends."""
    answer = running.client.post(f"{PAGE}/settings", content=body, headers={"Authorization": f"Bearer {ADMIN}"})
    assert answer.status_code == 400


def test_a_change_that_contradicts_a_deployment_does_not_reach_it(unchanged: Proxy) -> None:
    """It goes on by config.yaml, its row says so, and its clients notice nothing."""
    assert save(unchanged, {"pre_request_ratio": "0.85"}).status_code == 200
    notes = look(unchanged, "deployments").json()["deployments"][2]["notes"]
    assert any(note.startswith("Changes made here do not reach it") for note in notes)
    answer = ask(unchanged, "strict", _HI).raise_for_status()
    assert "x-litellm-compaction" in answer.headers
    unchanged.expect_logged("settings changed at run time do not reach model=strict")


def test_others_read_what_is_theirs(running: Proxy) -> None:
    """A team sees its own compactions and conversations; another tenant none, and only its own models; nobody words."""
    turns = 6
    while ask(running, "local", talk(turns, 120), ANNA).headers["x-litellm-compaction"] != "compacted":
        turns += 1
    ask(running, "local", talk(turns + 1, 120), ANNA).raise_for_status()
    for key in (ADMIN, VIEWER, ANNA, ARNO, *TEAM_MATES, BERT, *STRANGERS):
        is_hers = key not in (BERT, *STRANGERS)
        events = look(running, "events", key).json()["events"]
        assert ("compacted" in {event.get("outcome") for event in events}) == is_hers, key
        assert "secret of the red" not in repr(events)
        assert "tenant" not in repr(events)
    newest = look(running, "events", ANNA).json()["events"][0]
    assert newest["tokens_after"] < newest["tokens_before"]
    assert (newest["outcome"], newest["window_tokens"]) == ("reused", 8192)
    rows = look(running, "deployments", ANNA).json()["deployments"]
    assert {"server"} == {*look(running, "deployments").json()["deployments"][0]["facts"]} - {*rows[0]["facts"]}
    assert [(row["compact_ratio"], row["carry_ratio"]) for row in rows] == [(0.7, 0.9), (0.7, 0.9), (0.7, 0.82)]
    names = [row["model_name"] for row in look(running, "deployments", BERT).json()["deployments"]]
    assert names == ["small"]


@pytest.mark.parametrize("key", [VIEWER, ANNA, BERT, *TEAM_MATES, *STRANGERS])
def test_only_administrators_write(unchanged: Proxy, key: str) -> None:
    """The others see the settings, and change none."""
    told = look(unchanged, key=key).json()
    assert (told["may_write"], told["sees_all"]) == (False, key == VIEWER)
    for values in ({"mode": "off"}, {}):
        assert save(unchanged, values, key).status_code == 403


def test_the_page_can_be_left_out(permissive: Bench) -> None:
    """`page: off`: no route, no read of settings, and requests are guarded as ever."""
    permissive.watch("local")
    for route in ("", *ROUTES):
        assert look(permissive.proxy, route, MASTER_KEY).status_code == 404
    assert save(permissive.proxy, {"mode": "off"}, MASTER_KEY).status_code == 404
    assert permissive.proxy.chat("local", _HI).headers.get("x-litellm-compaction") == "none"
