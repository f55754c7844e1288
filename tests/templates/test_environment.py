"""What a compiled template writes: what transformers and llama.cpp write."""

from __future__ import annotations

import json

import pytest

from litellm_compaction.templates.template import Template

MESSAGES = ({"role": "user", "content": "hi <b> ü"},)


def test_indented_json_is_what_python_writes() -> None:
    """Also the second time, for each width, and for values that differ only in what the quick form shows last."""
    values = [
        {"a": [1, 1.5, None, True, "ü\n"], "b": {}},
        {"b": {}, "a": [1]},
        {"b": {}, "a": [True]},
        "x" * 20_000,
        [],
    ]
    for value in [*values, *values]:
        for width in (2, 4):
            made = Template(f"{{{{ messages[0].content | tojson(indent={width}) }}}}")
            rendered = made.render(({"role": "user", "content": value},), ())
            assert rendered == json.dumps(value, indent=width, ensure_ascii=False)


@pytest.mark.parametrize(
    ("source", "shown"),
    [
        ("{{ 1 ~ 'a' ~ none_there }}|{{ 1 + 2 }}|{{ [1] + [2] }}", "1a|3|[1, 2]"),
        ("{{ 'aXbX'.replace('X', '-') }}|{{ 'aXbX' | replace('X', '-', 1) }}", "a-b-|a-bX"),
        ("{{ [1, 'b'] | join(', ') }}|{{ messages | join('', attribute='role') }}", "1, b|user"),
        # A property that is called `items` is still a property, and `items()` a method.
        ("{% for k, v in messages[0].items() %}{{ k }};{% endfor %}{{ messages[0]['items'] }}", "role;content;items;x"),
        # Counts do not change with the day; `tojson` keeps characters as they are.
        ("{{ strftime_now('%d %b %Y') }} {{ messages[0].content | tojson }}", '21 Nov 2026 "hi <b> ü"'),
    ],
)
def test_operators_and_filters_give_what_jinjas_own_give(source: str, shown: str) -> None:
    assert Template(source).render(({**MESSAGES[0], "items": "x"},), ()) == shown
