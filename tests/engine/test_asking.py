"""A request that is too long only by what our count may be wrong, and what a compaction made: the server is asked."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest

from litellm_compaction.core.messages import Message, Request, system_prefix_length
from litellm_compaction.engine import Attempts
from litellm_compaction.errors import DoesNotFit
from litellm_compaction.tokens.counter import TokenCounter
from tests.builders import parsed, prose
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


def turns(name: str, tokens: int) -> list[dict[str, object]]:
    """Eight short turns, of so many of the server's unscaled tokens together."""
    talk = [{"role": ("user", "assistant")[at % 2], "content": prose(f"{name} {at}", tokens // 9)} for at in range(9)]
    return [{"role": "system", "content": "Rules."}, *talk]


@pytest.mark.parametrize("model", ["llama-3.1-8b", "nobody-knows"])
async def test_a_first_prompt_that_may_be_cut_is_asked_about(model: str) -> None:
    """By our count it fills 60 % of the window, by the server's all of it; one number alone is not believed."""
    server, engine = Server(1.9), bench()
    target = engine.target(WINDOW, model=model)
    for name, most_questions in (("one", 3), ("two", 1)):
        asked = len(server.asked)
        talk = turns(name, WINDOW * 11 // 20)
        prepared = await engine.guard(talk, WINDOW, target=target, measure=server)
        assert server.tokens(prepared.messages or parsed(talk)) + prepared.max_output_tokens(None) <= WINDOW
        assert len(server.asked) - asked <= most_questions
    assert server.asked
    assert max(server.asked) <= WINDOW


async def test_a_question_takes_room_in_a_shared_context() -> None:
    """Beside a running answer that fills the context it is not asked: it would end both."""
    server, engine = Server(), bench()
    talk = conversation(1900)
    busy = engine.compactor.room(engine.context(WINDOW, admission="pool", admission_timeout_s=0.1))
    running = await engine.guard([{"role": "user", "content": "hello"}], WINDOW, admission="pool")
    await busy.acquire(running, WINDOW - 200, is_watched=False)
    await engine.guard(talk, WINDOW, measure=server, asked_tokens=2000, admission="pool", admission_timeout_s=0.1)
    assert server.asked == []
    busy.release()


class Template(Server):
    """A server whose template leaves something out, and which reports what it says it does."""

    def __init__(self, *, leaves_out: str, cached: bool = False) -> None:
        super().__init__(1.0)
        self.leaves_out = leaves_out
        self.cached = cached

    async def __call__(self, request: Request, *, answer_tokens: int = 1) -> int | None:
        messages = list(request.messages)
        if self.leaves_out == "lead" and messages[-1].role != "user":
            messages = messages[system_prefix_length(messages) :]
        elif self.leaves_out == "rounds":
            messages = [message for message in messages if not message.calls and message.role != "tool"]
        tokens = self.tokens(messages)
        tools_tokens = count(json.dumps(request.tools)) if self.leaves_out != "tools" and request.tools else 0
        self.asked.append(tokens + tools_tokens)
        told = tokens + tools_tokens
        if self.cached:
            known = max((_common(messages, list(other.messages)) for other in self.requests), default=0)
            told = self.tokens(messages[known:]) if known < len(messages) else 1
        self.requests.append(request)
        return told


def _common(one: list[Message], other: list[Message]) -> int:
    """How many messages two prompts begin with alike."""
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def one_round(rules_tokens: int, result_tokens: int) -> list[dict[str, object]]:
    """A question and its first tool round, none of which can be compacted."""
    call = {"id": "call00001", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    return [
        {"role": "system", "content": prose("rules", rules_tokens)},
        {"role": "user", "content": prose("question", 300)},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call00001", "content": prose("found", result_tokens)},
    ]


LOOK = {"type": "function", "function": {"name": "look", "description": prose("look", 700), "parameters": {}}}


@pytest.mark.parametrize(
    ("leaves_out", "talk", "tools"),
    [
        # Mistral Nemo's and v3's templates render system messages with the user's last word only.
        ("lead", one_round(1600, 1900), ()),
        # All that is known of each text adds up to more than the window.
        ("rounds", one_round(400, 3300), ()),
        ("tools", one_round(1000, 1700), (LOOK,)),
    ],
)
async def test_what_a_template_leaves_out_refuses_nothing(
    leaves_out: str, talk: list[dict[str, object]], tools: Sequence[dict[str, object]]
) -> None:
    """The server shows it in a prompt that is a little shorter where all of it might be too long; nothing is cut."""
    server = Template(leaves_out=leaves_out)
    prepared = await bench().guard(talk, WINDOW, measure=server, tools=tools)
    assert prepared.messages is None
    assert all(asked < WINDOW for asked in server.asked)
    assert len(server.asked) <= 8
    assert prepared.count.high + prepared.max_output_tokens(None) <= WINDOW
