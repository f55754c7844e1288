"""The request that makes a model go on with an answer that was stopped at the limit.

The partial answer is the assistant's message, whose end stays verbatim; then comes a request of ours to go on, unless
the server goes on with that message itself.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from litellm_compaction.core.cuts import open_think
from litellm_compaction.core.messages import NO_ANSWER, Message, is_only_thoughts, parse_message, user_message

# How a server is made to go on, best first: by a prompt that we have rendered up to the end of the answer (`raw`), by
# the answer's end as the last message (`prefill`), by a request of ours in the user's place (`turn`).
Way: TypeAlias = Literal["raw", "prefill", "turn"]

GO_ON_START = "Your last message was cut off by the length limit."
_REQUEST = (
    f"{GO_ON_START} Continue it exactly where it stopped: the next characters after the last ones above. "
    "Do not repeat anything, do not comment, do not start over."
)
_REQUEST_JSON = (
    f"{GO_ON_START} Output only the missing rest of the same JSON document, beginning with the next characters "
    "after the last ones above. Do not repeat anything, do not start over, no code fence."
)
_THINK_TAGS = re.compile(r"(?i)</?think(?:ing)?>")
_WHILE_THINKING = "You were interrupted by the length limit while you were thinking."
_THINK_ON = (
    f"{_WHILE_THINKING} Your last thoughts are quoted below; do not start over. "
    "Finish thinking briefly, then answer.\n\n{thoughts}"
)
# After the thoughts: a model follows the last words.
_CLOSE_THINKING = (
    f"{_WHILE_THINKING} The end of your thoughts is quoted here.\n\n{{thoughts}}\n\n"
    "Do not think any further: answer now, with what you have.{switch}"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Partial:
    """A stopped answer so far; complete tool calls never belong to it."""

    text: str  # As the client has it.
    reasoning: str = ""  # Thinking that came in a field of its own.
    is_json: bool = False  # Structured output: nothing but the document may come.
    closes: bool = False  # The model is told to think no more; `is_thoughts` holds.

    @property
    def is_thoughts(self) -> bool:
        """Nothing but thinking has come."""
        return bool(self.text.strip() or self.reasoning.strip()) and is_only_thoughts(self.text)

    @property
    def is_quoted(self) -> bool:
        """Its thoughts are shown in place of its text."""
        return self.closes or not self.text.strip()

    @property
    def thoughts(self) -> str:
        """Of an answer that is nothing else."""
        return self.reasoning or _THINK_TAGS.sub("", self.text).strip()


def can_end_in_answer(messages: Sequence[Message], partial: Partial) -> bool:
    """Returns True if a server can go on with the answer itself: its own text, or thoughts that are closed (`raw`)."""
    is_answer = bool(messages) and messages[-1].role != "assistant"
    text = partial.thoughts if partial.closes else "" if open_think(partial.text) else partial.text
    return is_answer and bool(text.strip())


def continued_request(
    messages: Sequence[Message],
    partial: Partial,
    *,
    tail_tokens: int,
    count: Callable[[str], int],
    ends_in_answer: bool = False,
    switch: str = "",
) -> tuple[Message, ...]:
    """The conversation that was being answered, with the partial answer and the request to go on.

    So many tokens of the answer's end stay verbatim; an earlier part becomes a message of its own, which may be
    covered. One that `ends_in_answer` (`can_end_in_answer` holds) has no request, nor white space at the end, which
    most vocabularies join with the next word. `switch` is a word for the model itself to think no more; "" for none.
    """
    text = partial.thoughts if partial.is_quoted else partial.text
    text = text.rstrip() if ends_in_answer or partial.is_quoted else text
    shown = _last(text, tail_tokens, count)
    if not shown:
        return tuple(messages)
    head = "" if partial.is_quoted else text[: len(text) - len(shown)]
    opening = [_assistant(head), _ours("Go on.")] if head.strip() else []
    ending = (*messages, *opening, replace(_assistant(shown), is_synthetic=True))
    return ending if ends_in_answer else asked_to_go_on(ending, partial, switch)


def asked_to_go_on(messages: Sequence[Message], partial: Partial, switch: str = "") -> tuple[Message, ...]:
    """Adds the request to go on to a list of `continued_request`, perhaps compacted; it quotes thoughts."""
    *before, ending = messages
    if not partial.is_quoted:
        return (*before, replace(ending, is_synthetic=False), _ours(_REQUEST_JSON if partial.is_json else _REQUEST))
    asked = _CLOSE_THINKING if partial.closes else _THINK_ON
    words = asked.format(thoughts=ending.text, switch=switch and f" {switch}")
    return (*before, _assistant(NO_ANSWER), _ours(words))


def _last(text: str, limit_tokens: int, count: Callable[[str], int]) -> str:
    """The end of `text`, from a line or word start, in about `limit_tokens`."""
    tail = text
    while len(tail) > 1 and count(tail) > limit_tokens:
        tail = tail[len(tail) - len(tail) * 4 // 5 :]
    starts = (found + len(sign) for sign in ("\n\n", "\n", " ") if 0 <= (found := tail.find(sign)) < len(tail) // 2)
    return text if tail is text else tail[next(starts, 0) :]


def _assistant(text: str) -> Message:
    return parse_message({"role": "assistant", "content": text})


def _ours(text: str) -> Message:
    return replace(user_message(text), is_synthetic=True)
