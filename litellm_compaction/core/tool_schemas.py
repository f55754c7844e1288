"""Tool schemas without what a model hardly needs: examples, titles, dialects, and the rest of very long descriptions.

Agents send ten to twenty thousand tokens of schemas with every request, which no compaction can shrink. The shape of a
call stays: names, types, enumerations, defaults, limits, and what is required. The same schemas always become the same
bytes, so that a server's cache of them stays warm.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from litellm_compaction.core.messages import JsonValue

# Of a tool's purpose, and of an argument's meaning.
TOOL_DESCRIPTION_CHARS, ARGUMENT_DESCRIPTION_CHARS = 600, 160
# Keywords of JSON Schema that neither allow nor forbid (json-schema.org, draft 2020-12, core 8 and validation 9).
_LEFT_OUT = frozenset(("$schema", "$id", "$comment", "title", "examples", "example"))
# Keywords whose value is a schema, a list of schemas, or schemas by names, which are no keywords (ibid., core 10).
_SCHEMAS = frozenset(
    (
        *("items", "prefixItems", "contains", "additionalProperties", "propertyNames", "unevaluatedItems"),
        *("unevaluatedProperties", "additionalItems", "anyOf", "oneOf", "allOf", "not", "if", "then", "else"),
    )
)
_BY_NAME = frozenset(("properties", "patternProperties", "$defs", "definitions", "dependentSchemas"))
# Deeper values stay as they are.
_MOST_DEEP = 40
_ENDS = (". ", ".\n", "。", "! ", "? ", "\n")


class Slimmed(NamedTuple):
    """Tools, and how many characters of JSON they have fewer."""

    tools: tuple[JsonValue, ...]
    saved_chars: int


def slimmed(tools: Sequence[JsonValue]) -> Slimmed:
    """OpenAI's `tools` or `functions`, slimmed; those that are not understood stay the same objects."""
    found = tuple(_tool(tool) for tool in tools)
    changed = ((old, new) for old, new in zip(tools, found, strict=True) if new is not old)
    return Slimmed(found, sum(_chars(old) - _chars(new) for old, new in changed))


def _chars(value: JsonValue) -> int:
    return len(json.dumps(value, ensure_ascii=False))


def _tool(tool: JsonValue) -> JsonValue:
    if not isinstance(tool, Mapping):
        return tool
    changed: JsonValue = tool
    if isinstance(function := tool.get("function"), Mapping):
        changed = {**tool, "function": _function(function)}
    elif "parameters" in tool and isinstance(tool.get("name"), str):
        changed = _function(tool)
    return tool if changed == tool else changed


def _function(function: Mapping[str, JsonValue]) -> dict[str, JsonValue]:
    changed = dict(function)
    if isinstance(said := function.get("description"), str):
        changed["description"] = _shortened(said, TOOL_DESCRIPTION_CHARS)
    if "parameters" in function:
        changed["parameters"] = _schema(function["parameters"], _MOST_DEEP)
    return changed


def _schema(schema: JsonValue, deep: int) -> JsonValue:
    if isinstance(schema, list) and deep:
        return [_schema(each, deep - 1) for each in schema]
    if not isinstance(schema, Mapping) or not deep:
        return schema
    found: dict[str, JsonValue] = {}
    for key, value in schema.items():
        if key in _LEFT_OUT:
            continue
        if key == "description" and isinstance(value, str):
            found[key] = _shortened(value, ARGUMENT_DESCRIPTION_CHARS)
        elif key in _BY_NAME and isinstance(value, Mapping):
            found[key] = {name: _schema(each, deep - 1) for name, each in value.items()}
        else:
            found[key] = _schema(value, deep - 1) if key in _SCHEMAS else value
    return found


def _shortened(text: str, most_chars: int) -> str:
    """The first sentences of a text; if even one is too long, its first words."""
    if len(text) <= most_chars:
        return text
    head = text[:most_chars]
    end = max(head.rfind(sign) + len(sign.rstrip()) if sign in head else 0 for sign in _ENDS)
    if end < most_chars // 3:
        end = head.rfind(" ") if " " in head else most_chars - 1
        return f"{head[:end].rstrip()}…"
    return head[:end].rstrip()
