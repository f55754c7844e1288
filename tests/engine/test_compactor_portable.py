"""A client keeps its conversation's compaction itself, and sends it back in place of the history."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from litellm_compaction.core.messages import Request
from litellm_compaction.core.portable import Portable, Unfolded, portable, unfolded
from litellm_compaction.engine import PreparedRequest
from litellm_compaction.errors import DoesNotFit
from tests.builders import JsonDict, chat, parsed, system, user
from tests.engine.bench import Bench

WINDOW = 8192
RULE = "Never touch /srv/prod-4711, whatever happens."
LONG = [system(), user(f"Port the parser. {RULE}"), *chat(60, words=60)[2:]]


async def kept(bench: Bench, raw: list[JsonDict], **settings: Any) -> Portable:
    prepared = await bench.guard(raw, WINDOW, now=True, **settings)
    return portable(parsed(raw), prepared.compaction)


def folded(found: Portable, *later: JsonDict, before: Sequence[JsonDict] = ()) -> Unfolded:
    return unfolded(parsed([system(), *before, user("#"), *later]), found, "#")


async def guarded(bench: Bench, sent: Unfolded, **changes: Any) -> PreparedRequest:
    context = replace(bench.context(WINDOW), portable=sent.bases, **changes)
    return await bench.compactor.guard(Request(messages=sent.messages), context)


async def test_without_the_record_it_is_a_conversation_like_others() -> None:
    """A list that does not begin with it gets nothing of it."""
    found = await kept(Bench(), LONG)
    raw = [system(), user("Hello.")]
    assert (await guarded(Bench(), Unfolded(parsed(raw), folded(found).bases))).messages is None


async def test_a_conversation_that_may_not_change_is_refused_or_sent_as_it_is() -> None:
    """Above the trigger, too, as long as it fits."""
    raw = chat(27, words=100)
    assert (await Bench().guard(raw, WINDOW)).action == "compacted"
    assert (await guarded(Bench(), Unfolded(parsed(raw)), may_change=False)).messages is None
    with pytest.raises(DoesNotFit):
        await guarded(Bench(), Unfolded(parsed(LONG)), may_change=False)
