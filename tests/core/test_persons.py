"""The list of given names: of one shape, and everything in it can be found."""

from __future__ import annotations

import sys
from collections import Counter
from importlib import resources

from litellm_compaction import core
from litellm_compaction.core.persons import persons

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

NAMES = tomllib.loads(resources.files(core).joinpath("given_names.toml").read_text(encoding="utf-8"))["names"]


def test_a_form_belongs_to_one_name() -> None:
    """In lower case, before the bar of one line only."""
    forms = Counter(form for line in NAMES.strip().split("\n") for form in line.partition("|")[0].split())
    assert forms
    assert [form for form, count in forms.items() if count > 1] == []
    assert [form for form in forms if form != form.casefold() or not form.isalpha()] == []


def test_no_name_has_a_form_on_both_sides_of_its_bar() -> None:
    """A form is looked for in a summary, or it is not."""
    for line in NAMES.strip().split("\n"):
        forms, _, words = line.partition("|")
        assert forms.split()
        assert not set(forms.split()) & set(words.split())


def test_whom_a_line_names() -> None:
    """Given names in their inflections, surnames behind titles, and what stands beside them."""
    found = [(each.text, each.before, each.behind) for each in persons("The Reviewer Anna Schmidt met Dr. Meyer.")]
    assert found == [("anna", "reviewer", "schmidt"), ("meyer", "", "")]
    assert [each.text for each in persons("Annas Buch, Игоря и Анной; anna, ANNA, Anna-Lena, anna@b.example")] == [
        "annas",
        "игоря",
        "анной",
    ]
