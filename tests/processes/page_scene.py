"""A proxy with something to show: conversations that were compacted and restarted, on models with several names.

`python -m tests.processes.page_scene PNG` makes the picture that README.md and docs/page.md show. The one in
docs/ has a palette of 128 colors, to keep the repository small.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from tests.integration.bench import SUMMARY, is_summary_call
from tests.integration.harness import MASTER_KEY, Proxy, lm_studio, proxy, until, write_config
from tests.integration.page_forms import look
from tests.lmstudio_double import Model, Reply, Simulator, serve
from tests.processes.browser import browse, chromium

PAGE = "/compaction/"
DRAWN = "document.querySelector('#headline').textContent"
_CODER, _SMALL = "qwen2.5-coder-14b", "qwen2.5-3b-instruct"
_LONG = "a long report line by line " * 900


@contextmanager
def scene(folder: Path) -> Iterator[Proxy]:
    """A proxy after two conversations, whose configuration and store are in a folder."""
    models = [Model(name, publisher="qwen", architecture="qwen2") for name in (_CODER, _SMALL)]
    simulator = Simulator(models, chunk_tokens=16)
    simulator.script = _reply
    simulator.load(_CODER, 16384, parallel=2)
    simulator.load(_SMALL, 8192)
    with ExitStack() as stack:
        base_url = stack.enter_context(serve(simulator)).base_url
        entries = [
            lm_studio("coder", _CODER, base_url),
            lm_studio("fast", _SMALL, base_url, compaction={"target_ratio": 0.3}),
            lm_studio("lm_studio/*", "*", base_url),
        ]
        running = stack.enter_context(proxy(write_config(folder, entries, {})))
        _talk(running, "coder", 46, 130)
        _talk(running, "fast", 26, 150)
        # Events are kept after an answer; the page draws those that are there.
        until(
            lambda: (
                {each["model"] for each in look(running, "events", MASTER_KEY).json()["events"]} == {"coder", "fast"}
            )
        )
        yield running


def sign_in(browser: Any, running: Proxy) -> None:
    """Opens the page in a tab without a key, and enters one; returns when all is drawn."""
    browser.open(f"{running.base_url}{PAGE}")
    browser.evaluate("sessionStorage.clear()")
    browser.open(f"{running.base_url}{PAGE}?again")
    browser.fill("#key", MASTER_KEY)
    browser.click("#sign-in button")
    browser.until(DRAWN)


def _talk(running: Proxy, model: str, turns: int, words: int) -> None:
    messages: list[dict[str, Any]] = [{"role": "user", "content": f"Work with me on the {model} ledger."}]
    for number in range(turns):
        if model == "coder" and number in (7, 15, 23, 30):
            messages[-1]["content"] += " Now write the REPORT."
        answer = running.stream(model, messages)
        assert answer.status == 200
        size = words * (1 + number % 4)
        messages += [
            {"role": "assistant", "content": answer.text},
            {"role": "user", "content": f"Step {number}. " + "alpha beta gamma delta " * (size // 4)},
        ]


def _reply(call: Any) -> Reply:
    if is_summary_call(call.body):
        return Reply(SUMMARY)
    newest = call.body["messages"][-1]["content"]
    return Reply(_LONG if "REPORT" in str(newest) else "Understood. " * 40)


def main(path: str) -> None:
    """Writes the picture."""
    executable = chromium()
    assert executable, "no Chromium on this machine"
    with (
        tempfile.TemporaryDirectory() as folder,
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile,
        scene(Path(folder)) as running,
        browse(executable, Path(profile)) as browser,
    ):
        browser.view(1180, 900)
        sign_in(browser, running)
        end = browser.evaluate("document.querySelector('#conversations').getBoundingClientRect().bottom + scrollY")
        browser.view(1180, int(end) + 16)
        browser.screenshot(Path(path))


if __name__ == "__main__":
    main(sys.argv[1])
