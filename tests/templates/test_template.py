"""Chat templates: what each can render, and that no client's text makes one work without end."""

from __future__ import annotations

import hashlib
import itertools
import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from litellm_compaction import templates
from litellm_compaction.templates import Template, TemplateRefusal, template
from tools.build_packs import traits

FOLDER = Path(templates.__file__).parent / "jinja"
NAMES = sorted(path.stem for path in FOLDER.glob("*.jinja"))
MESSAGES = ({"role": "user", "content": "hi <b> ü"},)


@pytest.mark.parametrize("name", NAMES)
def test_every_template_renders_a_message_and_has_the_traits_that_are_written_down(name: str) -> None:
    """A user's text is shown as it is; the list of traits and the checksums say what a trial says."""
    found = template(name)
    assert "hi <b> ü" in found.render(MESSAGES, (), bos="<s>", eos="</s>")
    tried = traits(found.source)
    assert found.traits == set(tried)
    digest = hashlib.sha256((FOLDER / f"{name}.jinja").read_bytes()).hexdigest()
    assert f"{digest}  {name}.jinja" in (FOLDER / "SHA256SUMS").read_text().splitlines()


@pytest.mark.parametrize("source", ["{{ raise_exception('no') }}", "{{ messages[7].content.x }}", "{{ 'a' + 1 }}"])
def test_a_template_that_fails_is_a_refusal(source: str) -> None:
    """Its own words, or an error of Python's."""
    with pytest.raises(TemplateRefusal):
        Template(source).render(MESSAGES, ())


def test_a_template_that_takes_too_long_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two seconds of processor time, looked at every 256 parts: by a clock that goes on by one at every look."""
    looks = itertools.count()
    slow = Template("{% for a in range(99999) %}{{ a }}{% endfor %}")
    monkeypatch.setattr(templates, "time", SimpleNamespace(thread_time=lambda: float(next(looks))))
    with pytest.raises(TemplateRefusal, match=r"more than 2\.0 s"):
        slow.render(MESSAGES, ())
    assert next(looks) == 4


def test_a_prompt_much_longer_than_its_messages_is_refused() -> None:
    """What a template makes of a client's text is bounded: indented schemas of any depth, for one."""
    long = Template("{% for a in range(99999) %}{{ messages[0].content * 1000 }}{% endfor %}")
    with pytest.raises(TemplateRefusal, match=r"more than 16000000 characters"):
        long.render(MESSAGES, ())


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
