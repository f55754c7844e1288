"""A conversation before its compaction, its record, and what is sent: the picture of docs/page.md and its data.

`python -m tests.processes.record_picture SVG` makes the picture out of a run through a real proxy; the server is the
simulator, and the words of the summary are this script's.
"""

from __future__ import annotations

import sys
import tempfile
import textwrap
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

from litellm_compaction.simulator import ChatCall, Model, Reply, Simulator, serve
from tests.integration.bench import KEY, is_summary_call
from tests.integration.harness import lm_studio, proxy, write_config

_WINDOW = 4096
_SUMMARY = """### Original task
Move the billing service to PostgreSQL 16 without losing an invoice.
### Completed work
Schema written in db/billing.sql; invoices of 2024 copied and compared.
### Current state
The import of 2025 stops at invoice 88213 with a duplicate key.
### Pending
Fix the duplicate, import 2025, switch the service over."""
_TURNS = (
    ("Move our billing service to PostgreSQL 16. Never touch the table audit_log.", "I begin with the schema"),
    ("The new database listens on port 6543, its name is billing_v2.", "Noted; the schema is in db/billing.sql"),
    ("Copy the invoices of 2024 first and compare the sums.", "14,209 invoices copied, both sums are 1,882,410.35"),
    ("Good. Now those of 2025.", "The import stops: duplicate key value, invoice 88213"),
    ("Look where the duplicate comes from.", "It was entered twice on 2025-03-07, by the nightly job"),
    ("Which of the two is the right one?", "The one with the later time has the customer's signature"),
)
_DETAILS = (
    "I read the table again and wrote its columns down.",
    "The types agree with the old ones, but for the dates.",
    "I ran the comparison once more, with the same result.",
    "Nothing had to be changed here.",
    "The index was built before the rows were copied.",
)
_LONG_TURNS = 4
_LAST = "Keep that one, and go on with the import."
_ROLES = ("system", "user", "assistant", "tool")
_WIDTH, _GAP, _LINE, _CHARS = 312, 14, 15, 50
_STYLE = """
svg { font: 11px system-ui, sans-serif }
.paper { fill: #fff } .gone { fill: #f3f5f8; opacity: .65 } .stays { fill: #dcebfb }
.record { fill: #fdf1dc } text { fill: #16202c } .quiet { fill: #52606f } .head { font-size: 14px; font-weight: 600 }
@media (prefers-color-scheme: dark) {
.paper { fill: #12171d } .gone { fill: #1b222b } .stays { fill: #17324d } .record { fill: #3a2d14 }
text { fill: #e6ebf1 } .quiet { fill: #a3b0be } }
"""


class Run(NamedTuple):
    """What the client sent, what the model got, the record as its owner sees it, and tokens before and after."""

    before: list[dict[str, Any]]
    after: list[dict[str, Any]]
    record: dict[str, Any]
    before_tokens: int
    after_tokens: int


def run(folder: Path) -> Run:
    """One request through a real proxy, whose configuration and store are in `folder`."""
    simulator = Simulator([Model(KEY)])
    simulator.script = _reply
    simulator.load(KEY, _WINDOW)
    messages = [{"role": "system", "content": "You are a careful engineer."}, *_talk()]
    with serve(simulator) as served:
        config = write_config(folder, [lm_studio("local", KEY, served.base_url)], {"keep_originals": "compacted"})
        with proxy(config) as running:
            answer = running.chat("local", messages, max_tokens=64).raise_for_status()
            address = f"/compaction/records/{answer.headers['x-litellm-compaction-record']}"
            found: dict[str, Any] = {"before": []}
            while not found["before"]:
                # Originals are kept after the answer.
                found = running.client.get(address, headers=running.headers).raise_for_status().json()
    sent = (simulator.requests[-1].body or {})["messages"]
    tokens = [int(answer.headers[f"x-litellm-compaction-tokens-{when}"]) for when in ("before", "after")]
    return Run(messages, sent, found, tokens[0], tokens[1])


def _talk() -> Iterator[dict[str, str]]:
    for number, (asked, said) in enumerate(_TURNS):
        yield {"role": "user", "content": asked}
        yield {"role": "assistant", "content": f"{said}. {_details(number)}".strip()}
    yield {"role": "user", "content": _LAST}


def _details(number: int) -> str:
    """What an assistant says besides, at length in the first turns."""
    if number >= _LONG_TURNS:
        return ""
    return "\n".join(_DETAILS[at % len(_DETAILS)] for at in range(75))


def _reply(call: ChatCall) -> Reply:
    return Reply(_SUMMARY if is_summary_call(call.body) else "I keep the later one and go on.")


def picture(made: Run) -> str:
    """The run as SVG, in three columns; readers choose its light or its dark colors."""
    fates = {each["number"]: each["fate"] for each in made.record["after"]}
    before = [
        _box(each, "gone" if fates.get(at) == "in the record" else "stays", lines=2)
        for at, each in enumerate(made.before)
    ]
    record = _lines(made.record["record"], most=60)
    after = [_sent(each) for each in made.after]
    columns = [
        (f"Before: {len(made.before)} messages, {made.before_tokens:,} tokens", before),
        (f"The record, for {made.record['covered_messages']} messages", [("record", record)]),
        (f"After: {len(made.after)} messages, {made.after_tokens:,} tokens", after),
    ]
    drawn = [_column(title, boxes, at) for at, (title, boxes) in enumerate(columns)]
    width, height = 3 * _WIDTH + 4 * _GAP, max(bottom for _, bottom in drawn) + _GAP
    title = "A conversation before its compaction, its record, and after"
    body = "\n".join(text for text, _ in drawn)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'role="img">\n<title>{title}</title>\n<style>{_STYLE}</style>\n'
        f'<rect class="paper" width="{width}" height="{height}"/>\n{body}\n</svg>\n'
    )


def _sent(message: dict[str, Any]) -> tuple[str, list[str]]:
    """A message as the model got it; the one with the record ends in the user's own words."""
    record, end, words = message["content"].partition("[END RECORD OF EARLIER CONVERSATION]")
    if not end:
        return _box(message, "stays", lines=3)
    return "record", ["user", *_lines(record, most=2), end, *_lines(words.strip(), most=8)]


def _box(message: dict[str, Any], kind: str, *, lines: int) -> tuple[str, list[str]]:
    return kind, [f"{message['role']}", *_lines(message["content"], most=lines)]


def _lines(text: str, *, most: int) -> list[str]:
    found = [line for each in text.splitlines() for line in textwrap.wrap(each, _CHARS) or [""]]
    return found if len(found) <= most else [*found[: most - 1], f"{found[most - 1][: _CHARS - 2]} …"]


def _column(title: str, boxes: Sequence[tuple[str, Sequence[str]]], at: int) -> tuple[str, int]:
    """A column's drawing, and where it ends."""
    left, top = _GAP + at * (_WIDTH + _GAP), 2 * _GAP
    parts = [f'<text class="head" x="{left}" y="{top}">{escape(title)}</text>']
    top += _GAP
    for kind, lines in boxes:
        height = _LINE * len(lines) + 8
        parts.append(f'<rect class="{kind}" x="{left}" y="{top}" width="{_WIDTH}" height="{height}" rx="5"/>')
        for number, line in enumerate(lines):
            look = ' class="quiet"' if number == 0 and line in _ROLES else ""
            parts.append(f'<text{look} x="{left + 8}" y="{top + _LINE * (number + 1)}">{escape(line)}</text>')
        top += height + 5
    return "\n".join(parts), top


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        Path(sys.argv[1]).write_text(picture(run(Path(name))), encoding="utf-8")
