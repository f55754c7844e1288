"""Makes a compaction of a step: a summary if a pruning model gives one, the ledger either way; and stores it.

Called by the ladder of `deciding.py`, and by `background.py` while no client waits.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar

from litellm_compaction.concurrency import off_loop
from litellm_compaction.core.budget import gained_tokens
from litellm_compaction.core.compaction import Compaction, applied_tokens, apply, as_it_was, bare, hidden_messages
from litellm_compaction.core.forms import excerpt
from litellm_compaction.core.identity import seen
from litellm_compaction.core.ledger import ledger
from litellm_compaction.core.messages import visible_text
from litellm_compaction.core.plan import TASK_WINDOW_RATIO, Step
from litellm_compaction.core.portable import bases_of, ledger_messages
from litellm_compaction.core.view import View
from litellm_compaction.engine.additions import with_pins
from litellm_compaction.engine.ask import SummaryClient
from litellm_compaction.engine.context import Effort, MeasuredRequest
from litellm_compaction.errors import CompactionError
from litellm_compaction.stores import Covered, Originals, Store

logger = logging.getLogger("litellm_compaction")
# Of a ledger that holds the task alone: its head, and that of what else it might hold.
_TASK_BESIDE_TOKENS = 48

_Result = TypeVar("_Result")


class Maker:
    """Makes compactions, and stores them; what a stored one covers is kept by `originals`, if the settings say so."""

    def __init__(self, summary_client: SummaryClient, store: Store, originals: Originals | None) -> None:
        self._summary_client = summary_client
        self._store = store
        self._originals = originals

    async def find(self, measured: MeasuredRequest) -> tuple[MeasuredRequest, list[Compaction]]:
        """Returns a request with its hashes and pins, and its compactions, with the one that came along.

        The hashes are those that it had before its client edited messages that a compaction covers.
        """
        stored, view = list[Compaction](), measured.conversation
        # The store tells its own troubles; the request is too long either way.
        with contextlib.suppress(Exception):
            records = await self._store.find(measured.context.scope, view.hashes[1:], view.words_hashes[1:])
            view = await off_loop(view.rest, partial(as_it_was, view, records))
            measured = replace(measured, conversation=view)
            hashes = frozenset(view.hashes)
            stored = [each for each in records if each.covered_hash in hashes]
        return await with_pins(self._store, measured), [*stored, *_bases(measured)]

    async def without_misfits(
        self,
        measured: MeasuredRequest,
        stored: Sequence[Compaction],
        attempt: Callable[[Sequence[Compaction]], Awaitable[_Result]],
    ) -> _Result:
        """`attempt(stored)`; if that raises anything but a request's error, again without `stored`, which is deleted.

        A record may have been written by any writer to a shared store, or by another version.
        """
        try:
            return await attempt(stored)
        except CompactionError:
            raise
        except Exception as error:
            if not stored:
                raise
            result, kind = await attempt(()), type(error).__name__
            logger.warning("record_deleted error=%s records=%d; they did not fit their conversation", kind, len(stored))
            await self.forget(measured, stored)
            return result

    async def forget(self, measured: MeasuredRequest, stored: Iterable[Compaction]) -> None:
        """Deletes records of a request's conversation, as far as the store does that."""
        for each in stored:
            with contextlib.suppress(Exception):
                await self._store.delete(scope=measured.context.scope, covered_hash=each.covered_hash)

    async def make(self, measured: MeasuredRequest, steps: Sequence[Step], effort: Effort) -> Compaction | None:
        """Makes a compaction by the first of `steps`; None if no model chooses usably what may go.

        A record is stored at once, since its summary was paid for; what other steps make is stored once it does.
        """
        step = steps[0]
        if step.draft.is_record:
            return await self._record(measured, steps, effort)
        draft = step.draft if step.is_edit else await self._summary_client.prune(measured, step, effort)
        made = await asyncio.to_thread(_copied, measured, draft, step.ledger_tokens) if draft is not None else None
        most_tokens = gained_tokens(step.now_tokens)
        does = made is None or step.is_edit or applied_tokens(measured.conversation, made) <= most_tokens
        effort.reason = effort.reason if does else "no_gain"
        return made if does else None

    async def _record(self, measured: MeasuredRequest, steps: Sequence[Step], effort: Effort) -> Compaction:
        """The first step's record; without a summary the second one's, if there is one."""
        step, summary = steps[0], ""
        # Or why no model chose what may go.
        before, effort.reason = effort.reason, ""
        if step.question == "none":
            effort.reason = "client_summary" if measured.context.is_client_summary else "no_room"
        else:
            summary = await self._summary_client.summary(measured, step, effort)
        effort.reason = effort.reason or before
        # Without one nothing was handed over, so the recent messages stay.
        draft, ledger_tokens = _worded(step if summary else steps[-1], summary, measured.count_text)
        compaction = await asyncio.to_thread(_copied, measured, draft, ledger_tokens)
        # Of the same messages the store keeps one record: the fuller one, for when there is room again.
        is_of_the_same = step.base is not None and step.base.covered_hash == measured.keyed(compaction).covered_hash
        is_poorer = compaction.state == "provisional" and is_of_the_same
        # An unneeded record without a summary is not kept; one that is not needed yet is kept by the caller.
        if not is_poorer and draft.state != "ready" and (summary or not measured.is_voluntary):
            await self.put(measured, compaction)
        return compaction

    async def hardest(self, measured: MeasuredRequest) -> tuple[Compaction, ...]:
        """The last resort where no step does: all goes that may, the person's first words last."""
        conversation, nothing = measured.conversation, bare(measured.conversation)
        if nothing is None:
            return ()
        task = [at for at in (conversation.task,) if at is not None and at < nothing.covered_messages]
        task_tokens = min(conversation.own_words_tokens(task), int(TASK_WINDOW_RATIO * measured.window.tokens))
        ledger_tokens = _TASK_BESIDE_TOKENS + task_tokens * 11 // 10
        return (await asyncio.to_thread(_copied, measured, nothing, ledger_tokens), nothing) if task else (nothing,)

    async def put(self, measured: MeasuredRequest, compaction: Compaction) -> bool:
        """Stores a compaction with what its messages were, so that a client may clear data in them; False if it fails.

        One that is in effect is listed for its tenant, and what it covers is kept.
        """
        context, conversation, compaction = measured.context, measured.conversation, measured.keyed(compaction)
        if context.is_client_summary:
            # Its conversation ends here.
            return False
        covered, is_in_effect = compaction.covered_messages, not compaction.is_waiting
        rest = tuple(each.received or each for each in conversation.rest[:covered])
        if not compaction.seen and not measured.is_shortened and covered < len(conversation.words_hashes):
            known = await off_loop(rest, lambda: seen(rest, conversation.hashes, conversation.seen))
            if any(each.data for each in known):
                compaction = replace(compaction, words_hash=conversation.words_hashes[covered], seen=known)
        if is_in_effect and self._originals is not None and context.settings.keep_originals != "off":
            whose, hashes = {"scope": context.scope, "tenant": context.tenant}, conversation.hashes[: covered + 1]
            self._originals.keep(Covered(**whose, messages=rest, hashes=hashes, redact=measured.redact))
        try:
            if compaction.state == "ready" and await self._store.find(context.scope, [compaction.covered_hash]):
                # Never in place of one that is applied.
                return False
            await self._store.put(context.scope, compaction)
            if context.tenant and is_in_effect:
                await self._store.name(context.tenant, context.scope, compaction)
        except Exception:  # noqa: BLE001 - the store tells its own troubles; this request has its compaction
            return False
        return True


def _bases(measured: MeasuredRequest) -> list[Compaction]:
    """The record that the client's conversation begins with."""
    conversation, portable = measured.conversation, measured.context.portable
    return bases_of(conversation.rest, conversation.hashes, portable) if portable else []


def _copied(measured: MeasuredRequest, compaction: Compaction, ledger_tokens: int) -> Compaction:
    """`compaction` as it is applied and stored: with its ledger, without secrets, control tokens of the model broken.

    In a thread, since the operator's patterns may be slow.
    """
    conversation, redact, defuse = measured.conversation, measured.redact, measured.defuse
    bases, hidden = _bases(measured), hidden_messages(conversation.rest, compaction)
    earlier = ledger_messages(bases[0].ledger) if bases else []
    if bases:
        # Of the record itself its quotes go on, its summary by its own way.
        hidden.pop(0, None)
    task = [*hidden].index(conversation.task) if conversation.task in hidden else None
    copied = ledger(
        # Earlier quotes come first, and begin with the task.
        [*earlier, *hidden.values()],
        budget_tokens=ledger_tokens,
        count=measured.count_text,
        known=_known(conversation, compaction),
        redact=redact,
        task=0 if earlier else task,
        task_tokens=int(TASK_WINDOW_RATIO * measured.window.tokens),
    )
    return replace(compaction, summary=defuse(redact(compaction.summary)), ledger=defuse(redact(copied)))


def _known(conversation: View, compaction: Compaction) -> str:
    """All that the model sees beside the ledger; a value that a summary gets wrong is not in it, and so is copied."""
    if not compaction.is_record:
        return "\n".join(map(visible_text, apply(conversation.messages, compaction)))
    kept = conversation.rest[compaction.covered_messages :]
    return "\n".join((compaction.summary, *map(visible_text, kept)))


def _worded(step: Step, summary: str, count: Callable[[str], int]) -> tuple[Compaction, int]:
    """A record with a new summary, "" for none, and the room of its ledger, which takes what the summary leaves.

    Without a new one the earlier one goes on, shortened if there is little room.
    """
    draft = step.draft
    if summary:
        draft = replace(draft, summary=summary, summarized_messages=draft.covered_messages)
    else:
        earlier = excerpt(draft.summary, step.summary_tokens, count) if draft.summary else ""
        draft = replace(draft, summary=earlier, level="truncate")
    spare_tokens = step.summary_tokens - count(draft.summary)
    return draft, max(step.ledger_tokens + spare_tokens, step.ledger_min_tokens)
