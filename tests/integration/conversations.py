"""Texts of known length: conversations, tools and tool rounds that tests send.

The same topic gives the same words, another topic shares no message with it.
"""

from __future__ import annotations

import itertools
import json
import random
import re
from typing import Any

from litellm_compaction.simulator.vocabulary import count

JsonDict = dict[str, Any]

# Fills a window of 8192 tokens so far that it is compacted however well calibrated, by one summary call.
ONE_ROUND = 6350

# One token each in the usual vocabularies, with the space before it.
_WORDS = tuple(
    re.findall(
        r"\w+",
        "time year people way day man thing woman life child world school state family student group country problem "
        "hand part place case week company system program question work government number night point home water room "
        "mother area money story fact month lot right study book eye job word business issue side kind head house",
    )
)


def prose(topic: str, words: int) -> str:
    """`words` plain words, about as many tokens, in lines of twenty."""
    source = random.Random(topic)
    chosen = [source.choice(_WORDS) for _ in range(words)]
    return "\n".join(" ".join(chosen[start : start + 20]) for start in range(0, words, 20))


def talk(topic: str, tokens: int, *, system: str = "You help with a task.", words: int = 120) -> list[JsonDict]:
    """A conversation of `tokens` tokens, or up to one turn less, that ends with a short request of the user."""
    messages = [{"role": "system", "content": system}, {"role": "user", "content": f"Let us work on {topic}."}]
    used = sum(_size(message) for message in messages)
    for turn in itertools.count():
        answer = {"role": "assistant", "content": f"Step {turn} of {topic}:\n{prose(f'{topic}/{turn}', words)}"}
        request = {"role": "user", "content": f"Go on with step {turn + 1} of {topic}."}
        used += _size(answer) + _size(request)
        if used > tokens and turn:
            break
        messages += [answer, request]
    return messages


def _size(message: JsonDict) -> int:
    # What the simulator's template puts around a message, and its vocabulary.
    return count(message["content"]) + 5


def answered(messages: list[JsonDict], answer: str, then: str) -> list[JsonDict]:
    """The same conversation one turn later."""
    return [*messages, {"role": "assistant", "content": answer}, {"role": "user", "content": then}]


def tools(count: int, words: int = 30) -> list[JsonDict]:
    """`count` schemas of about 60 + `words` tokens each."""
    return [
        {
            "type": "function",
            "function": {
                "name": f"tool_{number}",
                "description": prose(f"tool {number}", words),
                "parameters": {
                    "type": "object",
                    "properties": {"path": {"type": "string"}, "limit": {"type": "integer"}},
                    "required": ["path"],
                },
            },
        }
        for number in range(count)
    ]


def tool_round(name: str, result: str, call_id: str = "123456789") -> list[JsonDict]:
    """An assistant's call and its result."""
    call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": json.dumps({"path": "a.txt"})}}
    return [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call_id, "content": result},
    ]
