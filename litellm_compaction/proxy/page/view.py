"""The page as HTML: fills `templates/` with `content.py` data, and says what a browser may do with the result.

Markup and wording are in the templates, looks in `style.css`. Here numbers become what is shown: events are folded, the
coordinates of a conversation's plot are computed. Called by `routes.py`. The templates escape every value.
"""

from __future__ import annotations

import base64
import hashlib
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import jinja2

from litellm_compaction.events import CarryEvent, CompactionEvent, Kept, TruncationAlarm
from litellm_compaction.proxy.page.content import Content, Field
from litellm_compaction.proxy.page.turns import Talk, Turn

ALL = "*"

_FOLDER = Path(__file__).parent
# Not allowed in HTML at all (WHATWG HTML, 13.2.3.5 "control-character-in-input-stream"); lone surrogates have no bytes.
_UNPRINTABLE = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")

STYLE = (_FOLDER / "style.css").read_text(encoding="utf-8")
_DIGEST = base64.b64encode(hashlib.sha256(STYLE.encode()).digest()).decode()
SECURITY_HEADERS = {
    "Content-Security-Policy": f"default-src 'none'; style-src 'sha256-{_DIGEST}'; form-action 'self'; "
    "frame-ancestors 'none'; base-uri 'none'",
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


def page(content: Content) -> str:
    """The settings and history page."""
    plots = [_plot(talk) for talk in content.talks]
    return _rendered("page.html.j2", content=content, plots=plots, events=_folded(content.events))


def plain_page(text: str) -> str:
    """One sentence, and the way back."""
    return _rendered("plain.html.j2", text=text)


def clock_text(when_s: float) -> str:
    """A wall clock time for people, in UTC; "" for one that no calendar has."""
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(when_s))
    except (ValueError, OverflowError, OSError):
        return ""


def _folded(events: Sequence[Kept]) -> list[tuple[Kept, int]]:
    """The events with their number, a compaction's reuses in a row as the newest of them."""
    rows: list[tuple[Kept, int]] = []
    for event in events:
        last, times = rows[-1] if rows else (None, 0)
        if _is_reuse(event) and last is not None and _is_reuse(last) and _record(event) == _record(last):
            rows[-1] = (last, times + 1)
        else:
            rows.append((event, 1))
    return rows


def _is_reuse(event: Kept) -> bool:
    return isinstance(event, CompactionEvent) and event.outcome == "reused"


def _record(event: Kept) -> tuple[str, str]:
    return event.model, event.compaction_id if isinstance(event, CompactionEvent) else ""


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


class _Rule(NamedTuple):
    """A dashed line at a share of the window, with its label."""

    ratio: float
    y: float
    label_y: float


class _Bar(NamedTuple):
    """One turn: where its middle is, and how high what it says reaches (y grows downwards).

    Attributes:
        prompt_y, filled_y: the prompt as it was sent; with the answer on top.
        before_y: the prompt as it came.
        restarts: of each the context before and after.
    """

    x: float
    left: float
    width: float
    prompt_y: float
    filled_y: float
    before_y: float
    is_compacted: bool
    restarts: list[tuple[float, float]]


class _Label(NamedTuple):
    """A turn's number below the bars."""

    text: str
    x: float
    anchor: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plot:
    """One conversation's picture.

    Attributes:
        fills: shares of the window after each turn that is drawn.
        is_changed: whether any of these turns was not sent as it came.
    """

    talk: Talk
    fills: list[float]
    compactions: int
    restarts: int
    is_changed: bool
    rules: list[_Rule]
    bars: list[_Bar]
    labels: list[_Label]


_CANVAS = _Canvas()


def _plot(talk: Talk) -> _Plot:
    turns = talk.turns[-_MAX_BARS:]
    step = min((_CANVAS.right - _CANVAS.left) / len(turns), 2 * _MAX_BAR_WIDTH)
    return _Plot(
        talk=talk,
        fills=[_ratio(turn.filled_tokens, turn) for turn in turns],
        compactions=sum(turn.action == "compacted" for turn in turns),
        restarts=sum(len(turn.restarts) for turn in turns),
        is_changed=any(turn.action != "none" for turn in turns),
        rules=_rules(talk.newest),
        bars=[_bar(turn, _x(index, step), step) for index, turn in enumerate(turns)],
        labels=_labels(len(talk.turns), len(turns), step),
    )


def _rules(newest: Turn) -> list[_Rule]:
    rules: list[_Rule] = []
    label_y = 0.0
    for ratio in sorted({newest.compact_ratio, newest.carry_ratio, 1.0}, reverse=True):
        # Lines may lie closer together than their labels can.
        label_y = max(_y(ratio) + 4, label_y + _LABEL_HEIGHT)
        rules.append(_Rule(ratio, _y(ratio), label_y))
    return rules


def _bar(turn: Turn, x: float, step: float) -> _Bar:
    def y(tokens: int) -> float:
        return _y(_ratio(tokens, turn))

    width = max(min(step * 0.7, _MAX_BAR_WIDTH), 1.0)
    return _Bar(
        x=x,
        left=x - width / 2,
        width=width,
        prompt_y=y(turn.prompt_tokens),
        filled_y=y(turn.filled_tokens),
        before_y=y(turn.before_tokens),
        is_compacted=turn.action == "compacted",
        restarts=[(y(drop.before_tokens), y(drop.after_tokens)) for drop in turn.restarts],
    )


def _labels(count: int, drawn: int, step: float) -> list[_Label]:
    """The numbers of the first turn that is drawn, and of the last."""
    labels = [_Label(str(count - drawn + 1), _x(0, step), "middle")]
    if drawn > 1:
        edge = min(_x(drawn - 1, step) + _MAX_BAR_WIDTH, _CANVAS.width - 2)
        labels.append(_Label(f"turn {count}" if drawn > 4 else str(count), edge, "end"))
    return labels


def _ratio(tokens: int, turn: Turn) -> float:
    return tokens / max(turn.window_tokens, 1)


def _x(index: int, step: float) -> float:
    return _CANVAS.left + step * (index + 0.5)


def _y(ratio: float) -> float:
    inside = min(max(ratio, 0.0), _MOST_RATIO) / _MOST_RATIO
    return round(_CANVAS.bottom - inside * (_CANVAS.bottom - _CANVAS.top), 2)


def _thousands(number: int) -> str:
    return f"{number:,}"


def _share_of(tokens: int, window_tokens: int) -> str:
    return f"{100 * tokens / window_tokens:.0f} %" if window_tokens > 0 else "–"


def _shown(field: Field) -> str:
    """A setting's value as people read it."""
    return next((label for value, label in field.options if value == field.value), field.value)


def _short(value: object) -> object:
    """Coordinates without the digits that nobody sees."""
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
    made.globals.update(style=STYLE, canvas=_CANVAS, ALL=ALL)
    made.filters.update(clock=clock_text, thousands=_thousands, share_of=_share_of, shown=_shown)
    made.tests["cut"] = lambda event: isinstance(event, CarryEvent)
    made.tests["alarm"] = lambda event: isinstance(event, TruncationAlarm)
    for name in made.list_templates(extensions=["j2"]):
        made.get_template(name)
    return made


_ENVIRONMENT = _environment()


def _rendered(name: str, **values: object) -> str:
    return _UNPRINTABLE.sub("\ufffd", _ENVIRONMENT.get_template(name).render(values))
