"""A request that is too long only by what our count may be wrong, and what a compaction made: the server is asked."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from litellm_compaction.core.messages import Message, Request
from litellm_compaction.engine import Attempts
from litellm_compaction.engine.parts import beginning_of
from litellm_compaction.errors import DoesNotFit
from litellm_compaction.tokens.counter import TokenCounter
from litellm_compaction.tokens.estimate import Estimate
from tests.builders import assistant, calls, parsed, prose, result, system, user
from tests.engine.bench import Bench
from tests.lmstudio_double.rendering import count

WINDOW = 4096


class Server:
    """Counts prompts by its own vocabulary; cuts what is longer than its window, as LM Studio may."""

    def __init__(self, factor: float = 0.8, *, says: bool = True) -> None:
        self.factor = factor
        self.says = says
        self.asked: list[int] = []
        self.answer_tokens: list[int] = []
        self.requests: list[Request] = []

    def tokens(self, messages: Sequence[Message]) -> int:
        return int(self.factor * (3 + sum(count(message.text) + 5 for message in messages)))

    async def __call__(self, request: Request, *, answer_tokens: int = 1) -> int | None:
        tokens = self.tokens(request.messages)
        self.asked.append(tokens)
        self.answer_tokens.append(answer_tokens)
        self.requests.append(request)
        return min(tokens, WINDOW) if self.says else None


def bench() -> Bench:
    return Bench(counter=TokenCounter())


def conversation(tokens: int) -> list[dict[str, object]]:
    """System prompt and one question, of so many of the server's unscaled tokens."""
    return [
        {"role": "system", "content": prose("rules", tokens // 2)},
        {"role": "user", "content": prose("question", tokens // 2)},
    ]


async def test_nothing_is_asked_twice() -> None:
    """Both hooks of a request, its retries, and the next request that begins alike go by what was told."""
    server, engine = Server(1.2), bench()
    for attempts in (one := Attempts(summary_calls_left=4), one, Attempts(summary_calls_left=4)):
        with pytest.raises(DoesNotFit):
            await engine.guard(conversation(3400), WINDOW, measure=server, attempts=attempts)
    told = [request.messages for request in server.requests]
    assert len(told) == len(set(map(str, told))) <= 3


@pytest.mark.parametrize(("messages", "ends"), [(6, "user"), (5, "tool"), (4, "user")])
def test_a_part_teaches_of_the_whole(messages: int, ends: str) -> None:
    """It ends as the whole does if that is with the person's word: before a tool's result templates leave out more."""
    talk = [system("Be brief."), user("a"), calls("123456789"), result("123456789", "b"), assistant("c"), user("d")]
    request = Request(messages=parsed(talk[:messages]))
    part = beginning_of(request, Estimate.exactly(1000 * messages, (1000,) * messages), 1000 * messages - 500)
    assert part is not None
    assert part.messages[-1].role == ends
