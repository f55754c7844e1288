"""The page as HTML: fills `templates/` with data, and limits a browser's use of the result.

Markup and wording are in the templates, looks in `style.css`. Here events are folded and the coordinates of plots are
computed. The templates escape every value.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Literal, NamedTuple

import jinja2
from markupsafe import Markup

from litellm_compaction.core.prompts import MAX_FOCUS_CHARS
from litellm_compaction.engine.records import View
from litellm_compaction.events import BY_PLAN, CompactionEvent, ContinuationEvent, Event, TruncationAlarm
from litellm_compaction.proxy.deployments import GuardedDeployment
from litellm_compaction.proxy.live_settings import Change
from litellm_compaction.proxy.page.auth import Visitor
from litellm_compaction.proxy.page.turns import Accuracy, Talk, Turn
from litellm_compaction.proxy.report import DeploymentReport

ALL = "*"

_FOLDER = Path(__file__).parent
# Not allowed in HTML at all (WHATWG HTML, 13.2.3.5 "control-character-in-input-stream"); lone surrogates have no bytes.
_UNPRINTABLE = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")

STYLE = (_FOLDER / "style.css").read_text(encoding="utf-8")
SCRIPT = (_FOLDER / "local_times.js").read_text(encoding="utf-8")


def _source(text: str) -> str:
    """The only text that a browser may take for a style sheet or a script (CSP level 3, `hash-source`)."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


SECURITY_HEADERS = {
    # By their hashes and not `'self'`: that would allow every script of LiteLLM's own.
    "Content-Security-Policy": f"default-src 'none'; style-src {_source(STYLE)}; script-src {_source(SCRIPT)}; "
    "form-action 'self'; frame-ancestors 'none'; base-uri 'none'",
    "Cache-Control": "no-store",
    # `no-referrer` would make browsers send `Origin: null` with forms, and auth.py compares it.
    "Referrer-Policy": "same-origin",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}
_MOST_RATIO = 1.15
_MAX_BARS = 60
_MAX_BAR_WIDTH = 14.0
_LABEL_HEIGHT = 12.0
# A page of so many messages, and so much of each, is still scrolled in a browser.
_MOST_PAIRS, _MOST_TEXT_CHARS = 400, 4000
_MADE = ("compacted", "fallback", "prepared")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A deployment, or a loaded model of a wildcard.

    Attributes:
        state: why there is no window, in words.
        accuracy: of the last answer; None before the first.
        own: settings that the page does not change, as `key: value`.
        conflict: why changes made here do not reach it; "" if they do.
    """

    guard: GuardedDeployment
    report: DeploymentReport
    state: str = ""
    accuracy: Accuracy | None = None
    own: Sequence[str] = ()
    conflict: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """A setting that can be changed.

    Attributes:
        value: in force, or entered and refused.
        configured: without changes made here.
        is_configured: config.yaml says so; it is the default otherwise.
        change: made here.
        options: value and label in a drop-down; empty for a number.
        problem: why the value was refused.
    """

    key: str
    label: str
    description: str
    value: str
    configured: str
    is_configured: bool = False
    change: Change | None = None
    options: Sequence[tuple[str, str]] = ()
    problem: str = ""


class Notice(NamedTuple):
    """A message at the top of the page."""

    kind: Literal["done", "problem", "note"]
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Content:
    """The whole page.

    Attributes:
        revision: of the changes that the form shows.
        talks: those that are drawn, the most recent first; `more_talks` are not.
        events: the newest first.
        now_s: wall clock.
        base_url: of the proxy, for clients.
        folder: stands before the page's own links.
        shows_settings: a form was sent, and has something to say.
    """

    visitor: Visitor
    revision: str
    fields: Sequence[Field]
    notices: Sequence[Notice]
    rows: Sequence[Row]
    talks: Sequence[Talk]
    more_talks: int
    events: Sequence[Event]
    now_s: float = 0.0
    base_url: str = ""
    folder: str = ""
    shows_settings: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """The page of one record.

    Attributes:
        events: of the record, the newest last.
        view: its text; None for a visitor who sees the numbers alone.
        is_own: the visitor may undo, redo and pin.
    """

    record: str
    events: Sequence[CompactionEvent]
    view: View | None = None
    is_own: bool = False
    notices: Sequence[Notice] = ()

    @property
    def made(self) -> Sequence[CompactionEvent]:
        """The event of its making; empty if the history has lost it."""
        return [event for event in self.events if event.outcome in _MADE][:1]


def page(content: Content) -> str:
    models = [row.report.target.model for row in content.rows if row.report.window is not None]
    return _rendered(
        "page.html.j2",
        content=content,
        headline=_headline(content),
        plots=[_plot(talk) for talk in content.talks],
        events=[(event, 1) for event in content.events if _reused(event) is None],
        ways=sorted({row.report.standing.in_words() for row in content.rows} - {""}),
        reuses=_folded([event for event in content.events if _reused(event) is not None]),
        example=f"lm_studio/{models[0]}" if models else "MODEL",
        version=_version(),
    )


def _version() -> str:
    try:
        return metadata.version("litellm_compaction")
    except metadata.PackageNotFoundError:
        # It runs from a folder.
        return ""


def _headline(content: Content) -> list[str]:
    """Sums up how it stands, for one line."""
    made = [event for event in content.events if isinstance(event, CompactionEvent)]
    counts = {
        "model guarded": len(content.rows),
        "conversation": len(content.talks) + content.more_talks,
        "compaction": sum(event.outcome in ("compacted", "fallback") for event in made),
    }
    said = [f"{count} {_plural(name, count)}" for name, count in counts.items()]
    said.append(f"{sum(isinstance(event, TruncationAlarm) for event in content.events)} cut by the server")
    said.append(f"{sum(event.outcome == 'refused' for event in made)} refused")
    return said


def _plural(name: str, count: int) -> str:
    first, _, rest = name.partition(" ")
    return name if count == 1 else f"{first}s {rest}".strip()


def plain_page(text: str, *, back: str = "?") -> str:
    """One sentence, and the way back."""
    return _rendered("plain.html.j2", text=text, back=back)


def record_page(shown: Shown) -> str:
    """One record before and after."""
    return _rendered("record.html.j2", shown=shown, most=_MOST_PAIRS, most_focus=MAX_FOCUS_CHARS)


def _clock(when_s: float, digits: int = 19) -> Markup:
    """A time in UTC, for `local_times.js` to replace; "" for one that no calendar has.

    Args:
        digits: 16 to leave the seconds out.
    """
    try:
        text = datetime.fromtimestamp(when_s, timezone.utc).replace(tzinfo=None).isoformat(timespec="seconds")[:digits]
    except (ValueError, OverflowError, OSError):
        return Markup("")
    return Markup('<time datetime="{}Z">{}</time>').format(text, text.replace("T", " "))


def _folded(events: Sequence[Event]) -> list[tuple[Event, int]]:
    """Reuses with their number, those of a compaction in a row as the newest of them."""
    rows: list[tuple[Event, int]] = []
    for event in events:
        if rows and _reused(event) == _reused(rows[-1][0]):
            rows[-1] = (rows[-1][0], rows[-1][1] + 1)
        else:
            rows.append((event, 1))
    return rows


def _reused(event: Event) -> tuple[str, str] | None:
    """The model and the record of a reuse; None for any other event."""
    if isinstance(event, CompactionEvent) and event.outcome == "reused":
        return event.model, event.compaction_id
    return None


class _Canvas(NamedTuple):
    """A plot's view box, and the field of its bars inside.

    In CSS pixels about as large as it is drawn, so that its letters stay readable on a phone.
    """

    width: int = 400
    height: int = 190
    left: int = 46
    right: int = 392
    top: int = 10
    bottom: int = 168


_CANVAS = _Canvas()


class _Bar(NamedTuple):
    """One turn, drawn: `x` is the bar's middle."""

    turn: Turn
    x: float
    width: float

    @property
    def left(self) -> float:
        return self.x - self.width / 2

    @property
    def fill(self) -> float:
        return _ratio(self.turn.filled_tokens, self.turn)

    def y(self, tokens: int) -> float:
        """Grows downwards."""
        return _y(_ratio(tokens, self.turn))


class _Plot(NamedTuple):
    """One conversation's picture.

    Attributes:
        rules: dashed lines as (share of the window, y, y of the label).
        labels: numbers of turns as (text, x, anchor).
    """

    talk: Talk
    bars: list[_Bar]
    rules: list[tuple[float, float, float]]
    labels: list[tuple[str, float, str]]


def _plot(talk: Talk) -> _Plot:
    turns = talk.turns[-_MAX_BARS:]
    step = min((_CANVAS.right - _CANVAS.left) / len(turns), 2 * _MAX_BAR_WIDTH)
    width = max(min(step * 0.7, _MAX_BAR_WIDTH), 1.0)
    bars = [_Bar(turn, _CANVAS.left + step * (index + 0.5), width) for index, turn in enumerate(turns)]
    count, drawn = len(talk.turns), len(turns)
    labels = [(str(count - drawn + 1), bars[0].x, "middle")]
    if drawn > 1:
        edge = min(bars[-1].x + _MAX_BAR_WIDTH, _CANVAS.width - 2)
        labels.append((f"turn {count}" if drawn > 4 else str(count), edge, "end"))
    return _Plot(talk, bars, _rules(talk.newest), labels)


def _rules(newest: Turn) -> list[tuple[float, float, float]]:
    rules: list[tuple[float, float, float]] = []
    label_y = 0.0
    for ratio in sorted({newest.compact_ratio, newest.carry_ratio, 1.0}, reverse=True):
        # Lines may lie closer together than their labels can.
        label_y = max(_y(ratio) + 4, label_y + _LABEL_HEIGHT)
        rules.append((ratio, _y(ratio), label_y))
    return rules


def _ratio(tokens: int, turn: Turn) -> float:
    return tokens / max(turn.window_tokens, 1)


def _y(ratio: float) -> float:
    inside = min(max(ratio, 0.0), _MOST_RATIO) / _MOST_RATIO
    return round(_CANVAS.bottom - inside * (_CANVAS.bottom - _CANVAS.top), 2)


def _share_of(tokens: int, window_tokens: int) -> str:
    return f"{100 * tokens / window_tokens:.0f} %" if window_tokens > 0 else "–"


def _cut_short(text: str) -> str:
    left = len(text) - _MOST_TEXT_CHARS
    return text if left <= 0 else f"{text[:_MOST_TEXT_CHARS]}\n… {left:,} more characters"


def _shown(field: Field) -> str:
    return next((label for value, label in field.options if value == field.value), field.value)


def _name(text: str) -> Markup:
    """A name that a client may have chosen: it cannot turn the text around it, and its lines break after a slash."""
    return Markup("<bdi>{}</bdi>").format(Markup("/<wbr>").join(text.split("/")))


def _short(value: object) -> object:
    """Coordinates without their invisible digits."""
    return f"{value:g}" if isinstance(value, float) else value


def _environment() -> jinja2.Environment:
    """The templates, all of them compiled: a request never waits for that, and none fails at its first use only."""
    made = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_FOLDER / "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        finalize=_short,
        trim_blocks=True,
        lstrip_blocks=True,
        auto_reload=False,
    )
    made.globals.update(style=STYLE, script=SCRIPT, canvas=_CANVAS, ALL=ALL, by_plan=BY_PLAN)
    made.filters.update(
        clock=_clock,
        name=_name,
        thousands="{:,}".format,
        share_of=_share_of,
        shown=_shown,
        cut_short=_cut_short,
    )
    made.tests["cut"] = lambda event: isinstance(event, ContinuationEvent)
    made.tests["alarm"] = lambda event: isinstance(event, TruncationAlarm)
    for name in made.list_templates(extensions=["j2"]):
        made.get_template(name)
    return made


_ENVIRONMENT = _environment()


def _rendered(name: str, **values: object) -> str:
    return _UNPRINTABLE.sub("\ufffd", _ENVIRONMENT.get_template(name).render(values))
