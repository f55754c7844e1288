"""The page in a real browser: wide and narrow, light and dark, by keyboard, behind a path, with names that are markup.

Skipped where there is no Chromium (`$CHROMIUM`, or one on PATH; on Debian the package `chromium`).
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Literal
from zoneinfo import ZoneInfo

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
# WCAG 2.2, 1.4.3: text needs 4.5 to 1 against what is behind it. The background is that of the nearest painted parent.
_CONTRASTS = """
(() => {
  const rgb = text => text.match(/[\\d.]+/g).map(Number);
  const light = ([r, g, b]) => [r, g, b].map(v => v / 255)
    .map(v => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const behind = e => { for (; e; e = e.parentElement) {
    const c = rgb(getComputedStyle(e).backgroundColor); if (c.length < 4 || c[3] > 0) return c; }
    return [255, 255, 255]; };
  return [...document.querySelectorAll('body :not(title, desc, script)')]
    .filter(e => [...e.childNodes].some(n => n.nodeType === 3 && n.data.trim()))
    .map(e => { const style = getComputedStyle(e);
      const [a, b] = [light(rgb(e.closest('svg') ? style.fill : style.color)), light(behind(e))].sort((x, y) => y - x);
      return [(a + 0.05) / (b + 0.05), e.tagName + ' ' + e.textContent.slice(0, 30)]; })
    .filter(([ratio]) => ratio < 4.5);
})()
"""
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
    known = ("status of 401", "status of 422", "Password forms should have")
    assert [each for each in browser.complaints if not any(note in each for note in known)] == []


@pytest.mark.parametrize(("width", "scheme"), VIEWS)
def test_everything_is_seen_without_scrolling_sideways(
    running: Proxy, browser: Browser, width: int, scheme: Scheme, tmp_path: Path
) -> None:
    """Readable text, visible plots, controls inside the screen and large enough, each with a name."""
    browser.view(width, 900, scheme)
    sign_in(browser, running)
    browser.evaluate(_UNFOLD)
    assert browser.evaluate("document.documentElement.scrollWidth") == width
    for words in ("4 models guarded", "2 conversations", "0 cut by the server", "Guarded deployments", "in mid-answer"):
        browser.reads(words)
    assert browser.evaluate(_CONTRASTS) == []
    plots = browser.evaluate(
        "[...document.querySelectorAll('figure svg')].map(e => e.getBoundingClientRect()).map(b => [b.width, b.height])"
    )
    assert len(plots) == 2
    assert all(250 <= size[0] <= width and size[1] > 100 for size in plots)
    cut_off = browser.evaluate(
        "[...document.querySelectorAll('figure svg text')].filter(e => { const b = e.getBoundingClientRect(),"
        " s = e.ownerSVGElement.getBoundingClientRect(); return b.left < s.left - 1 || b.right > s.right + 1; })"
        ".map(e => e.textContent)"
    )
    assert cut_off == []
    marks = browser.evaluate(
        "['.rule', '.full', '.client', '.bar', 'path.compact', 'circle.restart']"
        ".map(kind => document.querySelectorAll('figure ' + kind).length)"
    )
    assert marks[:3] == [4, 2, 2]
    assert (marks[3] >= 40, marks[4] >= 3, marks[5] >= 1) == (True, True, True)
    controls = browser.evaluate(
        "[...document.querySelectorAll('select, input, button')].filter(e => e.checkVisibility())"
        ".map(e => [e.getBoundingClientRect(), e.textContent || e.labels.length])"
        ".map(([b, named]) => [b.left, b.right, b.height, Boolean(named)])"
    )
    least = 44 if width < 640 else 24
    assert all(left >= 0 and right <= width and high >= least and named for left, right, high, named in controls)
    browser.screenshot(tmp_path / f"page-{scheme}-{width}.png")


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
    browser.reads("Compact down to: “7”: Input should be less than 1.")
    browser.until("document.activeElement.id === 'set-target_ratio'")
    top, bottom = browser.evaluate(
        "[document.activeElement, document.querySelector('#set-target_ratio-problem')]"
        ".map(e => e.getBoundingClientRect()).map((b, i) => i ? b.bottom : b.top)"
    )
    assert 0 <= top < bottom <= 900
    assert browser.evaluate("document.querySelector('#set-pruning_model').value") == "fast"
    browser.fill("#set-target_ratio", "0.35")
    browser.press("Enter")
    browser.reads("Saved.")
    label = browser.evaluate("document.querySelector('#set-pruning_model').selectedOptions[0].label")
    assert label == "fast (lm_studio/qwen2.5-3b-instruct)"
    browser.click("[aria-label='Reset Compact down to']")
    browser.until("document.querySelector('#set-target_ratio').value === '0.4'")
    browser.evaluate("document.querySelector('.changed button').focus()")
    browser.press("Enter")
    browser.until("!document.querySelector('.changed')")


def test_a_record_is_seen_side_by_side_searched_and_undone(running: Proxy, browser: Browser) -> None:
    """By its link, which can be sent to others: its address has the id alone."""
    browser.view(1280, 900)
    sign_in(browser, running)
    browser.fill("#query", "ledger")
    browser.click("#find button")
    browser.until("document.querySelector('#hits > *')")
    browser.click("#events td a")
    browser.until("document.querySelector('#record h2')")
    record = browser.evaluate("location.hash")
    assert len(record) == 17
    for words in ("Record " + record[1:], "It covers", "The record", "Everything that was decided so far is kept."):
        browser.reads(words)
    browser.click("#record button")
    browser.reads("Forgotten.")
    browser.open(f"{running.base_url}{PAGE}{record}")
    browser.reads("Only its owner's key sees its text.")


@pytest.mark.parametrize("zone", ["Asia/Kolkata"])
def test_times_are_those_of_the_reader(running: Proxy, browser: Browser, zone: str) -> None:
    """In his time zone, with UTC beside. The page says which."""
    browser.view(1280, 900, zone=zone)
    sign_in(browser, running)
    times = browser.evaluate("[...document.querySelectorAll('time')].map(e => [e.dateTime, e.textContent, e.title])")
    assert len(times) >= 2
    for stamp, shown, title in times:
        when = datetime.fromisoformat(stamp.replace("Z", "+00:00"))
        utc, local = (str(when.astimezone(ZoneInfo(each)).replace(tzinfo=None))[: len(shown)] for each in ("UTC", zone))
        assert (shown, title) == (local, f"{utc} UTC")
    assert f"GMT{datetime.now(ZoneInfo(zone)):%z}" in browser.text()


def test_names_that_are_markup_stay_text_and_200_conversations_are_drawn(running: Proxy, browser: Browser) -> None:
    """Eight at a time; whatever a name, a reason or an answer of a server says."""
    turn = {"model": MARKUP, "tokens_before": 10**9, "tokens_after": 4000, "window_tokens": 8192}
    turn |= {"outcome": "compacted", "phase": MARKUP, "compaction_id": MARKUP}
    stub: dict[str, Any] = {
        "settings": {"role": MARKUP, "may_write": True, "sees_all": True, "notices": [MARKUP], "settings": []},
        "deployments": {"deployments": [], "models": {}},
        "events": {
            "events": [
                {"event": "compaction", "outcome": kind, "phase": "pre_request", "model": MARKUP, "reason": MARKUP}
                | {"when_s": when, "tokens_before": 9, "tokens_after": 1, "window_tokens": 0, "compaction_id": "x\"'>"}
                for kind, when in (("refused", 1e9), ("kept", 1e300), ("compacted", -1))
            ],
        },
        "conversations": {
            "conversations": [{"id": str(at), "turns": [turn | {"when_s": 1e9 + at}]} for at in range(200)]
        },
    }
    with served(running, stub) as address:
        browser.view(390, 900)
        browser.open(f"{address}/llm/compaction")
        browser.fill("#key", "sk-any")
        browser.click("button.main")
        browser.until("document.querySelector('#headline').textContent")
        browser.reads("200 conversations")
        browser.until("document.querySelectorAll('figure').length === 8")
        browser.click(".plots + button")
        browser.until("document.querySelectorAll('figure').length === 16")
        assert browser.evaluate("document.querySelectorAll('img, figure b').length") == 0
        assert browser.evaluate("document.querySelector('figure bdi').textContent") == MARKUP
        assert browser.evaluate("document.documentElement.scrollWidth") == 390
        empty = {key: [] for key in ("conversations", "events", "deployments", "notices", "settings")}
        stub |= {key: {**empty, "models": {}, "role": "", "may_write": False, "sees_all": False} for key in stub}
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
            route = self.path.rpartition("/")[2]
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
