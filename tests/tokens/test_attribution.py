"""What is remembered of the pieces of a prompt changes no number."""

from __future__ import annotations

import asyncio
import json
import re
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from litellm_compaction.core.messages import Request, parse_message
from litellm_compaction.templates import template
from litellm_compaction.tokenizers.encoders import CharactersEncoder, VocabularyData
from litellm_compaction.tokenizers.families import Family, family_of
from litellm_compaction.tokenizers.registry import install_vocabulary
from litellm_compaction.tokenizers.vocabulary import Vocabulary
from litellm_compaction.tokens.prefix import fingerprints
from litellm_compaction.tokens.rendered import Counting

TEMPLATES = sorted(path.stem for path in (Path(template.__file__).parent / "jinja").glob("*.jinja"))
SPECIAL = re.compile(r"<[^<>\s]{1,40}>|\[/?[A-Z_]{3,}\]")
LONG = "One more sentence, so that the text is long enough to be remembered. " * 40
TOOL = {
    "type": "function",
    "function": {"name": "look", "description": "Looks.", "parameters": {"type": "object", "properties": {}}},
}
TOOLS = (TOOL, {"type": "function", "function": {"name": "hear", "description": "Hears.", "parameters": {}}})


@cache
def family(name: str) -> Family:
    """A family with one of the package's templates, whose vocabulary knows the template's special tokens only."""
    vocabulary = f"characters of {name}"
    named = set(SPECIAL.findall(template.template(name).source)) | {"<s>", "</s>"}
    # What follows a special token may make it another one.
    tokens = (*sorted(named), *(f"{token}{more}" for token in sorted(named) for more in ("z", "\nz")))
    data = VocabularyData(
        kind="bpe",
        pre="",
        tokens=tokens,
        scores=(),
        token_types=(3,) * len(tokens),
        merges=(),
        bos_id=tokens.index("<s>"),
        eos_id=tokens.index("</s>"),
        adds_bos=False,
    )
    install_vocabulary(vocabulary, Vocabulary(data, CharactersEncoder()))
    base = family_of("llama", "llama-3.1-8b")
    return replace(base, vocabulary=vocabulary, template=name, tool_template="")


TEXT = st.one_of(
    st.sampled_from(
        ["ok", "z", "zebra", "", LONG, f'"{LONG}"\n', "</s>z", "<think>a</think>b", "look", "a\nb", "<|im_end|>"]
    ),
    st.text(max_size=30),
)


def call(text: str) -> list[dict[str, Any]]:
    arguments = json.dumps({"path": text})
    return [{"id": "call00001", "type": "function", "function": {"name": "look", "arguments": arguments}}]


def tool_round(text: str, result: str) -> list[dict[str, Any]]:
    return [
        {"role": "assistant", "content": "", "tool_calls": call(text)},
        {"role": "tool", "tool_call_id": "call00001", "content": result},
    ]


ANSWER = st.one_of(
    st.builds(lambda text: [{"role": "assistant", "content": text}], TEXT),
    st.builds(lambda text, thought: [{"role": "assistant", "content": text, "reasoning_content": thought}], TEXT, TEXT),
    st.builds(
        lambda path, result, text: [*tool_round(path, result), {"role": "assistant", "content": text}], TEXT, TEXT, TEXT
    ),
)
EXCHANGE = st.builds(lambda answer, text: [*answer, {"role": "user", "content": text}], ANSWER, TEXT)
STEP = st.one_of(
    st.tuples(st.just("append"), EXCHANGE),
    st.tuples(st.just("append"), EXCHANGE),
    st.tuples(st.just("cut"), st.integers(1, 3)),
    st.tuples(st.just("edit"), st.tuples(st.integers(0, 12), TEXT)),
    st.tuples(st.just("system"), TEXT),
    st.tuples(st.just("tools"), st.integers(0, 2)),
)


def changed(
    said: list[dict[str, Any]], system: str, tools: int, step: tuple[str, Any]
) -> tuple[list[dict[str, Any]], str, int]:
    what, value = step
    if what == "append":
        return [*said, *value], system, tools
    if what == "cut":
        return said[:-value], system, tools
    if what == "edit" and said:
        index, text = value
        at = index % len(said)
        return [*said[:at], {**said[at], "content": text}, *said[at + 1 :]], system, tools
    return said, value if what == "system" else system, value if what == "tools" else tools


@pytest.mark.slow
@settings(max_examples=settings().max_examples * 4, deadline=None)
@given(name=st.sampled_from(TEMPLATES), steps=st.lists(STEP, min_size=2, max_size=7), first=TEXT)
def test_what_is_remembered_changes_no_number(name: str, steps: list[tuple[str, Any]], first: str) -> None:
    """Turns appended, cut off and edited, other tools, another system prompt: as if each were the first request."""
    remembering = Counting()
    said: list[dict[str, Any]] = [{"role": "user", "content": first}]
    system, tools = "You help.", 0
    for step in steps:
        said, system, tools = changed(said, system, tools, step)
        messages = [{"role": "system", "content": system}, *said]
        request = Request(messages=tuple(map(parse_message, messages)), tools=TOOLS[:tools])
        made = asyncio.run(remembering.count(family(name), request, fingerprints(request)))
        assert made == asyncio.run(Counting().count(family(name), request))
