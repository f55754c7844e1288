"""How the demo looks: one line a turn with a bar, one a compaction, one summary. Values in, text out."""

from __future__ import annotations

from dataclasses import dataclass

WIDTH = 40
_RESET = "\x1b[0m"
_GREEN, _YELLOW, _RED, _BOLD, _DIM = "\x1b[32m", "\x1b[33m", "\x1b[31m", "\x1b[1m", "\x1b[2m"


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """How lines are drawn.

    Attributes:
        trigger_ratio: where the bar is marked.
        unicode: whether the terminal can show blocks and arrows.
    """

    trigger_ratio: float
    color: bool
    unicode: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Compacted:
    """One compaction as the demo saw it; `announced` says whether the stream carried the notice."""

    round: int
    before_tokens: int
    after_tokens: int
    summary_calls: int
    announced: bool


def turn_line(look: Look, turn: int, used_tokens: int, window_tokens: int, what: str) -> str:
    """`turn`, from 1, and how full the window was after its answer."""
    ratio = used_tokens / window_tokens
    color = _RED if ratio > 0.95 else _YELLOW if ratio > look.trigger_ratio else _GREEN
    numbers = f"{used_tokens:>7,}/{window_tokens:,}"
    return f"turn {turn:>3}  {_painted(look, color, _bar(look, ratio))} {numbers} {ratio:>5.0%}  {what}"


def compaction_line(look: Look, compacted: Compacted) -> str:
    """One compaction: the prompt as it would have been, and as it was sent."""
    arrow, gear = ("→", "⚙") if look.unicode else ("->", "*")
    how = "without a model call"
    if compacted.summary_calls:
        how = f"{compacted.summary_calls} summary call{'s' if compacted.summary_calls > 1 else ''}"
    told = ", announced in the stream" if compacted.announced else ""
    text = (
        f"{gear} round {compacted.round}: {compacted.before_tokens:,} {arrow} {compacted.after_tokens:,} tokens "
        f"({how}{told})"
    )
    return f"          {_painted(look, _BOLD, text)}"


def restart_line(look: Look, number: int, used_tokens: int, prompt_tokens: int) -> str:
    """A running answer was carried over the limit: how full the window was, and with which prompt it went on."""
    arrow, gear = ("→", "⚙") if look.unicode else ("->", "*")
    text = f"{gear} restart {number} in mid-answer: {used_tokens:,} {arrow} {prompt_tokens:,} tokens"
    return f"          {_painted(look, _BOLD, text)}"


def truncation_line(look: Look, sent_tokens: int, kept_tokens: int) -> str:
    """The server cut a prompt."""
    text = f"! the server cut the prompt: {sent_tokens:,} tokens were sent, {kept_tokens:,} were seen"
    return f"          {_painted(look, _RED, text)}"


def legend(look: Look, window_tokens: int) -> str:
    """What the mark in the bar means."""
    mark = "│" if look.unicode else "|"
    trigger_tokens = round(look.trigger_ratio * window_tokens)
    text = f"{mark} marks {look.trigger_ratio:.0%} of the window ({trigger_tokens:,} tokens): "
    text += "prompt + room for the answer stay below it, or are compacted"
    return _painted(look, _DIM, text)


def _bar(look: Look, ratio: float) -> str:
    full, empty, mark = ("█", "░", "│") if look.unicode else ("#", ".", "|")
    filled = min(WIDTH, round(ratio * WIDTH))
    trigger = round(look.trigger_ratio * WIDTH)
    cells = full * filled + empty * (WIDTH - filled)
    return f"{cells[:trigger]}{mark}{cells[trigger:]}"


def _painted(look: Look, color: str, text: str) -> str:
    return f"{color}{text}{_RESET}" if look.color else text
