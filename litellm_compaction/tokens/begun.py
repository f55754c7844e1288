"""The prompt that ends inside an answer, so that a server which puts no template around it goes on with that."""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import datetime
from typing import NamedTuple

from litellm_compaction.core.messages import Message, user_message, with_text
from litellm_compaction.tokenizers.families import Family
from litellm_compaction.tokenizers.registry import vocabulary
from litellm_compaction.tokens.prompt import render

_THINK_START, _THINK_END = "<think>", "</think>"
_NEEDLE = "zq7"
# Names of control tokens in the families that are known here.
_CONTROL = re.compile(r"<\|[^<>\s]*\|?>|<\w+\|>|<｜[^<>\s]*｜>|</?(?:s|bos|eos|\w+_of_\w+|think)>|\[/?[A-Z_]{2,}\]")


class BegunPrompt(NamedTuple):
    """A prompt that ends inside an answer, and the template's end of that; "" if it names no token for it."""

    text: str
    end_of_turn: str


def begun_prompt(
    family: Family,
    messages: Sequence[Message],
    now: datetime,
    by_server: Sequence[str] = (),
    *,
    adds_bos: bool = True,
    closes: bool = False,
) -> BegunPrompt | None:
    """The prompt that ends with the last message, an answer that goes on; None if it cannot be known exactly.

    Servers put no template around it and take the names of control tokens in it for these tokens, as they do when they
    render the template themselves. So none may stand in a message's text.

    Args:
        messages: of a request without tools; the last one is an assistant's, of text.
        by_server: `needed_renderings` as the server writes them, for models without a template here, too.
        adds_bos: the server puts the token that begins every prompt before it, if the vocabulary has one.
        closes: the last message is the model's thoughts, and the prompt ends behind them.
    """
    has_control = vocabulary(family.vocabulary).has_control if family.owns_vocabulary else _CONTROL.search
    calls = (call for message in messages for call in message.calls)
    texts = [text for message in messages for text in (message.text, message.reasoning)]
    texts += [text for call in calls for text in (call.name, call.arguments)]
    if any(message.other_parts for message in messages) or any(map(has_control, texts)):
        return None
    renderings = by_server or _rendered_here(family, messages, now, adds_bos=adds_bos)
    prompt, written, closed = renderings or ("", "", "")
    begun = _begun(prompt, *written.rpartition(_NEEDLE)[:2], messages[-1].text, closes=closes)
    end = _CONTROL.match(closed.rpartition(_NEEDLE)[2].lstrip())
    return None if begun is None else BegunPrompt(f"{prompt}{begun}", end[0] if end else "")


def needed_renderings(messages: Sequence[Message]) -> tuple[tuple[Message, ...], ...]:
    """The messages up to the answer, with a text that is found again in its place, and with a turn after it.

    The last message may be one that the server goes on with, so that nothing shows its end.
    """
    written = (*messages[:-1], with_text(messages[-1], _NEEDLE))
    return tuple(messages[:-1]), written, (*written, user_message("."))


def _rendered_here(
    family: Family, messages: Sequence[Message], now: datetime, *, adds_bos: bool
) -> tuple[str, str, str] | None:
    if not (family.exact and family.template):
        return None
    before, written = (render(family, each, (), now) for each in needed_renderings(messages)[:2])
    if before is None or written is None or not before.is_faithful:
        return None
    bos = vocabulary(family.vocabulary).bos if adds_bos else ""
    return before.text.removeprefix(bos), written.text.removeprefix(bos), written.text


def _begun(prompt: str, written: str, needle: str, text: str, *, closes: bool) -> str | None:
    """The begun answer behind a prompt; None if the template does not show what stands before an answer.

    The prompt is `written` once more before an earlier answer, which is a needle, past the name of a channel (gpt-oss)
    or the thoughts (Qwen 3: an empty block). The text is of an answer, or of its thoughts if it `closes` them.
    """
    if not needle:
        return None
    if written.startswith(prompt):
        opening = written[len(prompt) :]
    elif prompt.rstrip().endswith(_THINK_START):
        # Thoughts that the prompt has begun and earlier answers go without (DeepSeek R1, QwQ) are over.
        opening = f"\n{_THINK_END}\n\n"
    else:
        return None
    if not closes:
        return f"{opening}{text if opening == opening.rstrip() else text.lstrip()}"
    # Into the empty block, whose start may stand in the prompt itself.
    start, end, behind = opening.partition(_THINK_END)
    if not end or start.strip() not in ("", _THINK_START):
        return None
    begun = f"{_THINK_START}\n" if start.strip() else ""
    return f"{begun}{text.strip()}\n{_THINK_END}{behind}"
