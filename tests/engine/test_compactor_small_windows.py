"""Windows under 4,096 tokens: a short instruction leaves room for a summary, in both modes and behind a restart."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from litellm_compaction.core.strategies import STRATEGIES
from litellm_compaction.engine import PruningModel
from tests.builders import JsonDict, chat, conversation, parsed, talk
from tests.lmstudio_double import numbered_words
from tests.proxy.scripted import Scene, Turn, goes_on, summarized


def full(window: int) -> list[JsonDict]:
    """A chat that fills three quarters of a window."""
    return next(
        raw for turns in range(200) if conversation(parsed(raw := chat(turns, words=20))).tokens > 0.75 * window
    )


def _is_brief(prompt: str, strategy: str = "summary") -> bool:
    found = STRATEGIES[strategy]
    last_lines = [
        prompt_of.rpartition("\n")[0].rpartition("- `")[2] for prompt_of in (found.brief_prompt, found.prompt)
    ]
    assert [line in prompt for line in last_lines] in ([True, False], [False, True])
    return last_lines[0] in prompt


@pytest.mark.parametrize("is_same", [True, False], ids=["append", "reformat"])
@pytest.mark.parametrize("window", [2048, 3072])
async def test_a_restart_gets_a_summary(window: int, is_same: bool) -> None:
    """An answer outgrows its window: the conversation is summarized, and the model goes on behind the summary."""
    asked: list[int] = []

    async def ask(messages: Any, **options: Any) -> Any:
        asked.append(len(messages))
        assert _is_brief(messages[-1].text)
        return await summarized(messages, **options)

    words = numbered_words(int(0.55 * window))
    scene = Scene(talk("small", int(0.4 * window)), [Turn(reply=goes_on(words))], window_tokens=window, ask=ask)
    if not is_same:
        [same] = scene.context.pruning_models
        other = PruningModel(label="other", target=same.target, ask=ask, is_same=False)
        scene.context = replace(scene.context, pruning_models=(other,))
    read = await scene.read()
    assert (read.text, read.finish_reasons) == (words, ["stop"])
    assert {each > 1 for each in asked} == {is_same}
    messages = scene.server.opened[1].messages
    assert messages is not None
    record = (await summarized([], max_tokens=100)).text
    assert record in messages[1].text
