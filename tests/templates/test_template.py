"""Chat templates: what they can render, and that a hostile one cannot hurt."""

from __future__ import annotations

import itertools
from pathlib import Path
from types import SimpleNamespace

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


def test_templates_can_be_added() -> None:
    """A template from elsewhere gets a name; an unknown name is an error."""
    add_template("test:added", "{{ messages[0].content }}{% generation %}!{% endgeneration %}")
    assert template("test:added").render(MESSAGES, ()) == "hi <b> ü!"
    with pytest.raises(KeyError):
        template("no such template")
