"""Writes the record that a conversation's next compaction will need, while no client waits.

`proxy/answer/loop.py` tells of every answer that has ended, `compactor.py` of every request that comes. After an answer
that leaves a conversation near its trigger, and once its server has been idle for a moment, the summary is asked for
after the very conversation that the server's cache holds, and stored as a compaction that takes effect at the trigger
(`core/plan.py`, `plan_ahead`). If the next turn is expected to cross it, the server is made to read the compacted
conversation, too (`plan_reading`). A request that comes meanwhile has the engine at once: the call is ended.

It costs no user's time, but electricity, and its owner's money if calls are paid for. So there is one call at a time
for each server, and some in an hour for each tenant and model.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

from litellm_compaction.concurrency import Bounded, Tasks, ended, off_loop_if
from litellm_compaction.core.compaction import Compaction, applied_tokens
from litellm_compaction.core.messages import Request, user_message
from litellm_compaction.core.plan import Reuse, plan_ahead, plan_reading, turn_ended
from litellm_compaction.core.steps import Step, gains
from litellm_compaction.engine.build import BuiltCompaction, CompactionBuilder
from litellm_compaction.engine.context import (
    Attempts,
    MeasuredRequest,
    PreparedRequest,
    PruningModel,
    RequestContext,
    nothing,
)
from litellm_compaction.engine.measure import RequestMeasurer, hashed
from litellm_compaction.engine.pins import Pins
from litellm_compaction.engine.reporting import Reporter
from litellm_compaction.engine.sharing.admission import Admission
from litellm_compaction.engine.sharing.reservation import Reservation, server_of
from litellm_compaction.errors import CompactionError
from litellm_compaction.stores import CompactionStore
from litellm_compaction.windows.windows import Windows

logger = logging.getLogger("litellm_compaction")

# An agent is back with its tool results before that; a person reads for longer.
QUIET_S = 1.0
MOST_PER_HOUR = 20
_HOUR_S = 3600.0
# To close a stream takes milliseconds; it only bounds a hang.
_CLOSING_S = 1.0
_MAX_OWNERS = 4096


class Background:
    """Writes records ahead; `quiet_s` is for how long a server has been idle before it is asked."""

    def __init__(
        self,
        *,
        builder: CompactionBuilder,
        measurer: RequestMeasurer,
        windows: Windows,
        admission: Admission,
        store: CompactionStore,
        pins: Pins,
        reporter: Reporter,
        clock: Callable[[], float],
        quiet_s: float = QUIET_S,
    ) -> None:
        self._builder = builder
        self._measurer = measurer
        self._windows = windows
        self._admission = admission
        self._store = store
        self._pins = pins
        self._reporter = reporter
        self._clock = clock
        self._quiet_s = quiet_s
        # By server: who waits for its quiet, and who has it write, or a model of it for another server's conversation.
        self._waiting: dict[str, asyncio.Task[None]] = {}
        self._writing: dict[str, asyncio.Task[Any] | None] = {}
        # By server: the conversation that its cache held last, for which something may still be written.
        self._next: dict[str, tuple[Request, RequestContext, str]] = {}
        self._tasks = Tasks()
        self._is_closing = False
        # When calls were begun for a tenant's conversations with one model, oldest first.
        self._begun_s: Bounded[str, deque[float]] = Bounded(_MAX_OWNERS)
        admission.make_way = self.make_way

    def answered(
        self, request: Request, context: RequestContext, prepared: PreparedRequest, *, answer: str, used_tokens: int
    ) -> None:
        """Takes note of an answer that has ended; begins nothing before its server has been idle for a moment.

        Args:
            request: the conversation, as the client sent it.
            answer: its text; "" if the model has called tools.
            used_tokens: of the window, with the answer.
        """
        name = server_of(context)
        if context.is_beside:
            self._begin(name)
            return
        if (
            context.may_write_ahead is None
            or context.settings.background == "off"
            or not context.settings.constants.max_summary_calls
        ):
            return
        ends_in_answer = request.messages[-1:] and request.messages[-1].role == "assistant"
        if not prepared.budget.is_filling(used_tokens) or ends_in_answer or request.has_own_template:
            return
        if name not in self._writing:
            self._next[name] = request, context, answer
            self._begin(name)

    def _begin(self, name: str) -> None:
        if name in self._writing or name not in self._next:
            return
        if (before := self._waiting.get(name)) is not None:
            before.cancel()
        self._waiting[name] = self._tasks.begin(self._when_quiet(name, *self._next[name]))

    async def make_way(self, name: str, *, is_beside: bool = False) -> None:
        """Leaves a server, by its name of `server_of`, to a request that comes: returns when the call is closed.

        The end of an answer begins the wait anew: of one beside a conversation, for that conversation.
        """
        if not is_beside:
            # The cache will hold another one.
            self._next.pop(name, None)
        if (waiting := self._waiting.pop(name, None)) is not None:
            waiting.cancel()
        writing = self._writing.get(name)
        if writing is not None and not writing.done():
            writing.cancel()
            await asyncio.wait({writing}, timeout=_CLOSING_S)

    async def aclose(self) -> None:
        self._is_closing = True
        await ended(self._tasks)

    async def _when_quiet(self, name: str, request: Request, context: RequestContext, answer: str) -> None:
        task = asyncio.current_task()
        names = {name, *(str(model.target.api_base) for model in context.pruning_models)}
        try:
            await asyncio.sleep(self._quiet_s)
            if not all(map(self._admission.is_idle, names)) or not names.isdisjoint(self._writing):
                return
            self._writing |= dict.fromkeys(names, task)
            self._waiting.pop(name, None)
            await self._write(request, context, answer)
            self._next.pop(name, None)
        except CompactionError as error:
            logger.debug("background reason=%s", type(error).__name__)
        except Exception as error:  # noqa: BLE001 - no request waits for it, and none must suffer by it (P8)
            logger.warning("background error=%s; the record is written when it is needed", type(error).__name__)
        finally:
            for tasks in (self._waiting, self._writing):
                for each in names:
                    if tasks.get(each) is task:
                        del tasks[each]

    async def _write(self, request: Request, context: RequestContext, answer: str) -> None:
        # Nothing is loaded for it, and no server asked for a count.
        attempts = Attempts(summary_calls_left=1)
        context = replace(context, now=False, focus="", pins=None, measure=None, warm_up=nothing, attempts=attempts)
        request = replace(request, messages=turn_ended(request.messages, answer))
        measured, stored = await self._builder.find(await hashed(await self._measurer.measure(request, context)))
        measured = await self._pins.applied(measured)
        if context.has_siblings and not Reservation(self._admission, context).is_shared(measured.window):
            return
        if await self._windows.is_busy(context.target):
            # Another program uses the model without this proxy, such as LM Studio's own window.
            return
        same = next((model for model in context.pruning_models if model.is_same), None)
        step = await off_loop_if(measured.is_long, lambda: _planned_ahead(measured, stored, same))
        written = None if step is None else await self._record_ahead(measured, step)
        if same is None:
            return
        known = stored if written is None else [written, *stored]
        reading = await off_loop_if(
            measured.is_long, lambda: plan_reading(measured.conversation, measured.budget, measured.options, known)
        )
        compaction = None if reading is None else await self._compaction_of(measured, reading)
        if compaction is not None:
            await self._read(measured, compaction, same)

    async def _record_ahead(self, measured: MeasuredRequest, step: Step) -> Compaction | None:
        if not await self._may_begin(measured):
            return None
        try:
            async with self._room(measured, measured.count.tokens):
                built = await self._builder.make(measured, (step,))
        except asyncio.CancelledError:
            if not self._is_closing:
                self._reporter.decided(measured, "given_up", after=measured.count.tokens, reason="arrived")
            raise
        if not built.effort.calls:
            # No model could be asked in a way that leaves the conversation in the cache.
            self._begun_s[measured.context.scope].pop()
            return None
        return built.kept if await self._keep(measured, step.base, built) else None

    async def _compaction_of(self, measured: MeasuredRequest, decision: Reuse | Step) -> Compaction | None:
        """The compaction of the next turn: a record that is there, or an edit that is made now; None for none.

        A record was counted when it was begun, and is read once.
        """
        if isinstance(decision, Reuse):
            return decision.compaction if await _is_allowed(measured) else None
        if not await self._may_begin(measured):
            return None
        built = await self._builder.make(measured, (decision,))
        built = built._replace(kept=replace(built.kept, ahead=True))
        return built.kept if await self._keep(measured, None, built) else None

    async def _may_begin(self, measured: MeasuredRequest) -> bool:
        begun_s = self._begun_s.setdefault(measured.context.scope, deque(maxlen=MOST_PER_HOUR))
        if len(begun_s) == MOST_PER_HOUR and self._clock() - begun_s[0] < _HOUR_S:
            return False
        if not await _is_allowed(measured):
            return False
        begun_s.append(self._clock())
        return True

    async def _read(self, measured: MeasuredRequest, compaction: Compaction, model: PruningModel) -> None:
        """Has the server read the next turn's beginning: its cache holds text that will not be sent any more.

        That is made certain before the server begins: then its cache has lost the chat, however soon a request comes.
        """
        prepared = await self._measurer.applied(measured, compaction, "reused")
        sent = prepared.messages or ()
        if sent[-1:] and sent[-1].role == "assistant":
            # Where the results of a call will stand.
            sent = sent[:-1]
        elif sent and not sent[-1].text:
            sent = (*sent[:-1], user_message("."))
        async with self._room(measured, prepared.count.tokens):
            await self._builder.put(measured, replace(compaction, ahead=False, early=True))
            request = prepared.sent(measured.request)
            await model.ask(sent, max_tokens=1, tools=request.tools, tool_choice=request.tool_choice)

    @asynccontextmanager
    async def _room(self, measured: MeasuredRequest, tokens: int) -> AsyncGenerator[None, None]:
        room = Reservation(self._admission, measured.context)
        try:
            async with room.for_summary(measured.window, tokens):
                room.started()
                yield
                room.ended()
        finally:
            room.release()

    async def _keep(self, measured: MeasuredRequest, base: Compaction | None, built: BuiltCompaction) -> bool:
        """Stores a record if it is worth it; never in place of one that is applied."""
        compaction = built.kept
        after_tokens = applied_tokens(measured.conversation, compaction)
        if compaction.level == "truncate" or not gains(after_tokens, measured.count.tokens):
            built.effort.reason = built.effort.reason or "no_gain"
            self._reporter.decided(measured, "given_up", after=measured.count.tokens, effort=built.effort)
            return False
        if await self._store.find(measured.context.scope, [compaction.covered_hash]):
            return False
        await self._builder.put(measured, compaction)
        self._reporter.decided(
            measured, "prepared", after=after_tokens, compaction=compaction, effort=built.effort, base=base
        )
        return True


async def _is_allowed(measured: MeasuredRequest) -> bool:
    may_write_ahead = measured.context.may_write_ahead
    return may_write_ahead is not None and await may_write_ahead()


def _planned_ahead(measured: MeasuredRequest, stored: Sequence[Compaction], same: PruningModel | None) -> Step | None:
    if measured.rereads and same is not None and not measured.budget.own.triggers(measured.count.tokens):
        # After the instruction the server cannot go back to the conversation: it would read all of the next turn.
        return None
    return plan_ahead(measured.conversation, measured.budget, measured.options, stored)
