"""Adds to a compacted request what its conversation said earlier about the person's newest words, as quotations.

For requests without tools, whose model cannot look anything up. The compactor asks for it once it is clear what is
sent. The next turn comes without the excerpts: kept in place they would fill the window, which costs more than to read
one question and its answer again.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import statistics
import threading
from dataclasses import dataclass, field, replace

from litellm_compaction.concurrency import Bounded
from litellm_compaction.core.compaction import Compaction
from litellm_compaction.core.messages import merged, newest_user_index, visible_text
from litellm_compaction.core.stretches import own_words
from litellm_compaction.engine.context import MeasuredRequest, PreparedRequest
from litellm_compaction.engine.make import redact_of
from litellm_compaction.engine.measure import RequestMeasurer
from litellm_compaction.engine.recalling import defuser, may_recall
from litellm_compaction.recall import Beside, Index, beside

logger = logging.getLogger("litellm_compaction")

# 512 tokens of 8,192: three excerpts of English. With half as many .73 of the evidence stands in a prompt in place of
# .85, with twice as many .88 (LoCoMo 1 to 5).
_WINDOW_SHARE = 16
# What a token that is written costs a local engine beside one that is read, about.
_WRITTEN_WEIGHT = 15
_MOST_INDEXES = 64
# A question and its answer tell most conversations apart; those that begin alike add to one index.
_BEGINNING = 2
# Of a conversation, the newest: to index so much takes half a second, in a thread; and of an index that grows, until it
# is made anew.
_MOST_CHARS, _MOST_PASSAGES = 1_000_000, 50_000


@dataclass(frozen=True, slots=True)
class _Indexed:
    """The index of conversations that begin alike; under `lock` it is written and read."""

    index: Index
    lock: threading.Lock = field(default_factory=threading.Lock)


class Quoter:
    """Finds excerpts in the client's own list of messages, so that nothing has to be stored for it."""

    def __init__(self, measurer: RequestMeasurer) -> None:
        self._measurer = measurer
        # By scope and the first messages of a conversation; what comes after them is added turn by turn.
        self._indexes: Bounded[tuple[str, str], _Indexed] = Bounded(_MOST_INDEXES)

    async def added(self, prepared: PreparedRequest) -> PreparedRequest:
        """Returns a compacted request with excerpts in front of the newest words, or as it is.

        The prompt never outgrows its trigger by them, and nothing in front of that message changes.
        """
        measured, compaction, budget = prepared.measured, prepared.applied, prepared.budget
        at = _question(measured)
        limit_tokens = min(prepared.window.tokens // _WINDOW_SHARE, budget.trigger_tokens - prepared.count.tokens)
        if at is None or compaction is None or limit_tokens <= 0:
            return prepared
        try:
            found = await asyncio.to_thread(self._found, measured, compaction, at, limit_tokens)
            if not found.excerpts:
                return prepared
            messages = list(measured.conversation.messages)
            messages[at] = merged([messages[at]], found.text)
            changed = replace(measured, conversation=replace(measured.conversation, messages=tuple(messages)))
            quoting = await self._measurer.applied(changed, compaction, "reused")
        except Exception as error:  # noqa: BLE001 - the request is whole without (P8)
            logger.warning("excerpts_failed model=%s error=%s", measured.context.label, type(error).__name__)
            return prepared
        if budget.triggers(quoting.count.tokens):
            return prepared
        return replace(
            prepared,
            messages=quoting.messages,
            count=quoting.count,
            excerpts=found.excerpts,
            excerpt_tokens=measured.count_text(found.text),
        )

    def _found(self, measured: MeasuredRequest, compaction: Compaction, at: int, limit_tokens: int) -> Beside:
        conversation = measured.conversation
        before, hashes = conversation.rest[: at - conversation.prefix], conversation.hashes
        hidden, record = compaction.hidden, compaction.record
        # A record quotes some messages in full.
        gone = {each for each in hidden if visible_text(before[each]).strip() not in record}
        chars = itertools.accumulate(len(visible_text(message)) for message in reversed(before))
        start = len(before) - sum(total <= _MOST_CHARS for total in chars)
        known = self._indexed(measured)
        words_tokens, answer_tokens = _usual_turn(measured)
        with known.lock:
            known.index.add(before[start:], hashes[start : len(before) + 1])
            return beside(
                known.index,
                own_words(conversation.messages[at]),
                visible=[hashes[each + 1] for each in range(len(before)) if each not in gone],
                within=[hashes[each + 1] for each in sorted(gone)],
                limit_tokens=limit_tokens,
                count=measured.count_text,
                turn_tokens=words_tokens + _WRITTEN_WEIGHT * answer_tokens,
                again_tokens=words_tokens + answer_tokens,
                defuse=defuser(measured),
            )

    def _indexed(self, measured: MeasuredRequest) -> _Indexed:
        key = measured.context.scope, measured.conversation.hashes[: _BEGINNING + 1][-1]
        known = self._indexes.get(key)
        if known is None or len(known.index.passages) > _MOST_PASSAGES:
            known = _Indexed(Index(redact_of(measured)))
        # Those that are used stay.
        self._indexes[key] = known
        return known


def _usual_turn(measured: MeasuredRequest) -> tuple[float, float]:
    """The tokens of a message of the person's and of an answer, means over the conversation."""
    sized = list(zip(measured.conversation.messages, measured.conversation.sizes, strict=True))
    words, answers = ([size for each, size in sized if each.role == role] for role in ("user", "assistant"))
    return statistics.mean(words or [0]), statistics.mean(answers or [0])


def _question(measured: MeasuredRequest) -> int | None:
    """The index of a person's message that nothing answers yet; None if excerpts are not for this request."""
    context, messages = measured.context, measured.conversation.messages
    is_wanted = (
        may_recall(context) and context.settings.recall == "auto" and not measured.request.tools and not context.goes_on
    )
    at = newest_user_index(messages) if is_wanted else None
    if at is None or not all(message.is_system for message in messages[at + 1 :]):
        return None
    return at if own_words(messages[at]) else None
