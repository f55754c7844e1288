"""Draws docs/demo.svg: the turns of `litellm-compaction demo`, without the plug-in and with it, one after the other.

    python tools/demo_picture.py docs/demo.svg

Runs both (a minute), and draws what they print. The picture moves by CSS alone, once, and stands still for readers who
prefer that; it has a light and a dark form.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

_TURN = re.compile(r"^turn +(\d+) .*? ([\d,]+)/([\d,]+) ")
_CUT = re.compile(r"! the server cut the prompt")
_COMPACTED = re.compile(r"⚙ (?:round|restart)")
_LAST = re.compile(r"^\d+ turns, (?P<made>\d+) compactions, (?P<cuts>\d+) truncations by the server", re.MULTILINE)
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
    """One turn: the prompt's tokens, and if the server has cut it, or a compaction came before it."""

    tokens: int
    window: int
    is_cut: bool
    is_compacted: bool


def read(text: str) -> list[Turn]:
    """Returns the turns that `demo --no-color` has printed; the parts of a last answer count as its last one."""
    turns: dict[int, Turn] = {}
    is_cut = is_compacted = False
    for line in text.splitlines():
        is_cut |= _CUT.search(line) is not None
        is_compacted |= _COMPACTED.search(line) is not None
        if (found := _TURN.match(line)) is not None:
            tokens, window = (int(each.replace(",", "")) for each in found.groups()[1:])
            turns[int(found[1])] = Turn(tokens, window, is_cut, is_compacted)
            is_cut = is_compacted = False
    return list(turns.values())


def drawn(without: str, with_it: str) -> str:
    """Returns the picture of two runs' output."""
    lanes = (("LM Studio alone", without, 20), ("With the plug-in", with_it, 20 + _LANE_WIDTH + 40))
    parts = [part for title, text, left in lanes for part in _lane(title, text, left)]
    label = f"LM Studio alone: {_said(without)} With the plug-in: {_said(with_it)}"
    style = _STYLE % {"grows": _GROWS_S}
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{label}">\n'
        f"<style>{style}</style>\n" + "\n".join(parts) + "\n</svg>\n"
    )


def _said(text: str) -> str:
    found = _LAST.search(text)
    return f"{found[0]}." if found is not None else ""


def _lane(title: str, text: str, left: int) -> Iterator[str]:
    turns = read(text)
    scale = _WINDOW_HEIGHT / turns[0].window
    step = _LANE_WIDTH / len(turns)
    yield f'<text x="{left}" y="22" class="title">{title}</text>'
    last = _LAST.search(text)
    cuts, made = (last["cuts"], last["made"]) if last is not None else ("0", "0")
    said = f"{cuts} prompts cut by the server" if cuts != "0" else f"nothing cut, by {made} compactions (green)"
    yield f'<text x="{left}" y="40" class="quiet">{said}</text>'
    for number, turn in enumerate(turns):
        yield from _bars(turn, left + number * step, step - 2, scale, begin_s=number * _BEAT_S)
    top = _FLOOR - _WINDOW_HEIGHT
    yield f'<line x1="{left}" x2="{left + _LANE_WIDTH}" y1="{top}" y2="{top}" class="line"/>'
    window = f"the loaded context length, {turns[0].window:,} tokens"
    yield f'<text x="{left}" y="{_FLOOR + 20}" class="quiet">{len(turns)} turns; dashed: {window}</text>'


def _bars(turn: Turn, x: float, width: float, scale: float, *, begin_s: float) -> Sequence[str]:
    delay = f'style="animation-delay: {begin_s:.2f}s"'
    inside = min(turn.tokens, turn.window) * scale
    over = max(turn.tokens - turn.window, 0) * scale
    box = f'x="{x:.1f}" width="{width:.1f}" {delay}'
    found = [f'<rect class="bar move" {box} y="{_FLOOR - inside:.1f}" height="{inside:.1f}"/>']
    if over:
        found.append(f'<rect class="cut move" {box} y="{_FLOOR - inside - over:.1f}" height="{over:.1f}"/>')
    if turn.is_compacted:
        found.append(f'<circle class="mark move" cx="{x + width / 2:.1f}" cy="{_FLOOR + 5}" r="3" {delay}/>')
    return found


def _demo(*more: str) -> str:
    command = [sys.executable, "-m", "litellm_compaction.cli", "demo", "--fast", "--no-color", *more]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout  # noqa: S603 - our own program


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(drawn(_demo("--unguarded"), _demo()), encoding="utf-8")
