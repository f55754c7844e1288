"""Chat templates: what each can render, and that no client's text makes one work without end."""

from __future__ import annotations

import hashlib
import itertools
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
    slow = Template("{% for a in messages[0].content %}{{ a }}{% endfor %}")
    monkeypatch.setattr(templates, "time", SimpleNamespace(thread_time=lambda: float(next(looks))))
    assert slow.render(({"content": "x" * 767},), ()) == "x" * 767
    with pytest.raises(TemplateRefusal, match=r"more than 2\.0 s"):
        slow.render(({"content": "x" * 768},), ())


def test_a_prompt_much_longer_than_its_messages_is_refused() -> None:
    """What a template makes of a client's text is bounded: indented schemas of any depth, for one."""
    long = Template("{{ '1234' * messages[0].times }}{{ messages[0].end }}")
    assert len(long.render(({"times": 4_000_000},), ())) == 16_000_000
    with pytest.raises(TemplateRefusal, match=r"more than 16000000 characters"):
        long.render(({"times": 4_000_000, "end": "5"},), ())


@pytest.mark.parametrize(
    ("source", "shown"),
    [
        # Counts do not change with the day; `tojson` keeps characters as they are, and shows 1.0 as engines do.
        ("{{ strftime_now('%d %b %Y') }} {{ messages[0].content | tojson }}", '21 Nov 2026 "hi <b> ü"'),
        ("{{ [1.0, 1.5, 1e21, none, true] | tojson }} {{ 2.0 | string }}", "[1, 1.5, 1e+21, null, true] 2"),
        ("{{ {'a': [1.0]} | tojson(indent=2) }}", '{\n  "a": [\n    1\n  ]\n}'),
    ],
)
def test_values_are_written_as_engines_do(source: str, shown: str) -> None:
    assert Template(source).render(MESSAGES, ()) == shown
