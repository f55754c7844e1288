"""The page in a real browser: wide and narrow, light and dark, with and without scripts.

Skipped where there is no Chromium (`$CHROMIUM`, or one on PATH; on Debian the package `chromium`).
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from datetime import datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Literal
from zoneinfo import ZoneInfo

import pytest

from tests.integration.harness import Proxy
from tests.processes.browser import Browser, browse, chromium
from tests.processes.page_scene import PAGE, scene, sign_in, unfold_settings

pytestmark = [
    pytest.mark.proxy,
    pytest.mark.skipif(chromium() is None, reason="no Chromium: set $CHROMIUM, or `apt-get install chromium`"),
]

Scheme = Literal["light", "dark"]
# A wide screen, a tablet, and a phone.
VIEWS: list[tuple[int, Scheme]] = [(1280, "dark"), (768, "light"), (360, "light")]
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
  return [...document.querySelectorAll('body :not(title, desc)')]
    .filter(e => [...e.childNodes].some(n => n.nodeType === 3 && n.data.trim()))
    .map(e => { const style = getComputedStyle(e);
      const [a, b] = [light(rgb(e.closest('svg') ? style.fill : style.color)), light(behind(e))].sort((x, y) => y - x);
      return [(a + 0.05) / (b + 0.05), e.tagName + ' ' + e.textContent.slice(0, 30)]; })
    .filter(([ratio]) => ratio < 4.5);
})()
"""


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
    """The content security policy stops nothing of ours: the browser has nothing to complain about."""
    browser.complaints.clear()
    yield
    # The form for a key comes with status 401, which the browser notes down, as it does where somebody typed before the
    # field took the focus by itself.
    known = ("status of 401", "status of 422", "Autofocus processing was blocked")
    assert [each for each in browser.complaints if not any(note in each for note in known)] == []


@pytest.mark.parametrize(("width", "scheme"), VIEWS)
def test_everything_is_seen_without_scrolling_sideways(
    running: Proxy, browser: Browser, width: int, scheme: Scheme, tmp_path: Path
) -> None:
    """Wide and narrow, light and dark: readable text, visible plots, controls inside the screen."""
    browser.view(width, 900, scheme)
    sign_in(browser, running)
    assert browser.evaluate("document.documentElement.scrollWidth") == width
    assert "Guarded deployments" in browser.text()
    assert browser.evaluate(_CONTRASTS) == []
    browser.evaluate("document.querySelectorAll('details').forEach(each => each.open = true)")
    hidden = "[...document.querySelectorAll('.scroll')].filter(e => e.scrollWidth > e.clientWidth).length"
    assert browser.evaluate(hidden) == 0
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
    controls = browser.evaluate(
        "[...document.querySelectorAll('select, input:not([type=hidden]), button')].map(e => e.getBoundingClientRect())"
        ".map(b => [b.left, b.right, b.height])"
    )
    least = 44 if width < 640 else 24
    assert all(left >= 0 and right <= width and height >= least for left, right, height in controls)
    painted = browser.evaluate("getComputedStyle(document.body).backgroundColor")
    assert painted == ("rgb(255, 255, 255)" if scheme == "light" else "rgb(18, 23, 29)")
    browser.screenshot(tmp_path / f"page-{scheme}-{width}.png")


@pytest.mark.parametrize(("zone", "path"), [("Asia/Kolkata", PAGE), ("America/New_York", "a record"), ("", PAGE)])
def test_times_are_those_of_the_reader(running: Proxy, browser: Browser, zone: str, path: str) -> None:
    """In his time zone, with UTC beside; in UTC without scripts. The page says which."""
    browser.view(1280, 900, scripts=bool(zone), zone=zone or "Asia/Tokyo")
    sign_in(browser, running)
    if path != PAGE:
        browser.open(browser.evaluate("document.querySelector('td a').href"))
    times = browser.evaluate("[...document.querySelectorAll('time')].map(e => [e.dateTime, e.textContent, e.title])")
    assert len(times) >= 2
    for stamp, shown, title in times:
        when = datetime.fromisoformat(stamp.replace("Z", "+00:00"))
        utc, local = (
            str(when.astimezone(ZoneInfo(each)).replace(tzinfo=None))[: len(shown)] for each in ("UTC", zone or "UTC")
        )
        assert (shown, title) == (local, f"{utc} UTC" if zone else "")
    offset = (
        f"Times are local, GMT{datetime.now(ZoneInfo(zone)):%z}; point at one for UTC." if zone else "Times are UTC."
    )
    assert offset in browser.text()


@pytest.mark.parametrize("scripts", [True, False])
def test_a_setting_is_changed_and_reset(running: Proxy, browser: Browser, scripts: bool) -> None:
    """By mouse and keyboard, without any script of the page's; what was refused stays in the form."""
    browser.view(1280, 900, scripts=scripts)
    sign_in(browser, running)
    unfold_settings(browser)
    browser.fill("#pruning_model", "fast")
    browser.fill("#target_ratio", "7")
    browser.click("#settings-form button.main")
    assert "Compact down to: “7” is not a share (above 0, below 1; 35 % is 0.35)." in browser.text()
    # Below three sections, and seen without a search.
    assert browser.evaluate("document.activeElement.id") == "target_ratio"
    top, bottom = browser.evaluate(
        "[document.activeElement, document.querySelector('#target_ratio-problem')]"
        ".map(e => e.getBoundingClientRect()).map((b, i) => i ? b.bottom : b.top)"
    )
    assert 0 <= top < bottom <= 900
    assert browser.evaluate("document.querySelector('#pruning_model').value") == "fast"
    assert browser.evaluate("document.querySelector('#target_ratio').getAttribute('aria-invalid')") == "true"
    browser.fill("#target_ratio", "0.35")
    browser.press_enter("#target_ratio")
    assert "Saved." in browser.text()
    assert "changed here to 0.35 at" in browser.text()
    assert browser.evaluate("document.querySelector('#pruning_model').selectedOptions[0].label").startswith("fast (")
    browser.click("button[name=reset][value=target_ratio]")
    assert "config.yaml holds again" in browser.text()
    assert browser.evaluate("document.querySelector('#target_ratio').value") == "0.4"
    browser.click("button[name=reset][value='*']")
    assert "changed here to" not in browser.text()


def test_another_port_of_this_machine_reads_and_writes_nothing(
    running: Proxy, browser: Browser, elsewhere: str
) -> None:
    """Its requests bring the browser's password along, and LiteLLM's CORS settings may show it the answer."""
    browser.view(1280, 900)
    sign_in(browser, running)
    browser.open(elsewhere)
    page = f"{running.base_url}{PAGE}"
    read = f"fetch({page!r}, {{credentials: 'include'}}).then(a => a.text(), () => '')"
    answer = browser.call("Runtime.evaluate", expression=read, awaitPromise=True, returnByValue=True)
    assert "Guarded deployments" not in answer["result"]["value"]
    with browser.loading():
        browser.evaluate(
            f"document.body.innerHTML = '<form method=post action={page}><input name=do value=save></form>';"
            "document.forms[0].submit()"
        )
    assert "was not sent from this page" in browser.text()
    browser.open(page)
    assert "Guarded deployments" in browser.text()
    browser.complaints.clear()


def test_nothing_smuggled_into_the_page_reaches_anybody(running: Proxy, browser: Browser, elsewhere: str) -> None:
    """Should markup ever slip in: no script of it runs, nothing is loaded, nothing is sent."""
    browser.view(1280, 900)
    sign_in(browser, running)
    browser.evaluate(
        "document.body.insertAdjacentHTML('beforeend', "
        f"'<img src={elsewhere}pixel onerror=window.hit=1><iframe src={elsewhere}></iframe>');"
        "const s = document.createElement('script'); s.textContent = 'window.hit = 1'; document.body.append(s)"
    )
    read = f"fetch({elsewhere!r}).then(a => 'reached', () => 'blocked')"
    answer = browser.call("Runtime.evaluate", expression=read, awaitPromise=True, returnByValue=True)
    assert answer["result"]["value"] == "blocked"
    assert browser.evaluate("window.hit") is None
    assert browser.complaints
    browser.complaints.clear()


class _Elsewhere(BaseHTTPRequestHandler):
    """Somebody else's page on this machine."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.end_headers()
        self.wfile.write(b"<!doctype html><link rel=icon href=data:,><title>elsewhere</title>")

    def log_message(self, *arguments: object) -> None:
        """Tests are quiet."""


@pytest.fixture(scope="module")
def elsewhere() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Elsewhere) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}/"
        server.shutdown()
        thread.join()
