"""Writes the record that a conversation's next compaction will need, while no client waits.

After an answer that leaves a conversation near its trigger, and once its server has been idle for a moment, the summary
is asked for after the very conversation that the server's cache holds; it takes effect at the trigger (`plan_next`). If
the next turn is expected to cross it, the server is made to read the compacted conversation, too. A request that comes
meanwhile has the engine at once. One call at a time for each server.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from litellm_compaction.concurrency import Tasks, ended, off_loop_if
from litellm_compaction.core.budget import gained_tokens
from litellm_compaction.core.compaction import Compaction, applied_tokens
from litellm_compaction.core.messages import Request, user_message
from litellm_compaction.core.plan import Step, plan_next, turn_ended
from litellm_compaction.engine.context import (
    Attempts,
    Decision,
    Effort,
    MeasuredRequest,
    PreparedRequest,
    PruningModel,
    RequestContext,
    nothing,
)
from litellm_compaction.engine.measure import hashed
from litellm_compaction.engine.sharing.reservation import server_of
from litellm_compaction.errors import CompactionError

if TYPE_CHECKING:
    from litellm_compaction.engine.compactor import Compactor

logger = logging.getLogger("litellm_compaction")

# An agent is back with its tool results before that; a person reads for longer.
QUIET_S = 1.0
# To close a stream takes milliseconds; it only bounds a hang.
_CLOSING_S = 1.0


@dataclass(slots=True, eq=False)
class _Turn:
    """A conversation and its answer, which its server's cache held last; `writer` waits for quiet, and writes."""

    request: Request
    context: RequestContext
    answer: str
    writer: asyncio.Task[None] | None = None


class Background:
    """Writes records ahead; `quiet_s` is for how long a server has been idle before it is asked."""

    def __init__(self, engine: Compactor, quiet_s: float) -> None:
        self._engine, self._quiet_s = engine, quiet_s
        # By server: for what something may still be written there, or is, for another server's conversation.
        self.turns: dict[str, _Turn] = {}
        self._tasks = Tasks()

    def answered(
        self, request: Request, context: RequestContext, prepared: PreparedRequest, *, answer: str, used_tokens: int
    ) -> None:
        """Takes note of the end of an answer to a client's `request`; begins nothing before its server has been idle.

        `answer` is its text, "" if the model has called tools, and `used_tokens` are of the window, with it.
        """
        name, settings = server_of(context), context.settings
        before = turn = self.turns.get(name)
        if not context.is_beside:
            may_write = settings.background != "off" and settings.constants.max_summary_calls > 0
            ends_in_answer = bool(request.messages) and request.messages[-1].role == "assistant"
            is_ready = prepared.budget.nears_trigger(used_tokens) and not (ends_in_answer or request.has_own_template)
            if not (may_write and is_ready):
                return
            turn = self.turns[name] = _Turn(request, context, answer)
        if before is not None and before.writer is not None:
            before.writer.cancel()
        if turn is not None:
            turn.writer = self._tasks.begin(self._when_quiet(name, turn))

    async def make_way(self, name: str, *, is_beside: bool = False) -> None:
        """Leaves a server, by its name of `server_of`, to a request that comes: returns when the call is closed."""
        # After any but one beside the conversation the cache will hold another one.
        turn = self.turns.get(name) if is_beside else self.turns.pop(name, None)
        if turn is not None and turn.writer is not None:
            turn.writer.cancel()
            await asyncio.wait({turn.writer}, timeout=_CLOSING_S)

    async def aclose(self) -> None:
        await ended(self._tasks)

    async def _when_quiet(self, name: str, turn: _Turn) -> None:
        names = {name, *(str(model.target.api_base) for model in turn.context.pruning_models)}
        is_idle, is_over = self._engine.admission.is_idle, False
        try:
            await asyncio.sleep(self._quiet_s)
            others = [each for each in map(self.turns.get, names) if each is not None and each is not turn]
            is_free = all(each.writer is None or each.writer.done() for each in others)
            if is_free and all(map(is_idle, names)):
                self.turns |= dict.fromkeys(names, turn)
                await self._write(turn)
                is_over = True
        except Exception as error:  # noqa: BLE001 - no request waits for it, and none must suffer by it (P8)
            level = logging.DEBUG if isinstance(error, CompactionError) else logging.WARNING
            logger.log(level, "background error=%s; the record is written when it is needed", type(error).__name__)
        finally:
            for each in names:
                if self.turns.get(each) is turn and (is_over or each != name):
                    del self.turns[each]

    async def _write(self, turn: _Turn) -> None:
        engine, may_write = self._engine, turn.context.may_write_ahead
        if may_write is None or not await may_write():
            return
        # Nothing is loaded for it, and no server asked for a count.
        attempts = Attempts(summary_calls_left=1)
        context = replace(
            turn.context, now=False, focus="", pins=None, measure=None, warm_up=nothing, attempts=attempts
        )
        request = replace(turn.request, messages=turn_ended(turn.request.messages, turn.answer))
        measured = await engine.decider.restored(await hashed(await engine.measurer.measure(request, context)))
        measured, stored = await engine.maker.find(engine.decider.sent_before.steadied(measured, is_answered=True))
        is_alone = not context.has_siblings or engine.room(context).is_shared(measured.window)
        # Its client may send other messages each time; and another program may use the model, such as LM Studio's own.
        if measured.conversation.unsteady is None or not is_alone or await engine.windows.is_busy(context.target):
            return
        room = engine.room(context)
        try:
            async with room.for_summary(measured.window, measured.count.tokens):
                await self._prepare(measured, stored)
        finally:
            room.release()

    async def _prepare(self, measured: MeasuredRequest, stored: list[Compaction]) -> None:
        """Writes what is planned for the next turn, and has it read."""
        same = next((model for model in measured.context.pruning_models if model.is_same), None)
        plan = partial(plan_next, measured.conversation, measured.budget, measured.options)
        # After the instruction a server that rereads cannot go back to the conversation: it would read all of it anew.
        if not (measured.family.rereads and same) or measured.budget.own.triggers(measured.count.tokens):
            step = await off_loop_if(measured.is_long, partial(plan, stored, is_expected=False))
            written = await self._made(measured, step) if isinstance(step, Step) and not step.is_edit else None
            stored = [written, *stored] if written else stored
        if same is not None:
            step = await off_loop_if(measured.is_long, partial(plan, stored, is_expected=True))
            # A record was counted when it was begun, and is read once; an edit is made now.
            compaction = await self._made(measured, step) if isinstance(step, Step) and step.is_edit else step
            if isinstance(compaction, Compaction):
                await self._read(measured, compaction, same)

    async def _made(self, measured: MeasuredRequest, step: Step) -> Compaction | None:
        """The record or the edit of a step, stored for when it is needed; None for none."""
        effort, tell, tokens = Effort(), partial(self._engine.reporter.decided, measured), measured.count.tokens
        try:
            made = await self._engine.maker.make(measured, (step,), effort)
        except asyncio.CancelledError:
            tell(Decision("given_up", Effort(reason="arrived")), after=tokens)
            raise
        if made is None or (step.draft.is_record and not effort.calls):
            # No model could be asked in a way that leaves the conversation in the cache.
            return None
        made = replace(made, state="ready")
        after_tokens = applied_tokens(measured.conversation, made)
        if made.level == "truncate" or after_tokens > gained_tokens(tokens):
            effort.reason = effort.reason or "no_gain"
            tell(Decision("given_up", effort), after=tokens)
            return None
        if not await self._engine.maker.put(measured, made):
            return None
        tell(Decision("prepared", effort, step.base), after=after_tokens, made=made)
        return made

    async def _read(self, measured: MeasuredRequest, compaction: Compaction, model: PruningModel) -> None:
        """Has the server read the next turn's beginning: its cache holds text that will not be sent any more.

        That is made certain before the server begins: then its cache has lost the chat, however soon a request comes.
        """
        prepared = await self._engine.measurer.applied(measured, compaction, "reused")
        sent = prepared.messages or ()
        if sent[-1:] and sent[-1].role == "assistant":
            # Where the results of a call will stand.
            sent = sent[:-1]
        elif sent and not sent[-1].text:
            sent = (*sent[:-1], user_message("."))
        if await self._engine.maker.put(measured, replace(compaction, state="read")):
            request = prepared.sent(measured.request)
            await model.ask(sent, max_tokens=1, tools=request.tools, tool_choice=request.tool_choice)
