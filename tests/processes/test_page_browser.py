"""The page in a real browser: wide and narrow, light and dark, by keyboard, behind a path, with names that are markup.

Skipped where there is no Chromium (`$CHROMIUM`, or one on PATH; on Debian the package `chromium`).
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Literal

import pytest

from tests.integration.harness import Proxy
from tests.processes.browser import Browser, browse, chromium
from tests.processes.page_scene import PAGE, scene, sign_in

pytestmark = [
    pytest.mark.proxy,
    pytest.mark.skipif(chromium() is None, reason="no Chromium: set $CHROMIUM, or `apt-get install chromium`"),
]

Scheme = Literal["light", "dark"]
VIEWS: list[tuple[int, Scheme]] = [(1280, "light"), (390, "dark")]
MARKUP = "<img src=x onerror=window.hit=1>/<b>&amp;'\"\u202e"
_UNFOLD = "document.querySelectorAll('details').forEach(each => each.open = true)"


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proxy]:
    with scene(tmp_path_factory.mktemp("scene")) as made:
        yield made


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    executable = chromium()
    assert executable
    with browse(executable, tmp_path_factory.mktemp("profile")) as made:
        yield made


@pytest.fixture(autouse=True)
def _nothing_is_refused(browser: Browser) -> Iterator[None]:
    """The content security policy stops nothing of ours, and no script fails."""
    browser.complaints.clear()
    yield
    known = ("status of 401", "status of 404", "status of 422", "Password forms should have")
    assert [each for each in browser.complaints if not any(note in each for note in known)] == []


@pytest.mark.parametrize(("width", "scheme"), VIEWS)
def test_everything_is_seen_without_scrolling_sideways(
    running: Proxy, browser: Browser, width: int, scheme: Scheme
) -> None:
    """Two plots with their lines and marks, and controls inside the screen, each with a name."""
    browser.view(width, 900, scheme)
    sign_in(browser, running)
    browser.evaluate(_UNFOLD)
    assert browser.evaluate("document.documentElement.scrollWidth") == width
    for words in ("4 models guarded", "2 conversations", "0 cut by the server", "Guarded deployments", "in mid-answer"):
        browser.reads(words)
    marks = browser.evaluate(
        "['.rule', '.full', '.client', '.bar', 'path.compact', 'circle.restart']"
        ".map(kind => document.querySelectorAll('figure ' + kind).length)"
    )
    assert marks[:3] == [4, 2, 2]
    assert (marks[3] >= 40, marks[4] >= 3, marks[5] >= 1) == (True, True, True)
    controls = browser.evaluate(
        "[...document.querySelectorAll('select, input, button')].filter(e => e.checkVisibility())"
        ".map(e => [e.getBoundingClientRect(), e.textContent || e.labels.length])"
        ".map(([b, named]) => [b.left, b.right, Boolean(named)])"
    )
    assert all(left >= 0 and right <= width and named for left, right, named in controls)


def test_a_key_is_entered_by_keyboard_and_kept_by_the_tab_alone(running: Proxy, browser: Browser) -> None:
    """Signed out there is nothing; a wrong key is told so; a reload keeps the right one, signing out forgets it."""
    browser.view(1280, 900)
    sign_in(browser, running)
    with browser.loading():
        browser.click("#leave")
    browser.until("document.activeElement.id === 'key'")
    assert "models guarded" not in browser.text()
    with browser.loading():
        for letter in "sk-wrong":
            browser.press(letter)
        browser.press("Enter")
    browser.reads("The proxy does not know this key.")
    browser.fill("#key", running.key)
    browser.press("Enter")
    browser.until("document.querySelector('#headline').textContent")
    browser.open(f"{running.base_url}{PAGE}")
    browser.until("document.querySelector('#headline').textContent")
    stored = browser.evaluate(
        "[location.href, document.cookie, localStorage.length, document.documentElement.outerHTML]"
    )
    assert stored[1:3] == ["", 0]
    assert running.key not in stored[0] + stored[3]
    assert browser.evaluate("Object.values(sessionStorage)") == [running.key]


def test_a_setting_is_changed_and_reset_by_keyboard(running: Proxy, browser: Browser) -> None:
    """What was refused stays in the form, is marked and has the focus; the tab key leads to everything."""
    browser.view(1280, 900)
    sign_in(browser, running)
    browser.evaluate(_UNFOLD)
    browser.fill("#set-pruning_model", "fast")
    browser.fill("#set-target_ratio", "7")
    browser.evaluate("document.querySelector('#set-target_ratio').focus()")
    browser.press("Enter")
    browser.until("document.querySelector('[aria-invalid]')")
    browser.reads("target_ratio = '7': Input should be less than 1")
    browser.until("document.activeElement.id === 'set-target_ratio'")
    assert browser.evaluate("document.querySelector('#set-pruning_model').value") == "fast"
    browser.fill("#set-target_ratio", "0.35")
    browser.press("Enter")
    browser.reads("Saved.")
    offered = browser.evaluate("[...document.querySelector('#set-pruning_model').list.options].map(each => each.value)")
    assert {"__same__", "coder", "fast", "lm_studio/qwen2.5-3b-instruct"} <= {*offered}
    browser.reads("config.yaml or the default: 0.4; changed here.")
    for key, configured in (("pruning_model", "__same__"), ("target_ratio", "0.4")):
        browser.fill(f"#set-{key}", configured)
    browser.evaluate("document.querySelector('#set-target_ratio').focus()")
    browser.press("Enter")
    browser.until("!document.body.innerText.includes('changed here')")


def test_a_record_is_seen_side_by_side_and_undone(running: Proxy, browser: Browser) -> None:
    """By its link, which can be sent to others: its address has the id alone."""
    browser.view(1280, 900)
    sign_in(browser, running)
    browser.click("#events td a")
    browser.until("document.querySelector('#record h2')")
    record = browser.evaluate("location.hash")
    assert len(record) == 17
    for words in ("Record " + record[1:], "It covers", "The record", "Everything that was decided so far is kept."):
        browser.reads(words)
    browser.click("#record button")
    browser.reads("Forgotten.")
    browser.open(f"{running.base_url}{PAGE}{record}")
    browser.reads("a record is shown to its owner's key")


def test_names_that_are_markup_stay_text_and_200_conversations_are_drawn(running: Proxy, browser: Browser) -> None:
    """The newest of them, by records that go on from each other; whatever a name, or a server's answer, says."""
    turn = {"event": "compaction", "model": MARKUP, "tokens_before": 10**9, "tokens_after": 4000, "window_tokens": 8192}
    turn |= {"outcome": "compacted", "phase": MARKUP}
    turns = [turn | {"when_s": 1e9 + at, "compaction_id": str(at)} for at in range(200)]
    # Two prompts more of the oldest, and what was written ahead for it between them.
    more = [("reused", "0", ""), ("prepared", "next", "0"), ("reused", "next", "")]
    for at, (outcome, record, before) in enumerate(more, 200):
        turns.append(turn | {"outcome": outcome, "compaction_id": record, "continues_id": before, "when_s": 1e9 + at})
    stub: dict[str, Any] = {
        "settings": {"role": MARKUP, "may_write": True, "sees_all": True, "notices": [MARKUP], "settings": []},
        "deployments": {"deployments": []},
        "events": {
            "events": [
                {"event": "compaction", "outcome": kind, "phase": "pre_request", "model": MARKUP, "reason": MARKUP}
                | {"when_s": when, "tokens_before": 9, "tokens_after": 1, "window_tokens": 0, "compaction_id": "x\"'>"}
                for kind, when in (("refused", 1e9), ("kept", 1e300), ("fallback", -1))
            ]
            + turns[::-1],
        },
    }
    with served(running, stub) as address:
        browser.view(390, 900)
        browser.open(f"{address}/llm/compaction")
        browser.fill("#key", "sk-any")
        browser.click("button.main")
        browser.until("document.querySelector('#headline').textContent")
        browser.reads("201 conversations")
        browser.until("document.querySelectorAll('figure').length === 12")
        browser.reads("3 prompts · window 8,192")
        assert browser.evaluate("document.querySelectorAll('img, figure b').length") == 0
        assert browser.evaluate("document.querySelector('figure bdi').textContent") == MARKUP
        assert browser.evaluate("document.documentElement.scrollWidth") == 390
        empty = {key: [] for key in ("events", "deployments", "notices", "settings")}
        stub |= {key: {**empty, "role": "", "may_write": False, "sees_all": False} for key in stub}
        browser.open(f"{address}/llm/compaction")
        browser.until("document.querySelector('pre')")
        browser.until(f"document.querySelector('pre').textContent === '{address}/llm/v1'")
        browser.reads("None that you may see.")
        browser.reads("sees what is its own")
    assert browser.evaluate("window.hit") is None


@contextmanager
def served(running: Proxy, stub: Mapping[str, Any]) -> Iterator[str]:
    """The proxy's page at a path of another address, with answers that are made up."""
    page = running.client.get(PAGE)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            route = self.path.partition("?")[0].rpartition("/")[2]
            body = page.content if route == "compaction" else json.dumps(stub.get(route, {})).encode()
            self.send_response(200)
            for name in ("content-type", "content-security-policy") if route == "compaction" else ():
                self.send_header(name, page.headers[name])
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *arguments: object) -> None:
            """Tests are quiet."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()
