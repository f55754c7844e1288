"""An upstream server in this process: it generates what a test scripts, in LM Studio's chunks, and keeps what it got.

Around a real `Compactor` whose pruning model is a function, so that `proxy/answer/loop.py` is tested without LiteLLM
and without a network.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

from litellm_compaction.core.go_on import Way
from litellm_compaction.core.messages import DONE_NOTICE, START_NOTICE, Message, Request, parse_message
from litellm_compaction.engine import (
    ALL_WAYS,
    Attempts,
    Compactor,
    PreparedRequest,
    PruningModel,
    RequestContext,
    Reservation,
)
from litellm_compaction.engine.context import SummaryAnswer, nothing
from litellm_compaction.events import Observer
from litellm_compaction.proxy.answer.calls import Calls
from litellm_compaction.proxy.answer.client import Asked, Notices
from litellm_compaction.proxy.answer.legs import Leg
from litellm_compaction.proxy.answer.loop import Answer
from litellm_compaction.proxy.answer.sse import Batch, Chunk, Received, UpstreamDropped, UpstreamError
from litellm_compaction.proxy.client import NONE
from litellm_compaction.proxy.exchange import Exchange
from litellm_compaction.proxy.standards.orders import Orders
from litellm_compaction.stores import open_store
from litellm_compaction.tokens.counter import TokenCounter
from litellm_compaction.windows.windows import Target, Windows
from tests.chunks import Chunked
from tests.constants import settings_of
from tests.lmstudio_double import Reply
from tests.lmstudio_double.generation import Envelope, pieces, reply_tokens, visible_reply
from tests.lmstudio_double.rendering import count

RESTARTED = f"\n\n{START_NOTICE}\n\n{DONE_NOTICE}\n\n"
IN_TEXT = Notices("content", "content", "content")
SUMMARY = "### Current state\nEverything that was decided so far is kept."
_SILENCE = Reply()
End = Literal["regular", "error", "drop", "empty", "hang"]


@dataclass(frozen=True, kw_only=True)
class Turn:
    """What the server does with one request.

    Attributes:
        reply: what the model says; a function gets the messages that were sent.
        end: how a stream ends that `after_tokens` cuts short; "regular" ends where the reply or the limit does.
        text: of the error.
        refusal: instead of an answer.
        usage: whether the stream reports it; a number is what is reported as generated.
        prompt_tokens: reported in place of the true count.
    """

    reply: Reply | Callable[[Sequence[Message]], Reply] = _SILENCE
    end: End = "regular"
    after_tokens: int = 0
    text: str = "generation failed"
    refusal: UpstreamError | None = None
    usage: bool | int = True
    prompt_tokens: int | None = None
    reasoning_field: Literal["reasoning_content", "reasoning", "think"] = "reasoning_content"


@dataclass(slots=True)
class Opened:
    """One request as the server got it."""

    messages: Sequence[Message] | None
    max_tokens: int
    goes_on: PreparedRequest | None
    prompt_tokens: int
    completion_tokens: int = 0
    is_open: bool = True

    @property
    def is_continuation(self) -> bool:
        return self.goes_on is not None


@dataclass
class Context:
    """A context that several answers fill, of a server that has generated all that it may as soon as it is asked.

    Nothing is ever outrun by it: what it holds at a time is all prompts and all bounds.
    """

    window_tokens: int
    used_tokens: int = 0
    most_tokens: int = 0
    opened_s: list[float] = field(default_factory=list)
    closed_s: list[float] = field(default_factory=list)

    def open(self, tokens: int) -> None:
        self.used_tokens += tokens
        self.most_tokens = max(self.most_tokens, self.used_tokens)
        self.opened_s.append(asyncio.get_running_loop().time())

    def close(self, tokens: int) -> None:
        self.used_tokens -= tokens
        self.closed_s.append(asyncio.get_running_loop().time())


@dataclass
class Server:
    """An `Upstream` that plays `turns` in order, the last one again and again; `together` chunks come at a time."""

    request: Request
    turns: Sequence[Turn]
    window_tokens: int = 2048
    chunk_tokens: int = 7
    tokens_per_second: float | None = None
    ways: frozenset[Way] = frozenset(ALL_WAYS)
    context: Context | None = None
    together: int = 1
    is_whole: bool = False
    opened: list[Opened] = field(default_factory=list)
    hanging: asyncio.Event = field(default_factory=asyncio.Event)
    begun: asyncio.Event = field(default_factory=asyncio.Event)

    @asynccontextmanager
    async def open(self, leg: Leg) -> AsyncIterator[AsyncIterator[Batch]]:
        """One answer."""
        messages, max_tokens = leg.prepared.messages, leg.max_tokens
        turn = self.turns[min(len(self.opened), len(self.turns) - 1)]
        read = self.request.messages if messages is None else messages
        # As the GPT family counts: four tokens a message, three for the reply.
        opened = Opened(
            messages, max_tokens, leg.prepared if leg.goes_on else None, 3 + sum(4 + count(each.text) for each in read)
        )
        self.opened.append(opened)
        if self.context is not None:
            self.context.open(opened.prompt_tokens + max_tokens)
        try:
            if turn.end == "hang" and turn.after_tokens == 0:
                await self._hang()
            if turn.refusal is not None:
                raise turn.refusal
            async with aclosing(self._generate(turn, opened, read, len(self.opened))) as chunks:
                yield _in_one(await _whole(chunks)) if self.is_whole else _as_received(chunks, self.together)
        finally:
            opened.is_open = False
            if self.context is not None:
                self.context.close(opened.prompt_tokens + max_tokens)

    async def _generate(
        self, turn: Turn, opened: Opened, messages: Sequence[Message], number: int
    ) -> AsyncGenerator[Chunk, None]:
        envelope = Envelope(id=f"chatcmpl-{number}", created_s=number, model="m", reasoning_field=turn.reasoning_field)
        reply = turn.reply if isinstance(turn.reply, Reply) else turn.reply(messages)
        reply = visible_reply(reply, (), turn.reasoning_field)
        room = self.window_tokens - opened.prompt_tokens
        stop = min(opened.max_tokens, room) if turn.end == "regular" else min(turn.after_tokens, room)
        role: dict[str, str] = {"role": "assistant"}
        coming = pieces(reply, self.chunk_tokens, stop, lambda: f"call{number:05d}")
        while (piece := next(coming, None)) is not None:
            opened.completion_tokens += piece.tokens
            if piece.kind != "hidden":
                yield envelope.chunk({**role, **envelope.delta(piece)})
                role = {}
                self.begun.set()
            await asyncio.sleep(piece.tokens / self.tokens_per_second if self.tokens_per_second else 0)
        if turn.end == "hang":
            await self._hang()
        if turn.end == "error":
            yield {"error": {"message": turn.text}, "message": turn.text}
            return
        if turn.end == "drop":
            raise UpstreamDropped("") from ConnectionResetError()
        if turn.end == "regular":
            ended = "tool_calls" if reply.tool_calls else "stop"
            whole = reply_tokens(reply) <= stop
            reason = (reply.finish_reason or ended) if whole else "length"
            yield envelope.chunk(role and {**role, "content": ""}, reason)
        if turn.usage is not False:
            generated = opened.completion_tokens if turn.usage is True else turn.usage
            usage = {"prompt_tokens": turn.prompt_tokens or opened.prompt_tokens, "completion_tokens": generated}
            usage |= {"total_tokens": sum(usage.values())}
            yield envelope.body("chat.completion.chunk", choices=[], usage=usage)

    async def _hang(self) -> None:
        self.hanging.set()
        await asyncio.Event().wait()


@dataclass
class Read(Chunked):
    """An answer as a client reads it."""

    chunks: list[Chunk] = field(default_factory=list)

    @property
    def text(self) -> str:
        """Without the notices of restarts."""
        return self.raw_text.replace(RESTARTED, "")

    def shape_problems(self) -> list[str]:
        """How the stream is not one answer; empty when it is (promise P6)."""
        found = []
        if len({chunk.get("id") for chunk in self.chunks}) != 1 or not self.chunks[0].get("id"):
            found.append("not one id")
        if [bool(delta.get("role")) for delta in self.deltas] != [True] + [False] * (len(self.deltas) - 1):
            found.append("not one role, or not first")
        if len(self.finish_reasons) != 1:
            found.append(f"finish reasons {self.finish_reasons}")
        if any("usage" in chunk for chunk in self.chunks[:-1]):
            found.append("a usage that is not last")
        return found


@dataclass
class Listening:
    """An `Exchange`, as far as the loop that carries an answer tells it and asks it."""

    may_pause: bool = False
    late_receipt: Mapping[str, str] = field(default_factory=dict)
    actions: list[str] = field(default_factory=list)
    details: Mapping[str, Any] = field(default_factory=dict)

    def sent(self, prepared: PreparedRequest) -> None:
        self.actions.append(prepared.action)

    @property
    def has_filled(self) -> bool:
        return bool(self.details) and self.details["outcome"] != "completed"


async def summarized(messages: Sequence[Message], *, max_tokens: int, **with_tools: Any) -> SummaryAnswer:
    return SummaryAnswer(text=SUMMARY)


@dataclass
class WallClock:
    """Seconds since 1970, as a test has them."""

    now_s: float = 1.8e9

    def __call__(self) -> float:
        return self.now_s


@dataclass
class Scene:
    """One client request with all that answers it."""

    messages: Sequence[dict[str, Any]]
    turns: Sequence[Turn]
    window_tokens: int = 2048
    chunk_tokens: int = 7
    tokens_per_second: float | None = None
    output_tokens: int | None = None
    is_json: bool = False
    is_whole: bool = False
    stops: tuple[str, ...] = ()
    thoughts_tokens: float | None = None
    notices: Notices = IN_TEXT
    settings: dict[str, Any] = field(default_factory=dict)
    ask: Callable[..., Awaitable[SummaryAnswer]] = summarized
    is_lmstudio: bool = False

    def __post_init__(self) -> None:
        self.request = Request(messages=tuple(parse_message(message) for message in self.messages))
        self.server = Server(self.request, self.turns, self.window_tokens, self.chunk_tokens, self.tokens_per_second)
        self.server.is_whole = self.is_whole
        self.listener = Listening()
        self.counter = TokenCounter()
        self.clock = WallClock()
        self.compactor = self.compactor_told()
        target = Target(
            key="k",
            model="gpt-4o",
            api_base=None,
            api_key=None,
            context_length=self.window_tokens,
            is_lmstudio=self.is_lmstudio,
        )
        same = PruningModel(label="m", target=target, ask=self.ask, is_same=True)
        settings = settings_of(**self.settings)
        self.context = RequestContext(
            label="m",
            target=target,
            settings=settings,
            scope="s",
            pruning_models=(same,),
            warm_up=nothing,
            attempts=Attempts(summary_calls_left=settings.constants.max_summary_calls),
        )

    def compactor_told(self, *observers: Observer) -> Compactor:
        """A compactor without a past, with observers."""
        return Compactor(
            windows=Windows(cache_s=5),
            counter=self.counter,
            store=open_store("memory://", ttl_s=60, max_bytes=1 << 20),
            observers=observers,
            wall_clock=self.clock,
        )

    async def prepared(self) -> PreparedRequest:
        """What is sent for the request."""
        return await self.compactor.guard(self.request, self.context)

    async def answer(self, room: Reservation | None = None) -> Answer:
        """The answer, prepared as the intake does; `room` is its place beside others."""
        asked = Asked(
            request=self.request,
            output_tokens=self.output_tokens,
            is_json=self.is_json,
            notices=self.notices,
            wants_usage=True,
            stops=self.stops,
            thoughts_tokens=self.thoughts_tokens,
            is_whole=self.is_whole,
        )
        prepared = await self.compactor.prepare(self.request, self.context)
        return Answer(
            self.compactor,
            self.context,
            self.server,
            asked,
            prepared,
            self.listener,
            room or self.compactor.room(self.context),
        )

    async def read(self, room: Reservation | None = None) -> Read:
        """The whole answer; at its end nothing is open upstream."""
        read = Read()
        try:
            async for chunk in chunks_of(await self.answer(room)):
                assert sum(opened.is_open for opened in self.server.opened) <= 1
                read.chunks.append(json.loads(json.dumps(chunk)))
        finally:
            assert not any(opened.is_open for opened in self.server.opened)
        return read


async def chunks_of(answer: Answer) -> AsyncGenerator[Chunk, None]:
    """An answer's chunks one by one."""
    async with aclosing(answer.batches()) as batches:
        async for batch in batches:
            assert batch, "a batch of nothing"
            for chunk in batch:
                yield chunk


async def _whole(chunks: AsyncIterator[Chunk]) -> Chunk:
    """A server's whole answer, in the shape of a chunk; an error in place of it."""
    answer: Chunk = {}
    delta: dict[str, Any] = {}
    calls = Calls()
    async for chunk in chunks:
        if "error" in chunk:
            return chunk
        answer |= {key: value for key, value in chunk.items() if key != "choices"}
        for choice in chunk["choices"]:
            answer["choices"] = [{**choice, "delta": delta}]
            for key, value in choice["delta"].items():
                if key == "tool_calls":
                    calls.take(value, may_begin=False)
                else:
                    delta[key] = delta.get(key, "") + value
    if calls:
        delta["tool_calls"] = calls.given_up("all")
    return answer


async def _in_one(chunk: Chunk) -> AsyncIterator[Batch]:
    yield [chunk]


async def _as_received(chunks: AsyncIterator[Chunk], together: int) -> AsyncIterator[Batch]:
    """Chunks as the carriers give them, some at a time: what needs no change goes on as it came."""
    batch: list[Chunk] = []
    broken: UpstreamError | None = None
    try:
        async for chunk in chunks:
            batch.append(Received(chunk))
            if len(batch) >= together:
                yield batch
                batch = []
    except UpstreamError as error:
        broken = error
    if batch:
        yield batch
    if broken is not None:
        raise broken


def exchange_of(*messages: dict[str, Any], **known: Any) -> Exchange:
    """A client's request for which nothing has been done; `known` is said of it beside its messages."""
    request, no = Request(messages=tuple(map(parse_message, messages))), False
    fields = {"opted_out": no, "wish": NONE, "bad_wish": None, "is_client_summary": no, "is_beside": no, "bases": ()}
    fields |= {"group": "served", "tenant": "", "is_chat": no, "orders": Orders(), **known}
    return Exchange(received=request, original=request, attempts=Attempts(summary_calls_left=1), **fields)


def goes_on(text: str, **reply: Any) -> Callable[[Sequence[Message]], Reply]:
    """A model that says `text`, and told to go on says what follows the end of its last message.

    Its text is made of words that stand in it once, so that the place is found.
    """

    def say(messages: Sequence[Message]) -> Reply:
        last = messages[-2] if messages[-1].asks_to_go_on else messages[-1]
        if last.role != "assistant":
            return Reply(text, **reply)
        tail = last.text[-40:]
        assert text.count(tail) == 1, f"the partial answer does not end like the answer: {tail!r}"
        return Reply(text[text.index(tail) + len(tail) :], **reply)

    return say
