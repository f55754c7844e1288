"""An answer that was carried over the limit, in the client's next turn: one message, and its record is found again."""

from __future__ import annotations

from dataclasses import replace

import pytest

from litellm_compaction.core.continuation.request import Partial
from litellm_compaction.core.messages import Request
from litellm_compaction.engine import PreparedRequest
from tests.builders import parsed, system, user
from tests.engine.bench import Bench

WINDOW = 4096
ASKED = [system("You write."), user("Write about rivers.")]
# At four characters a token some 3,600 tokens.
BEGUN = "\n".join(f"Line {number} of the answer tells something about rivers." for number in range(260))


@pytest.mark.parametrize("text", ["", " \n", "<think>"])
@pytest.mark.parametrize("is_long", [False, True])
async def test_thoughts_stay_whole_where_they_leave_room(text: str, is_long: bool) -> None:
    """In whichever field they came; else their end stays, and no compaction is made for them."""
    bench = Bench()
    thoughts = BEGUN if is_long else BEGUN[:4_000]
    partial = Partial(text=text, reasoning=thoughts, closes=True)
    if text.strip():
        partial = Partial(text=text + thoughts, closes=True)
    context = bench.context(WINDOW)
    context = replace(context, target=replace(context.target, is_lmstudio=True))
    plan = await bench.compactor.go_on(Request(messages=parsed(ASKED)), partial, context, ways=("raw",))
    assert plan.ways == ("raw",)
    assert isinstance(plan.prepared, PreparedRequest)
    shown = plan.messages[-1].text
    assert (shown == thoughts) != is_long
    assert thoughts.endswith(shown)
    assert len(shown) > 400
