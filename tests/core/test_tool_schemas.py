"""Slim tool schemas: what a call has to look like stays, and the same tools always become the same bytes."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from litellm_compaction.core.tool_schemas import ARGUMENT_DESCRIPTION_CHARS, TOOL_DESCRIPTION_CHARS, slimmed
from tests.builders import tools
from tests.work import grows_linearly


def tool(parameters: Any, description: str = "Reads a file.") -> dict[str, Any]:
    function = {"name": "read", "description": description, "parameters": parameters, "strict": True}
    return {"type": "function", "function": function}


def slim(parameters: Any) -> Any:
    """The parameters of a tool, slimmed."""
    [found], _ = slimmed([tool(parameters)])
    assert isinstance(found, dict)
    function = found["function"]
    assert isinstance(function, dict)
    return function["parameters"]


def test_what_says_nothing_of_what_is_allowed_goes() -> None:
    """At every depth; enumerations, defaults, limits and what is required stay."""
    kept = {
        "type": "object",
        "properties": {
            "mode": {"type": "string", "enum": ["r", "w"], "default": "r"},
            "lines": {"type": "array", "items": {"anyOf": [{"type": "integer", "minimum": 1}, {"$ref": "#/$defs/n"}]}},
        },
        "required": ["mode"],
        "additionalProperties": False,
        "$defs": {"n": {"const": None}},
    }
    noise = {"title": "T", "examples": [{"a": 1}], "$comment": "c"}
    noisy = {
        **kept,
        **noise,
        "$schema": "http://json-schema.org/draft-07/schema#",
        "properties": {
            "mode": {**kept["properties"]["mode"], **noise},  # type: ignore[index]
            "lines": {
                "type": "array",
                "items": {"anyOf": [{"type": "integer", "minimum": 1, **noise}, {"$ref": "#/$defs/n"}], **noise},
            },
        },
        "$defs": {"n": {"const": None, "title": "N"}},
    }
    assert slim(noisy) == kept
    assert list(slim(noisy)) == [key for key in noisy if key in kept]


def test_long_descriptions_end_with_a_sentence() -> None:
    """The first ones say what a tool is for; where one alone is too long, it ends with a word."""
    told = "Reads a file. " + "It may be long. " * 80
    [found], saved = slimmed([tool({"type": "object", "properties": {"a": {"description": "word " * 90}}}, told)])
    function: Any = found["function"]  # type: ignore[index, call-overload]
    assert function["description"].endswith("It may be long.")
    assert TOOL_DESCRIPTION_CHARS - 20 < len(function["description"]) <= TOOL_DESCRIPTION_CHARS
    shortened = function["parameters"]["properties"]["a"]["description"]
    assert shortened.endswith("word…")
    assert len(shortened) <= ARGUMENT_DESCRIPTION_CHARS
    assert saved > 900


@pytest.mark.parametrize(
    "odd", [None, 7, "read", [], {}, {"type": "function"}, {"function": None}, {"name": 7, "parameters": {}}]
)
def test_what_is_not_understood_is_sent_as_it_came(odd: Any) -> None:
    """The server judges it."""
    [found], saved = slimmed([odd])
    assert found is odd
    assert saved == 0


def test_short_tools_stay_the_same_objects() -> None:
    """And the older `functions` are slimmed like `tools`."""
    short = tools(3)
    assert all(new is old for new, old in zip(slimmed(short).tools, short, strict=True))
    [found], saved = slimmed([{"name": "read", "parameters": {"title": "Read", "type": "object"}}])
    assert found == {"name": "read", "parameters": {"type": "object"}}
    assert saved == len('"title": "Read", ')


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=300),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(["type", "properties", "title", "items", "anyOf", "description", "examples", "enum", "x"]),
            inner,
            max_size=5,
        )
    ),
    max_leaves=20,
)


@given(st.lists(_JSON.map(tool), max_size=4))
def test_slimming_is_stable_and_never_longer(given_tools: list[dict[str, Any]]) -> None:
    """The same bytes each time, nothing more to gain by doing it twice, and what it saves is what it says."""
    before = json.dumps(given_tools, ensure_ascii=False)
    found, saved = slimmed(given_tools)
    assert json.dumps(given_tools, ensure_ascii=False) == before
    assert json.dumps(found) == json.dumps(slimmed(json.loads(before)).tools)
    assert len(before) - len(json.dumps(found, ensure_ascii=False)) == saved >= 0
    assert slimmed(found) == (found, 0)


def test_hostile_schemas_are_linear_work() -> None:
    """Wide, and deeper than anybody nests: what is below the bound stays."""
    wide = {"properties": {f"p{n}": {"type": "string", "title": "t", "description": "d" * 400} for n in range(300)}}
    assert grows_linearly(lambda times: lambda: slimmed([tool(wide)] * times), 4)
    deep: dict[str, Any] = {"title": "T"}
    for _ in range(400):
        deep = {"items": deep}
    assert slim(deep) == deep
