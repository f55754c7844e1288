"""Terms of texts and queries."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from litellm_compaction.recall.index import _sought, sought, terms
from tests.work import grows_linearly


@pytest.mark.parametrize(
    ("query", "text"),
    [
        ("painting", "She painted it"),
        ("CAFÉ", "the cafe"),
        ("content length", "prepare_content_length"),
        ("user name", "getUserName"),
        ("prepare_content_length", "call prepare_content_length()"),
        ("parser.c", "src/libponyc/ast/parser.c:120:4"),
        ("src/ast/parser.c", "in src/ast/parser.c:12."),
        ("1250", "it costs $1,250.00"),
        ("5094406", "gift_card_5094406"),
        ("550E8400-E29B-41D4-A716-446655440000", "id=550e8400-e29b-41d4-a716-446655440000;"),
        ("45", "超时时间是45秒"),
        ("名字", "我的名字是王峰"),
        ("포트", "스테이징 포트는"),
        ("पासवर्ड", "नया पासवर्ड है"),
        ("ภาษา", "พูดภาษาไทย"),
        ("паролем", "пароль"),
        ("ｆｕｌｌ", "full"),
    ],
)
def test_a_query_and_a_text_share_a_term(query: str, text: str) -> None:
    """Forms of a word, parts of an identifier, spellings of a number and all scripts meet."""
    assert set(terms(query)) & set(terms(text))


@pytest.mark.parametrize(
    ("query", "text"), [("4812", "4813"), ("v2", "v3"), ("cat", "dog"), ("猫", "犬"), ("...", "…")]
)
def test_others_share_none(query: str, text: str) -> None:
    """What differs does not meet."""
    assert not set(terms(query)) & set(terms(text))


@pytest.mark.parametrize(
    "run", ["omar_davis_3817", "a3f9c2e1", "90210", "getUserName", "src/a/b", "me@there.org", "main.py", "7/5/2023"]
)
def test_an_id_is_known_by_its_form(run: str) -> None:
    """It names one thing, and is the first of its terms as it is written."""
    (found,) = sought(run)
    assert found.is_id
    assert found.terms[0] == run.lower()


@pytest.mark.parametrize("run", ["follow-up", "and/or", "don't", "Melanie", "2023", "v2", "NASA", "名字123456"])
def test_a_word_is_no_id(run: str) -> None:
    """A hyphen, a year or a short form says nothing alone."""
    assert not any(each.is_id for each in sought(run))


@given(st.text(max_size=300))
def test_any_text_has_terms_and_they_are_its_querys(text: str) -> None:
    """A query is read as a text is: whatever is typed is found where it stands."""
    assert {term for each in sought(text) for term in each.terms} == set(terms(text))


@pytest.mark.parametrize("unit", ["a.", "1,", "_", "."])
def test_hostile_text_is_linear_work(unit: str) -> None:
    """Twice as much of it is twice the work."""

    def anew(text: str) -> None:
        _sought.cache_clear()
        terms(text)

    assert grows_linearly(lambda times: lambda: anew("a" + unit * times), 2_000)
