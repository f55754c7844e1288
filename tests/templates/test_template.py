"""Chat templates: what they can render, and that a hostile one cannot hurt."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from types import SimpleNamespace

import jinja2
import pytest

from litellm_compaction.templates import template as templates
from litellm_compaction.templates.environment import TemplateRefusal
from litellm_compaction.templates.template import Template, add_template, template

NAMES = sorted(path.stem for path in (Path(templates.__file__).parent / "jinja").glob("*.jinja"))
MESSAGES = ({"role": "user", "content": "hi <b> ü"},)


@pytest.mark.parametrize("name", NAMES)
def test_every_template_renders_a_message(name: str) -> None:
    """Each of the package's templates compiles and shows a user's text as it is."""
    rendered = template(name).render(MESSAGES, (), bos="<s>", eos="</s>")
    assert "hi <b> ü" in rendered


def test_capabilities_are_found_by_trying() -> None:
    """Tools, calls, system messages and the form of arguments, as the templates are written."""
    assert template("qwen3").renders_tools
    assert template("llama3.1").renders_calls
    assert template("mistral-nemo").takes_objects
    assert template("mistral-nemo").wants_short_ids
    assert not template("llama2").renders_tools
    assert not template("deepseek-v3.1").renders_tools
    assert not template("gemma2").takes_system
    assert template("gpt-oss").takes_developer


@pytest.mark.parametrize(
    "source",
    [
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ cycler.__init__.__globals__ }}",
        "{% include '/etc/passwd' %}",
        "{{ raise_exception('no') }}",
        "{% if %}",
        "{{ messages[7].content.x }}",
        "{{ (" * 500,
        "x" * 300_000,
    ],
)
def test_odd_templates_are_refused(source: str) -> None:
    """Attributes that lead out, changes, no end, no template: those that take time or memory are in tests/security."""
    hostile = Template(source)
    with pytest.raises(TemplateRefusal):
        hostile.render(MESSAGES, ())
    assert not hostile.renders_tools


def test_a_template_that_takes_too_long_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two seconds of processor time, looked at every 256 parts: by a clock that goes on by one at every look."""
    looks = itertools.count()
    slow = Template("{% for a in range(99999) %}{{ a }}{% endfor %}")
    monkeypatch.setattr(templates, "time", SimpleNamespace(thread_time=lambda: float(next(looks))))
    with pytest.raises(TemplateRefusal, match=r"more than 2\.0 s"):
        slow.render(MESSAGES, ())
    assert next(looks) == 4


def test_a_prompt_much_longer_than_its_messages_is_refused() -> None:
    """What a template makes of a client's text is bounded, whoever wrote it."""
    long = Template("{% for a in range(99999) %}{{ messages[0].content * 1000 }}{% endfor %}")
    with pytest.raises(TemplateRefusal, match=r"more than 10\d+ characters"):
        long.render(MESSAGES, ())


def test_the_clients_schemas_may_use_names_of_methods() -> None:
    """A property that is called `items` is still a property, and `items()` a method."""
    shown = Template("{% for k, v in messages[0].items() %}{{ k }}={{ v }};{% endfor %}{{ messages[0]['items'] }}")
    assert shown.render(({"role": "user", "items": "x"},), ()) == "role=user;items=x;x"


def test_dates_have_a_fixed_length_and_json_is_not_escaped() -> None:
    """Counts do not change with the day; `tojson` keeps characters as they are."""
    made = Template("{{ strftime_now('%d %b %Y') }} {{ messages[0].content | tojson }}")
    assert made.render(MESSAGES, ()) == '21 Nov 2026 "hi <b> ü"'


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


def test_joining_and_replacing_work_as_in_jinja() -> None:
    """Operators and filters give what jinja2's own give."""
    source = "{{ 1 ~ 'a' ~ none_there }}|{{ 'aXbX'.replace('X', '-') }}|{{ 'aXbX' | replace('X', '-', 1) }}|"
    source += "{{ [1, 'b'] | join(', ') }}|{{ messages | join('', attribute='role') }}|{{ 1 + 2 }}|{{ [1] + [2] }}"
    assert Template(source).render(MESSAGES, ()) == "1a|a-b-|a-bX|1, b|user|3|[1, 2]"


SUMS = (
    *("'a' + x + ('b' + y)", "x + y + '!'", "x + (y + 'c')", "'a' + (x if x else y) + 'b'", "'a' + x|upper + 'b'"),
    *("x + y", "1 + 2", "([1] + [2])[1]", "'a' ~ 1 ~ none ~ x ~ nothing", "x ~ (1 + 2)", "('a' + x) ~ 'b' ~ y + 'c'"),
    *(
        "'a' + m(x + 'b') + 'c'",
        "m('a' ~ x ~ 2)",
        "('a' + x)|length",
        "'a' + ns.v + 'b'",
        "'a' + message.get('v') + 'b'",
    ),
    *("'a' + 1", "1 + 'a'", "1 + 2 + 'a'", "'a' + none", "'a' + nothing", "[1] + 'a'", "'a' + [1]", "ns.v + 1 + 'a'"),
)


@pytest.mark.parametrize("source", SUMS)
def test_what_is_written_in_parts_is_what_jinja_writes(source: str) -> None:
    """Sums and joined values, also in macros and blocks: the same text as without us, or refused as well."""
    whole = (
        "{% macro m(v) %}<{{ v + '' }}>{{ "
        + source.replace("m(", "(")
        + " }}{% endmacro %}{% set ns = namespace(v='n') %}"
        "{% set message = messages[0] %}{% set x = message.x %}{% set y = message.y %}"
        "{% set b %}{{ " + source + " }}{% endset %}{{ " + source + " }}|{{ b }}"
    )
    message = {"role": "user", "content": "x", "x": "X \u00fc", "y": "Y", "v": "V"}
    try:
        plain = jinja2.Environment()  # noqa: S701 - prompts are no HTML
        expected: str | None = plain.from_string(whole).render(messages=[message])
    except (jinja2.UndefinedError, TypeError):
        expected = None
    try:
        made: str | None = Template(whole).render([message], ())
    except TemplateRefusal:
        made = None
    assert made == expected


def test_templates_can_be_added() -> None:
    """A template from elsewhere gets a name; an unknown name is an error."""
    add_template("test:added", "{{ messages[0].content }}{% generation %}!{% endgeneration %}")
    assert template("test:added").render(MESSAGES, ()) == "hi <b> ü!"
    with pytest.raises(KeyError):
        template("no such template")
