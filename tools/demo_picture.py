"""Draws docs/demo.svg: the turns of `litellm-compaction demo`, without the plug-in and with it, one after the other.

    litellm-compaction demo --fast | python tools/demo_picture.py > docs/demo.svg

The picture moves by CSS alone, once, and stands still for readers who prefer that; it has a light and a dark form.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from typing import NamedTuple

_WINDOW = re.compile(r"loaded for ([\d,]+) tokens")
# Two sides, each a bar, its tokens, and what the server did with them.
_TURN = re.compile(r"^turn +\d+ \w+ " + r" +\S{24} +([\d,]+)( CUT| FAILED)?(?: -[\d,]+)?" * 2)
_COMPACTED = re.compile("[⚙*] compaction")
_WIDTH, _LANE_WIDTH, _HEIGHT, _FLOOR, _WINDOW_HEIGHT = 840, 380, 300, 250, 84
_BEAT_S, _GROWS_S = 0.12, 0.3
_STYLE = """
text { font: 13px system-ui, sans-serif; fill: #1f2328 }
.title { font-weight: 600 } .quiet { fill: #59636e }
.bar { fill: #4a7fd4 } .cut { fill: #cf222e } .line { stroke: #1f2328; stroke-dasharray: 4 3 }
.mark { fill: #1a7f37 }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3 } .quiet { fill: #9198a1 } .bar { fill: #6ea1ef } .cut { fill: #ff6b6b }
  .line { stroke: #e6edf3 } .mark { fill: #57c878 }
}
@media (prefers-reduced-motion: no-preference) {
  .move { transform-box: fill-box; transform-origin: bottom; animation: grow %(grows)ss ease-out both }
  @keyframes grow { from { transform: scaleY(0) } }
}
"""


class Turn(NamedTuple):
    """One turn of one side: its tokens, and if the server cut its prompt, or the plug-in compacted it."""

    tokens: int
    is_cut: bool = False
    is_compacted: bool = False


def read(text: str) -> tuple[list[Turn], list[Turn]]:
    """Returns the turns without the plug-in and with it, of what `demo` has printed."""
    without: list[Turn] = []
    with_it: list[Turn] = []
    for line in text.splitlines():
        if (found := _TURN.match(line)) is not None:
            for side, tokens, state in ((without, *found.group(1, 2)), (with_it, *found.group(3, 4))):
                side.append(Turn(int(tokens.replace(",", "")), state is not None))
        elif _COMPACTED.search(line) is not None:
            with_it[-1] = with_it[-1]._replace(is_compacted=True)
    return without, with_it


def drawn(text: str) -> str:
    """Returns the picture of a run's output."""
    without, with_it = read(text)
    [window] = _WINDOW.findall(text)
    window_tokens = int(window.replace(",", ""))
    lanes = []
    for title, turns, left in (("LM Studio alone", without, 20), ("With the plug-in", with_it, 60 + _LANE_WIDTH)):
        cuts = sum(turn.is_cut for turn in turns)
        compactions = sum(turn.is_compacted for turn in turns)
        said = f"{cuts} prompts cut by the server" if cuts else f"nothing cut, by {compactions} compactions (green)"
        lanes.append((title, said, turns, left))
    parts = [part for lane in lanes for part in _lane(*lane, window_tokens)]
    label = ". ".join(f"{title}: {len(turns)} turns, {said}" for title, said, turns, _ in lanes)
    style = _STYLE % {"grows": _GROWS_S}
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{label}">\n'
        f"<style>{style}</style>\n" + "\n".join(parts) + "\n</svg>\n"
    )


def _lane(title: str, said: str, turns: Sequence[Turn], left: int, window_tokens: int) -> Iterator[str]:
    step, top = _LANE_WIDTH / len(turns), _FLOOR - _WINDOW_HEIGHT
    yield f'<text x="{left}" y="22" class="title">{title}</text>'
    yield f'<text x="{left}" y="40" class="quiet">{said}</text>'
    for number, turn in enumerate(turns):
        yield from _bars(turn, left + number * step, step - 2, window_tokens, begin_s=number * _BEAT_S)
    yield f'<line x1="{left}" x2="{left + _LANE_WIDTH}" y1="{top}" y2="{top}" class="line"/>'
    window = f"the loaded context length, {window_tokens:,} tokens"
    yield f'<text x="{left}" y="{_FLOOR + 20}" class="quiet">{len(turns)} turns; dashed: {window}</text>'


def _bars(turn: Turn, x: float, width: float, window_tokens: int, *, begin_s: float) -> Sequence[str]:
    delay = f'style="animation-delay: {begin_s:.2f}s"'
    scale = _WINDOW_HEIGHT / window_tokens
    inside = min(turn.tokens, window_tokens) * scale
    over = max(turn.tokens - window_tokens, 0) * scale
    box = f'x="{x:.1f}" width="{width:.1f}" {delay}'
    found = [f'<rect class="bar move" {box} y="{_FLOOR - inside:.1f}" height="{inside:.1f}"/>']
    if over:
        found.append(f'<rect class="cut move" {box} y="{_FLOOR - inside - over:.1f}" height="{over:.1f}"/>')
    if turn.is_compacted:
        found.append(f'<circle class="mark move" cx="{x + width / 2:.1f}" cy="{_FLOOR + 5}" r="3" {delay}/>')
    return found


if __name__ == "__main__":
    sys.stdout.write(drawn(sys.stdin.read()))
