"""The table of words that signal rules and conditions: of one shape, and no part is passed over."""

from __future__ import annotations

import sys
from importlib import resources
from typing import Any

import pytest

from litellm_compaction import core

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_TABLES: dict[str, dict[str, Any]] = tomllib.loads(
    resources.files(core).joinpath("languages.toml").read_text(encoding="utf-8")
)
_KINDS = {"rules", "conditions"}


@pytest.mark.parametrize("language", _TABLES)
def test_a_language_says_each_kind_of_words(language: str) -> None:
    """Exactly those kinds that are looked for, in words of lower case, none of them twice.

    And the commonest words, where another language is written in the same script.
    """
    table = _TABLES[language]
    words = table.get("unspaced", table)
    assert set(table) == {"unspaced"} or set(table) - {"common"} == _KINDS
    assert set(words) - {"common"} == _KINDS
    for kind, listed in words.items():
        assert isinstance(listed, str), kind
        assert listed.split(), kind
        assert listed == listed.lower(), kind
        assert len(set(listed.split())) == len(listed.split()), kind
