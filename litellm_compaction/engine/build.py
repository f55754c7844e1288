"""Makes a new compaction: a summary if a pruning model gives one, the ledger either way; then stores it.

Called by the compactor, once for all requests that need the same compaction at the same time.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Hashable, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple, TypeVar

from litellm_compaction.concurrency import off_loop, off_loop_if
from litellm_compaction.core.compaction import Compaction, Segment, applied_tokens, apply, as_it_was, hidden_messages
from litellm_compaction.core.continuation.request import keyed
from litellm_compaction.core.excerpts import excerpt
from litellm_compaction.core.identity import seen
from litellm_compaction.core.ledger import ledger
from litellm_compaction.core.messages import visible_text
from litellm_compaction.core.portable import bases_of, ledger_messages
from litellm_compaction.core.secrets import TOO_SLOW, Redact, plain, redactor
from litellm_compaction.core.steps import TASK_WINDOW_RATIO, Step, gains
from litellm_compaction.core.view import View
from litellm_compaction.engine.ask import SummaryClient
from litellm_compaction.engine.context import Effort, MeasuredRequest
from litellm_compaction.errors import CompactionError
from litellm_compaction.stores import CompactionStore, Covered, Originals
from litellm_compaction.tokenizers.registry import is_loaded, vocabulary

logger = logging.getLogger("litellm_compaction")
# Looking for secrets in so much text takes some ms.
_OFF_LOOP_CHARS = 10_000
_STORE_TIMEOUT_S = 2.0

_Result = TypeVar("_Result")


class BuiltCompaction(NamedTuple):
    """A compaction as it is applied, and as it is stored: keyed for the next turn if an answer was carried over."""

    compaction: Compaction
    kept: Compaction
    effort: Effort


def alike(measured: MeasuredRequest, steps: Sequence[Step]) -> Hashable:
    """The key under which two compactions are one: tenant, model, topic, and the messages that a model is asked about.

    Without a model there is nothing to share but between identical requests.
    """
    step, context = steps[0], measured.context
    if step.question == "none":
        return same(measured, steps)
    covered = step.draft.covered_messages
    return (context.scope, context.target.key, context.focus, step.question, measured.conversation.hashes[covered])


def same(measured: MeasuredRequest, steps: Sequence[Step]) -> Hashable:
    return (
        measured.context.scope,
        measured.context.target.key,
        measured.context.focus,
        tuple(steps),
        measured.conversation.hashes[-1],
    )


class CompactionBuilder:
    """Makes compactions from plans, and stores them.

    Args:
        originals: keeps the messages that a stored compaction covers, if the settings say so; None for nowhere.
    """

    def __init__(
        self,
        *,
        summary_client: SummaryClient,
        store: CompactionStore,
        originals: Originals | None = None,
    ) -> None:
        self._summary_client = summary_client
        self._store = store
        self._originals = originals

    async def find(self, measured: MeasuredRequest) -> tuple[MeasuredRequest, list[Compaction]]:
        """Returns a request under its hashes, and the compactions for its first messages, with the one that came along.

        The hashes are those that it had before its client edited messages that a compaction covers.
        """
        stored: list[Compaction] = []
        # The store tells its own troubles; the request is too long either way.
        with contextlib.suppress(Exception):
            found = await self._store.find(
                measured.context.scope, measured.conversation.hashes[1:], measured.conversation.words_hashes[1:]
            )
            make = partial(as_it_was, measured.conversation, found)
            measured = replace(measured, conversation=await off_loop(measured.conversation.rest, make))
            hashes = frozenset(measured.conversation.hashes)
            stored = [each for each in found if each.covered_hash in hashes]
        return measured, [*stored, *_portable_bases(measured)]

    async def without_misfits(
        self,
        measured: MeasuredRequest,
        stored: Sequence[Compaction],
        attempt: Callable[[Sequence[Compaction]], Awaitable[_Result]],
    ) -> _Result:
        """`attempt(stored)`; if that raises anything but a request's error, again without `stored`.

        A record may have been written by any writer to a shared store, or by another version. If it goes well
        without, the record is deleted.
        """
        try:
            return await attempt(stored)
        except CompactionError:
            raise
        except Exception as error:
            if not stored:
                raise
            result = await attempt(())
            logger.warning(
                "record_deleted error=%s records=%d; a stored compaction did not fit its conversation",
                type(error).__name__,
                len(stored),
            )
            for each in stored:
                with contextlib.suppress(Exception):
                    forgotten = self._store.delete(scope=measured.context.scope, covered_hash=each.covered_hash)
                    await asyncio.wait_for(forgotten, _STORE_TIMEOUT_S)
            return result

    async def make(self, measured: MeasuredRequest, steps: Sequence[Step]) -> BuiltCompaction:
        """Builds a compaction by the first step, or by the next one if no pruning model answers usably.

        A summary is stored at once, since it was paid for; what other steps make is stored by `keep`.
        """
        step, effort = steps[0], Effort()
        if step.is_edit:
            compaction = await self._with_ledger(measured, step.draft, step.ledger_tokens)
            kept = keyed(measured.conversation.messages, measured.conversation.hashes, compaction)
            return BuiltCompaction(compaction, kept, effort)
        if step.question == "choice":
            built = await self._pruned(measured, step, effort)
            if built is not None:
                return built
        reason, effort.reason = effort.reason, ""
        built = await self._summarized(measured, [each for each in steps if each.is_record], effort)
        effort.reason = effort.reason or reason
        return built

    async def _pruned(self, measured: MeasuredRequest, step: Step, effort: Effort) -> BuiltCompaction | None:
        """The pruning if a model gives one that gains enough, else None."""
        found = await self._summary_client.prune(measured, step, effort)
        if found is not None:
            compaction = await self._with_ledger(measured, found, step.ledger_tokens)
            after_tokens = applied_tokens(measured.conversation, compaction)
            if gains(after_tokens, step.now_tokens) and not measured.budget.triggers(after_tokens):
                return BuiltCompaction(compaction, compaction, effort)
            effort.reason = "no_gain"
        return None

    async def _summarized(self, measured: MeasuredRequest, steps: Sequence[Step], effort: Effort) -> BuiltCompaction:
        """The first step's record; without a summary the second one's, if there is one."""
        step, summary = steps[0], ""
        if step.question == "none":
            effort.reason = "client_summary" if measured.context.is_client_summary else "no_room"
        else:
            summary = await self._summary_client.summary(measured, step, effort)
        if not summary:
            # Nothing was handed over, so the recent messages stay.
            step = steps[-1]
        ledger_tokens = max(step.ledger_tokens + _spare(step, summary, measured.count_text), step.ledger_min_tokens)
        compaction = await self._with_ledger(measured, _said(step, summary, measured.count_text), ledger_tokens)
        # Of the same messages the store keeps one record: the fuller one, for when there is room again.
        kept = keyed(measured.conversation.messages, measured.conversation.hashes, compaction)
        is_poorer = kept.provisional and step.base is not None and step.base.covered_hash == kept.covered_hash
        # An unneeded record without a summary is not kept; one that is not needed yet is kept by the caller.
        if not is_poorer and not kept.ahead and (summary or not measured.is_voluntary):
            await self._put(measured, kept)
        return BuiltCompaction(compaction, kept, effort)

    async def keep(self, measured: MeasuredRequest, built: BuiltCompaction) -> None:
        """Stores a compaction, so that the next request that begins alike gets the same bytes; again is no change."""
        if not built.compaction.is_record:
            await self._put(measured, built.kept)

    async def put(self, measured: MeasuredRequest, compaction: Compaction) -> None:
        """Stores a compaction with what its messages were, so that a client may clear data in them."""
        conversation, covered = measured.conversation, compaction.covered_messages
        if not compaction.seen and not measured.is_shortened and covered < len(conversation.words_hashes):
            rest = conversation.rest[:covered]
            known = await off_loop(rest, lambda: seen(rest, conversation.hashes, conversation.seen))
            if any(each.data for each in known):
                compaction = replace(compaction, words_hash=conversation.words_hashes[covered], seen=known)
        await self._store.put(measured.context.scope, compaction)

    async def put_into_effect(self, measured: MeasuredRequest, compaction: Compaction) -> None:
        """Stores a record that was written ahead as one that is applied, so that later turns keep it."""
        await self._put(measured, replace(compaction, ahead=False, early=False))

    async def _with_ledger(self, measured: MeasuredRequest, compaction: Compaction, ledger_tokens: int) -> Compaction:
        """`compaction` with the text that survives word for word besides summaries and the messages that stay."""
        conversation, rest = measured.conversation, measured.conversation.rest
        redact, bases = redact_of(measured), _portable_bases(measured)
        earlier_quotes = ledger_messages(bases[0].ledger) if bases else []

        def write() -> str:
            hidden = hidden_messages(rest, compaction)
            if bases:
                # Of the record itself its quotes go on, its summary by its own way.
                hidden.pop(0, None)
            # Earlier quotes come first, and begin with the task.
            places, task = {at: place for place, at in enumerate(hidden, len(earlier_quotes))}, conversation.task
            return ledger(
                [*earlier_quotes, *hidden.values()],
                budget_tokens=ledger_tokens,
                count=measured.count_text,
                known=_known(conversation, compaction),
                redact=redact,
                task=0 if earlier_quotes else None if task is None else places.get(task),
                task_tokens=int(TASK_WINDOW_RATIO * measured.window.tokens),
            )

        copied = await (asyncio.to_thread(write) if _redacts_slowly(measured) else off_loop(rest, write))
        return await _written(measured, replace(compaction, ledger=copied))

    async def _put(self, measured: MeasuredRequest, kept: Compaction) -> None:
        if measured.context.is_client_summary:
            # Its conversation ends here.
            return
        # The store tells its own troubles; this request has its compaction.
        with contextlib.suppress(Exception):
            await self.put(measured, kept)
            if measured.context.tenant:
                await self._store.name(measured.context.tenant, measured.context.scope, kept)
        self._keep_originals(measured, kept.covered_messages)

    def _keep_originals(self, measured: MeasuredRequest, covered_messages: int) -> None:
        context, conversation = measured.context, measured.conversation
        if self._originals is None or context.settings.keep_originals == "off":
            return
        covered = Covered(
            scope=context.scope,
            tenant=context.tenant,
            messages=conversation.rest[:covered_messages],
            hashes=conversation.hashes[: covered_messages + 1],
            redact=redact_of(measured),
        )
        self._originals.keep(covered)


def _portable_bases(measured: MeasuredRequest) -> list[Compaction]:
    conversation = measured.conversation
    return bases_of(conversation.rest, conversation.hashes, measured.context.portable)


def redact_of(measured: MeasuredRequest) -> Redact:
    """Returns what takes secrets out of texts of a request, by its settings; a slow pattern is logged."""
    settings = measured.context.settings
    redact = redactor(settings.redact_patterns)

    def told(text: str) -> str:
        cleaned = redact(text)
        if cleaned.endswith(TOO_SLOW):
            logger.warning("redact_patterns_slow model=%s chars=%d: the rest of a text is left out", label, len(text))
        return cleaned

    label = measured.context.label
    return told if settings.redact_patterns else redact


async def _written(measured: MeasuredRequest, compaction: Compaction) -> Compaction:
    """`compaction` as it is applied and stored: without secrets, control tokens of the model broken.

    `core.prompts.frame` breaks those that are widespread; which others a model has, only its own vocabulary knows.
    """
    redact, name = redact_of(measured), measured.family.vocabulary
    defuse = vocabulary(name).defused if is_loaded(name) else plain
    chars = sum(map(len, (compaction.ledger, compaction.omissions, *(each.text for each in compaction.segments))))
    is_slow = _redacts_slowly(measured) or chars > _OFF_LOOP_CHARS
    return await off_loop_if(is_slow, lambda: _rewritten(compaction, lambda text: defuse(redact(text))))


def _redacts_slowly(measured: MeasuredRequest) -> bool:
    """Redacting a short text, too, may take long: an operator's patterns may be slow."""
    return bool(measured.context.settings.redact_patterns)


def _rewritten(compaction: Compaction, write: Callable[[str], str]) -> Compaction:
    return replace(
        compaction,
        segments=tuple(replace(segment, text=write(segment.text)) for segment in compaction.segments),
        ledger=write(compaction.ledger),
        omissions=write(compaction.omissions),
    )


def _known(conversation: View, compaction: Compaction) -> str:
    """All that the model sees; beside a record its summaries and what follows it.

    A value that a summary gets wrong is not in it, and so stands beside it.
    """
    if not compaction.is_record:
        return "\n".join(map(visible_text, apply(conversation.messages, compaction)))
    kept = conversation.rest[compaction.covered_messages :]
    return "\n".join((*(each.text for each in compaction.segments), *map(visible_text, kept)))


def _said(step: Step, summary: str, count: Callable[[str], int]) -> Compaction:
    """A record with a new summary; "" for none: then the earlier ones go on, shortened if there is little room."""
    draft, segments = step.draft, step.draft.segments
    if summary:
        segment = Segment(text=summary, round=draft.round, covered_messages=draft.covered_messages)
        return replace(draft, segments=(segment,) if step.integrates else (*segments, segment))
    if draft.provisional and segments:
        segments = (replace(segments[-1], text=excerpt(draft.summary, step.summary_tokens, count)),)
    return replace(draft, segments=segments, level="truncate")


def _spare(step: Step, summary: str, count: Callable[[str], int]) -> int:
    """Room that the summary leaves to the ledger if it needs less, or did not come; below 0 if it needed more."""
    if step.draft.provisional and step.draft.segments:
        return 0
    return step.summary_tokens - count(summary) if summary else step.summary_tokens
