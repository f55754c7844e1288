"""The page as drawn from data: every value escaped, nothing loaded, only its own script run; turns as lines."""

from __future__ import annotations

import base64
import hashlib
import json
from dataclasses import replace
from html.parser import HTMLParser
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from litellm_compaction.errors import WindowUnknown
from litellm_compaction.events import CompactionEvent, TruncationAlarm
from litellm_compaction.proxy.live_settings import Change
from litellm_compaction.proxy.page.auth import Visitor
from litellm_compaction.proxy.page.data import _state
from litellm_compaction.proxy.page.turns import Drop, Talk, Turn, turn_from_json, turn_to_json
from litellm_compaction.proxy.page.view import SCRIPT, SECURITY_HEADERS, STYLE, Content, Field, Notice, page, plain_page
from litellm_compaction.proxy.report import DeploymentReport
from litellm_compaction.windows.windows import Target

HOSTILE = "<script>alert(1)</script>\"' onmouseover=x &amp; \x00\ud800\u202e"
_VOID = {"meta", "input", "br", "wbr"}
SIZES: dict[str, Any] = {"window_tokens": 8192, "when_s": 1e9}


class Reader(HTMLParser):
    """Elements, attributes and text; complains about what is not closed."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in _VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def content(
    word: str = "local", numbers: tuple[int, int, int, int] = (7000, 3000, 4000, 8192), **changes: Any
) -> Content:
    """A page of which every text is `word`."""
    before, prompt, written, window = numbers
    turn = Turn(
        when_s=1e9,
        talk="abc123",
        model=word,
        tenant="tenant",
        program=word,
        messages=1,
        before_tokens=before,
        prompt_tokens=prompt,
        filled_tokens=prompt + written,
        window_tokens=window,
        compact_ratio=0.8,
        carry_ratio=0.9,
        action="compacted",
        restarts=[Drop(before, prompt)],
    )
    field = Field(
        key="mode",
        label="Mode",
        description=word,
        value="guard",
        configured=word,
        change=Change("guard", 1e9, word),
        options=[("guard", "guard"), (word, word)],
        problem=word,
    )
    shown: dict[str, Any] = {
        "visitor": Visitor(role="proxy_admin", tenant="t", auth=None),
        "revision": word,
        "fields": [field],
        "notices": [Notice("problem", word)],
        "rows": [],
        "talks": [Talk([turn, turn])],
        "more_talks": 3,
        "events": [
            CompactionEvent(
                outcome="compacted",
                phase="pre_request",
                model=word,
                window_source="api/v1",
                tokens_before=7000,
                tokens_after=3000,
                pruning_model=word,
                reason=word,
                **SIZES,
            ),
            TruncationAlarm(model=word, expected_tokens=9000, reported_tokens=4000, reason=word, **SIZES),
        ],
    }
    return Content(**{**shown, **changes})


def skeleton(text: str) -> list[tuple[str, tuple[str, ...]]]:
    """Elements and their attributes' names, without what a name that equals a setting's value chooses."""
    return [
        (name, tuple(key for key in attributes if key not in ("selected", "checked")))
        for name, attributes in Reader(text).elements
        if name != "wbr"
    ]


@given(st.text(st.characters()) | st.just(HOSTILE))
def test_no_value_becomes_markup(word: str) -> None:
    """Whatever a client calls its model: the same elements with the same attributes as for a plain name."""
    assert skeleton(page(content(word or "x"))) == skeleton(page(content("plain")))
    assert skeleton(plain_page(word)) == skeleton(plain_page("plain"))


def test_nothing_is_loaded_and_one_script_is_run() -> None:
    """Style sheet and script are those whose hash the header allows; no inline handler, no address outside."""
    policy = SECURITY_HEADERS["Content-Security-Policy"]
    for text in (page(content()), plain_page("x")):
        for tag, source in (("style", STYLE), ("script", SCRIPT)):
            assert (text.count(f"<{tag}"), text.count(f"<{tag}>{source}</{tag}>")) == (1, 1)
            digest = base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()
            assert f"; {tag}-src 'sha256-{digest}';" in policy
        for name, attributes in Reader(text).elements:
            assert name not in {"link", "img", "iframe", "object"}
            assert not [key for key in attributes if key.startswith("on") or key in ("style", "src", "action")]
            assert attributes.get("href") in (None, "?")
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy


@pytest.mark.parametrize("when_s", [1e300, float("inf"), float("nan")])
def test_a_time_that_no_calendar_has_is_empty(when_s: float) -> None:
    """A damaged event must not take the page away; any other time is UTC."""
    good, damaged = (
        page(content(events=[replace(content().events[1], when_s=each)], fields=[], talks=[])) for each in (1e9, when_s)
    )
    assert ('<time datetime="2001-09-09T01:46:40Z">' in good, "2001" in damaged) == (True, False)


_TARGET = Target(key="1|m", model="m", api_base="http://10.0.0.7/v1", api_key=None, context_length=None)


def test_why_nobody_knows_a_window_is_not_everybodys_business() -> None:
    """The error names the server; only who sees all is told."""
    report = DeploymentReport(target=_TARGET, carrier="hooks", absence=WindowUnknown("m", tried="10.0.0.7 says no"))
    assert "10.0.0.7" in _state(report, Visitor(role="proxy_admin", tenant="t", auth=None))
    assert _state(report, Visitor(role="internal_user", tenant="t", auth=None)) == "not known"


TURN = Turn(
    talk="abcdef0123",
    model="mødel\ud800",
    tenant="anna",
    when_s=1.5,
    messages=3,
    before_tokens=10,
    prompt_tokens=9,
    filled_tokens=12,
    window_tokens=8192,
    compact_ratio=0.8,
    carry_ratio=0.9,
    action="compacted",
    restarts=[Drop(7000, 2000)],
)


_BAD: list[dict[str, object]] = [
    {"when_s": float("nan")},
    {"compact_ratio": float("inf")},
    {"window_tokens": -1},
    {"filled_tokens": 10**400},
    {"action": "exploded"},
    {"restarts": [[1]]},
    {"messages": None},
]


@given(
    st.text(max_size=40) | st.sampled_from(_BAD).map(lambda bad: json.dumps({**json.loads(turn_to_json(TURN)), **bad}))
)
def test_lines_that_this_version_cannot_read_are_passed_over(text: str) -> None:
    """Whatever another version, or somebody else, has written."""
    assert turn_from_json(text) is None


@pytest.mark.parametrize("turn", [TURN, replace(TURN, action="none", restarts=[])])
def test_a_line_is_read_as_it_was_written(turn: Turn) -> None:
    """Every number of it, and any name."""
    assert turn_from_json(turn_to_json(turn)) == turn
    newer = json.dumps({**json.loads(turn_to_json(turn)), "of another version": 1})
    assert turn_from_json(newer) == turn
