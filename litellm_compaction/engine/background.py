"""What is written while nobody waits: the record that a conversation's next compaction will need.

`proxy/answer/loop.py` tells of every answer that has ended, `compactor.py` of every request that comes. Behind an
answer that leaves a conversation near its trigger, and once its server has been idle for a moment, the summary is asked
for behind the very conversation that the server's cache holds, and stored as a compaction that takes effect when the
trigger comes (`core/plan.py`, `plan_ahead`). Where that is to be expected of the next turn, the server is made to read
the compacted conversation, too, and the turn is sent with it (`plan_reading`). Whoever comes meanwhile has the engine
at once: the call is ended.

It costs no user's time, but electricity, and its owner's money where calls are paid for. So it is bounded: one call at
a time for each server, and some in an hour for each tenant and model.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from litellm_compaction.concurrency import Bounded, ended
from litellm_compaction.core.compaction import Compaction
from litellm_compaction.core.conversation import applied_tokens
from litellm_compaction.core.messages import Request, user_message
from litellm_compaction.core.plan import (
    MIN_GAIN_RATIO,
    Edit,
    Reading,
    Reuse,
    Summarize,
    plan_ahead,
    plan_reading,
    turn_ended,
)
from litellm_compaction.engine.admission import Admission
from litellm_compaction.engine.build import BuiltCompaction, CompactionBuilder
from litellm_compaction.engine.context import (
    Attempts,
    MeasuredRequest,
    PreparedRequest,
    RequestContext,
    nothing,
)
from litellm_compaction.engine.measure import Outgoing, RequestMeasurer, hashed
from litellm_compaction.engine.reporting import Reporter
from litellm_compaction.engine.reservation import Reservation, server_of
from litellm_compaction.engine.threads import is_long, off_loop_if
from litellm_compaction.errors import CompactionError
from litellm_compaction.stores import Store

logger = logging.getLogger("litellm_compaction")
_Found = TypeVar("_Found")

# An agent is back with its tool results before that; a person reads for longer.
QUIET_S = 1.0
# Where requests keep coming into what was begun, a call waits for the double; up to so many doublings.
_MAX_DOUBLINGS = 6
MOST_PER_HOUR = 20
_HOUR_S = 3600.0
# To close a stream takes milliseconds; it only bounds a hang.
_CLOSING_S = 1.0
_MAX_SERVERS, _MAX_OWNERS = 64, 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class _Answered:
    """A conversation whose answer has just ended."""

    request: Request
    case: RequestContext
    answer: str


@dataclass(slots=True, kw_only=True)
class _Writing:
    """A record that is being written.

    Attributes:
        is_ended: whether a request that came has ended it.
    """

    task: asyncio.Task[None]
    is_ended: bool = False


@dataclass(slots=True)
class _Server:
    """One server: who could be written for, and what is under way.

    Attributes:
        answered: the conversation that its cache holds, for as long as nobody else has come.
        task: waits for quiet, then writes.
        writing: of this server's task, or of another's that asks a model of this one.
    """

    answered: _Answered | None = None
    task: asyncio.Task[None] | None = None
    writing: _Writing | None = None


@dataclass(slots=True)
class _Owner:
    """What came of the records of one tenant's conversations with one model.

    Attributes:
        begun_s: when calls were begun in the last hour, oldest first.
        ended: how many in a row were ended by requests that came.
    """

    begun_s: deque[float] = field(default_factory=deque)
    ended: int = 0

    def may_begin(self, now_s: float) -> bool:
        """Whether another one may be written now."""
        while self.begun_s and now_s - self.begun_s[0] >= _HOUR_S:
            self.begun_s.popleft()
        return len(self.begun_s) < MOST_PER_HOUR


class Background:
    """Writes records ahead.

    Args:
        builder: makes them.
        measurer: weighs conversations.
        outgoing: makes what is sent.
        admission: knows who else uses a server, and tells of those who come.
        store: keeps them.
        reporter: tells of them.
        clock: seconds, monotonic.
        quiet_s: for how long a server has been idle before it is asked.
    """

    def __init__(
        self,
        *,
        builder: CompactionBuilder,
        measurer: RequestMeasurer,
        outgoing: Outgoing,
        admission: Admission,
        store: Store,
        reporter: Reporter,
        clock: Callable[[], float],
        quiet_s: float = QUIET_S,
    ) -> None:
        self._builder = builder
        self._measurer = measurer
        self._outgoing = outgoing
        self._admission = admission
        self._store = store
        self._reporter = reporter
        self._clock = clock
        self._quiet_s = quiet_s
        self._servers: dict[str, _Server] = {}
        self._owners: Bounded[str, _Owner] = Bounded(_MAX_OWNERS)
        self._tasks: set[asyncio.Task[None]] = set()
        admission.make_way = self.make_way

    def answered(
        self, request: Request, case: RequestContext, guarded: PreparedRequest, *, answer: str, used_tokens: int
    ) -> None:
        """Takes note of an answer that has ended; begins nothing before its server has been idle for a moment.

        Args:
            request: the conversation, as the client sent it.
            case: of the request.
            guarded: what was sent.
            answer: its text; "" where the model has called tools.
            used_tokens: of the window, with the answer.
        """
        if case.may_write_ahead is None or case.settings.background == "off" or not case.settings.max_summary_calls:
            return
        server = self._server(server_of(case))
        if server is None:
            return
        ends_in_answer = request.messages[-1:] and request.messages[-1].role == "assistant"
        if not guarded.budget.is_filling(used_tokens) or ends_in_answer or request.has_own_template:
            return
        answered = server.answered = _Answered(request=request, case=case, answer=answer)
        if server.writing is None:
            if server.task is not None:
                server.task.cancel()
            server.task = self._begin(self._when_quiet(server, answered))

    async def make_way(self, name: str) -> None:
        """Leaves a server to a request that comes: returns when the call to it is closed.

        Args:
            name: of `server_of`.
        """
        server = self._servers.get(name)
        if server is None:
            return
        # Its cache will hold another conversation; the end of an answer to this one begins the wait anew.
        server.answered = None
        writing = server.writing
        if writing is None:
            if server.task is not None:
                server.task.cancel()
                server.task = None
            return
        if not writing.task.done():
            writing.is_ended = True
            writing.task.cancel()
            await asyncio.wait({writing.task}, timeout=_CLOSING_S)

    async def aclose(self) -> None:
        """Ends what is under way."""
        await ended(self._tasks)

    def _server(self, name: str) -> _Server | None:
        found = self._servers.get(name)
        if found is None and len(self._servers) < _MAX_SERVERS:
            found = self._servers[name] = _Server()
        return found

    def _begin(self, work: Awaitable[None]) -> asyncio.Task[None]:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _when_quiet(self, server: _Server, answered: _Answered) -> None:
        """Writes for a conversation whose server stays idle for a moment."""
        task = asyncio.current_task()
        owner = self._owners.setdefault(answered.case.scope, _Owner())
        try:
            await asyncio.sleep(self._quiet_s * 2 ** min(owner.ended, _MAX_DOUBLINGS))
            if server.answered is answered and task is not None:
                server.answered = None
                await self._write(answered, owner, _Writing(task=task))
        except asyncio.CancelledError:
            raise
        except CompactionError as error:
            logger.debug("background reason=%s", type(error).__name__)
        except Exception as error:  # noqa: BLE001 - nobody waits for it, and nobody must suffer by it (P8)
            logger.warning("background error=%s; the record is written when it is needed", type(error).__name__)
        finally:
            if server.task is task:
                server.task = None

    async def _write(self, asked: _Answered, owner: _Owner, writing: _Writing) -> None:
        case = asked.case
        names = {server_of(case), *(str(model.target.api_base) for model in case.pruning_models)}
        servers = [server for name in names if (server := self._server(name)) is not None]
        if not all(map(self._admission.is_idle, names)) or any(server.writing for server in servers):
            return
        for server in servers:
            server.writing = writing
        try:
            await self._write_alone(asked, owner, writing)
        finally:
            for server in servers:
                server.writing = None

    async def _write_alone(self, asked: _Answered, owner: _Owner, writing: _Writing) -> None:
        # Nothing is loaded for it, and no server asked for a count.
        attempts = Attempts(summary_calls_left=1)
        case = replace(asked.case, now=False, focus="", measure=None, warm_up=nothing, attempts=attempts)
        request = replace(asked.request, messages=turn_ended(asked.request.messages, asked.answer))
        work = await hashed(await self._measurer.weigh(request, case))
        if case.has_siblings and not Reservation(self._admission, case).is_shared(work.window):
            return
        if await self._measurer.is_busy_elsewhere(case):
            # Somebody uses the model without this proxy, such as in LM Studio's own window.
            return
        stored = await self._store.find(case.scope, work.conversation.hashes[1:])
        written = await self._record_ahead(work, stored, owner, writing)
        known = stored if written is None else [written, *stored]
        reading = await self._off_loop(work, lambda: _to_read(work, known))
        if reading is None:
            return
        compaction = await self._compaction_of(work, reading.decision, owner)
        if compaction is not None:
            await self._read(work, compaction)

    async def _record_ahead(
        self, work: MeasuredRequest, stored: Sequence[Compaction], owner: _Owner, writing: _Writing
    ) -> Compaction | None:
        """A record that a model writes now and that is stored; None where none is to be, or none came of it."""
        decision = await self._off_loop(work, lambda: _planned_ahead(work, stored))
        if decision is None or not await self._may_begin(work, owner):
            return None
        try:
            made = await self._made(work, decision)
        except asyncio.CancelledError:
            if writing.is_ended:
                owner.ended += 1
                self._reporter.decided(work, "given_up", after=work.count.tokens, reason="arrived")
            raise
        owner.ended = 0
        if not made.effort.calls:
            # No model could be asked in a way that leaves the conversation in the cache.
            owner.begun_s.pop()
            return None
        return made.kept if await self._keep(work, decision.base, made) else None

    async def _compaction_of(self, work: MeasuredRequest, decision: Reuse | Edit, owner: _Owner) -> Compaction | None:
        """What the next turn is sent with: a record that is there, or an edit that is made now; None for nothing.

        A record was counted when it was begun, and is read once.
        """
        if isinstance(decision, Reuse):
            return decision.compaction if await _is_allowed(work) else None
        if not await self._may_begin(work, owner):
            return None
        made = await self._builder.make(work, decision)
        made = made._replace(kept=replace(made.kept, ahead=True))
        return made.kept if await self._keep(work, None, made) else None

    async def _off_loop(self, work: MeasuredRequest, look: Callable[[], _Found]) -> _Found:
        return await off_loop_if(is_long(work.request.messages), look)

    async def _may_begin(self, work: MeasuredRequest, owner: _Owner) -> bool:
        """Whether a model may be called once more; takes note that it is."""
        if not owner.may_begin(self._clock()) or not await _is_allowed(work):
            return False
        owner.begun_s.append(self._clock())
        return True

    async def _read(self, work: MeasuredRequest, compaction: Compaction) -> None:
        """Has the server read what the next turn begins with: what its cache holds will not be sent any more.

        That is made certain before the server begins: from then on its cache has lost the chat, however soon somebody
        comes.
        """
        model = next((model for model in work.case.pruning_models if model.is_same), None)
        guarded = await self._outgoing.applied(work, compaction, "reused")
        sent = guarded.messages or ()
        if sent[-1:] and sent[-1].role == "assistant":
            # Where the results of a call will stand.
            sent = sent[:-1]
        elif sent and not sent[-1].text:
            sent = (*sent[:-1], user_message("."))
        room = Reservation(self._admission, work.case)
        if model is None:
            return
        try:
            async with room.for_summary(work.window, guarded.count.tokens):
                await self._store.put(work.case.scope, replace(compaction, ahead=False, early=True))
                room.started()
                request = work.request
                await model.ask(sent, max_tokens=1, tools=request.tools, tool_choice=request.tool_choice)
                room.ended()
        finally:
            room.leave()

    async def _made(self, work: MeasuredRequest, decision: Summarize) -> BuiltCompaction:
        """The record, by a call that has room of its own beside answers."""
        room = Reservation(self._admission, work.case)
        try:
            async with room.for_summary(work.window, work.count.tokens):
                room.started()
                made = await self._builder.make(work, decision)
                room.ended()
        finally:
            room.leave()
        return made

    async def _keep(self, work: MeasuredRequest, base: Compaction | None, made: BuiltCompaction) -> bool:
        """Whether a record is worth it, and is stored; never in place of one that is applied."""
        compaction = made.kept
        after_tokens = applied_tokens(work.conversation, compaction)
        is_summary = compaction.rung != "truncate"
        if not is_summary or after_tokens > work.count.tokens * (1 - MIN_GAIN_RATIO):
            made.effort.reason = made.effort.reason or "no_gain"
            self._reporter.decided(work, "given_up", after=work.count.tokens, effort=made.effort)
            return False
        if await self._store.find(work.case.scope, [compaction.covered_hash]):
            return False
        await self._store.put(work.case.scope, compaction)
        self._reporter.decided(
            work, "prepared", after=after_tokens, compaction=compaction, effort=made.effort, base=base
        )
        return True


async def _is_allowed(work: MeasuredRequest) -> bool:
    may_write_ahead = work.case.may_write_ahead
    return may_write_ahead is not None and await may_write_ahead()


def _planned_ahead(work: MeasuredRequest, stored: Sequence[Compaction]) -> Summarize | None:
    is_same = any(model.is_same for model in work.case.pruning_models)
    if work.rereads and is_same and not work.budget.own.triggers(work.count.tokens):
        # Behind the instruction the server cannot go back to the conversation: it would read all of the next turn.
        return None
    return plan_ahead(work.conversation, work.budget, work.depth, stored)


def _to_read(work: MeasuredRequest, stored: Sequence[Compaction]) -> Reading | None:
    if not any(model.is_same for model in work.case.pruning_models):
        return None
    reading = plan_reading(work.conversation, work.budget, work.depth, stored)
    if reading is not None and work.rereads and not reading.is_certain:
        # Behind what it was made to read the server cannot go on with another ending: it would read all of it again.
        return None
    return reading
