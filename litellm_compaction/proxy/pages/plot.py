"""One conversation as an SVG picture: how full its context was, turn by turn."""

from __future__ import annotations

from collections.abc import Sequence

from litellm_compaction.proxy.pages.markup import Html, name_of, tag
from litellm_compaction.proxy.pages.tables import clock_text
from litellm_compaction.proxy.talks import Talk, Turn

# In units of the view box; drawn at about this size in CSS pixels, so that its letters stay readable on a phone.
_WIDTH, _HEIGHT = 400, 190
_LEFT, _RIGHT, _TOP, _BOTTOM = 46, 8, 10, 22
_MOST_RATIO = 1.15
_MAX_BARS = 60
_MAX_BAR_WIDTH = 14.0
_LABEL_HEIGHT = 12.0


def plot(talk: Talk) -> Html:
    """The picture with its caption."""
    turns = list(talk.turns)[-_MAX_BARS:]
    first = talk.count - len(turns) + 1
    title, summary = f"plot-{talk.id}-title", f"plot-{talk.id}-text"
    step = min((_WIDTH - _LEFT - _RIGHT) / max(len(turns), 1), 2 * _MAX_BAR_WIDTH)
    shapes = [
        tag("title", f"Context fill of conversation {talk.id}", id=title),
        tag("desc", _summary(talk, turns), id=summary),
        *_rules(talk),
        *(shape for index, turn in enumerate(turns) for shape in _bar(turn, index, step)),
        _client_line(turns, step),
        *(shape for index, turn in enumerate(turns) for shape in _marks(turn, index, step)),
        tag("text", str(first), x=_x(0, step), y=_HEIGHT - 6, text_anchor="middle"),
    ]
    if len(turns) > 1:
        last = f"turn {talk.count}" if len(turns) > 4 else str(talk.count)
        edge = min(_x(len(turns) - 1, step) + _MAX_BAR_WIDTH, _WIDTH - 2)
        shapes.append(tag("text", last, x=edge, y=_HEIGHT - 6, text_anchor="end"))
    picture = tag("svg", shapes, viewBox=f"0 0 {_WIDTH} {_HEIGHT}", role="img", aria_labelledby=f"{title} {summary}")
    window_tokens = turns[-1].window_tokens if turns else 0
    when = clock_text(turns[-1].when_s)[:16] if turns else ""
    caption = tag(
        "figcaption",
        tag("h3", name_of(talk.model)),
        tag("p", f"{talk.id} · {_turns(talk.count)} · window {window_tokens:,} · {when}", class_="quiet"),
    )
    return tag("figure", caption, picture, class_="plot")


def _summary(talk: Talk, turns: Sequence[Turn]) -> str:
    if not turns:
        return "No turns."
    compacted = sum(turn.action == "compacted" for turn in turns)
    restarts = sum(len(turn.restarts) for turn in turns)
    fills = [100 * _ratio(turn.filled_tokens, turn) for turn in turns]
    return (
        f"{_turns(len(turns))} of {talk.model}: {min(fills):.0f} to {max(fills):.0f} percent of the window, "
        f"{fills[-1]:.0f} percent after the last one; {compacted} compactions, {restarts} restarts."
    )


def _turns(count: int) -> str:
    return f"{count} turn" if count == 1 else f"{count} turns"


def _rules(talk: Talk) -> list[Html]:
    right = _WIDTH - _RIGHT
    shapes = [tag("line", x1=_LEFT, y1=_y(0), x2=right, y2=_y(0), class_="base")]
    label_y = 0.0
    for ratio in sorted({talk.compact_ratio, talk.carry_ratio, 1.0}, reverse=True):
        kind = "rule full" if ratio == 1.0 else "rule"
        # Lines may lie closer together than their labels can.
        label_y = max(_y(ratio) + 4, label_y + _LABEL_HEIGHT)
        shapes.append(tag("line", x1=_LEFT, y1=_y(ratio), x2=right, y2=_y(ratio), class_=kind))
        shapes.append(tag("text", f"{100 * ratio:.0f} %", x=_LEFT - 4, y=label_y, text_anchor="end"))
    return shapes


def _bar(turn: Turn, index: int, step: float) -> list[Html]:
    width = max(min(step * 0.7, _MAX_BAR_WIDTH), 1.0)
    left = _x(index, step) - width / 2
    prompt, filled = _y(_ratio(turn.prompt_tokens, turn)), _y(_ratio(turn.filled_tokens, turn))
    shapes = [tag("rect", x=left, y=prompt, width=width, height=_y(0) - prompt, class_="bar")]
    if filled < prompt:
        shapes.append(tag("rect", x=left, y=filled, width=width, height=prompt - filled, class_="more"))
    return shapes


def _client_line(turns: Sequence[Turn], step: float) -> Html | None:
    """The conversation as the client sends it, once something was taken out of it."""
    if all(turn.action == "none" for turn in turns):
        return None
    points = " ".join(
        f"{_x(index, step):.1f},{_y(_ratio(turn.before_tokens, turn)):.1f}" for index, turn in enumerate(turns)
    )
    return tag("polyline", points=points, class_="client")


def _marks(turn: Turn, index: int, step: float) -> list[Html]:
    x = _x(index, step)
    shapes: list[Html] = []
    if turn.action == "compacted":
        top, end = _y(_ratio(turn.before_tokens, turn)), _y(_ratio(turn.prompt_tokens, turn))
        shapes.append(tag("line", x1=x, y1=top, x2=x, y2=end, class_="compact"))
        shapes.append(tag("path", d=f"M{x - 4.5:.1f} {top - 4:.1f}h9l-4.5 8z", class_="compact"))
    for drop in turn.restarts:
        y = _y(_ratio(drop.before_tokens, turn))
        shapes.append(tag("line", x1=x, y1=y, x2=x, y2=_y(_ratio(drop.after_tokens, turn)), class_="restart"))
        shapes.append(tag("circle", cx=x, cy=y, r=4, class_="restart"))
    return shapes


def _ratio(tokens: int, turn: Turn) -> float:
    return tokens / max(turn.window_tokens, 1)


def _x(index: int, step: float) -> float:
    return _LEFT + step * (index + 0.5)


def _y(ratio: float) -> float:
    inside = min(max(ratio, 0.0), _MOST_RATIO) / _MOST_RATIO
    return round(_HEIGHT - _BOTTOM - inside * (_HEIGHT - _TOP - _BOTTOM), 2)


def _sample(*shapes: Html) -> Html:
    return tag("svg", shapes, viewBox="0 0 18 14", aria_hidden="true")


LEGEND = tag(
    "ul",
    tag("li", _sample(tag("rect", x=4, y=2, width=10, height=12, class_="bar")), "prompt"),
    tag("li", _sample(tag("rect", x=4, y=2, width=10, height=12, class_="more")), "answer"),
    tag("li", _sample(tag("line", x1=0, y1=7, x2=18, y2=7, class_="client")), "conversation as the client sends it"),
    tag("li", _sample(tag("path", d="M4 3h10l-5 9z", class_="compact")), "compacted"),
    tag("li", _sample(tag("circle", cx=9, cy=7, r=5, class_="restart")), "restart in mid-answer"),
    class_="legend",
)
