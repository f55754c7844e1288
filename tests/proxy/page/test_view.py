"""The page as drawn from data: every value escaped, everything said, nothing needed but HTML."""

from __future__ import annotations

import base64
import hashlib
import re
import time
from collections.abc import Iterator
from dataclasses import replace
from html.parser import HTMLParser
from typing import Any, get_args
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from litellm_compaction.config import DeploymentSettings, settings_from
from litellm_compaction.engine import Standing
from litellm_compaction.events import BY_PLAN, CompactionEvent, ContinuationEvent, Cut, TruncationAlarm
from litellm_compaction.proxy.deployments import GuardedDeployment
from litellm_compaction.proxy.live_settings import Change
from litellm_compaction.proxy.page.auth import Visitor
from litellm_compaction.proxy.page.turns import Accuracy, Drop, Talk, Turn
from litellm_compaction.proxy.page.view import (
    SCRIPT,
    SECURITY_HEADERS,
    STYLE,
    Content,
    Field,
    Notice,
    Row,
    _clock,
    page,
    plain_page,
)
from litellm_compaction.proxy.report import DeploymentReport
from litellm_compaction.proxy.routing import Deployment
from litellm_compaction.tokenizers.families import family_of
from litellm_compaction.tokenizers.sources import TokenizerSource
from litellm_compaction.windows.windows import Target, Window

HOSTILE = "<script>alert(1)</script>\"' onmouseover=x &amp; \x00\ud800\u202e"
_VOID = {"meta", "input", "br", "wbr"}


class _Reader(HTMLParser):
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

    def all(self, name: str) -> Iterator[dict[str, str | None]]:
        return (attributes for element, attributes in self.elements if element == name)


def turn(when_s: float, before: int, prompt: int, filled: int, window: int, **fields: Any) -> Turn:
    known: dict[str, Any] = {"talk": "abc123", "model": "local", "tenant": "tenant", "messages": 1, **fields}
    return Turn(
        when_s=when_s,
        before_tokens=before,
        prompt_tokens=prompt,
        filled_tokens=filled,
        window_tokens=window,
        **{"compact_ratio": 0.8, "carry_ratio": 0.9, **known},
    )


def talk(model: str = "local", turns: int = 5) -> Talk:
    made = Talk([turn(1e9 + n, 1000 * n, 900 * n, 950 * n, 8192, model=model) for n in range(turns)])
    if turns > 1:
        made.turns[-1].action = "compacted"
        made.turns[-1].restarts = [Drop(7400, 2000)]
    return made


ADMIN = Visitor(role="proxy_admin", tenant="t", auth=None)
FAMILY = family_of("qwen3", "")


def row(word: str, family: Any, **fields: Any) -> Row:
    """A deployment's, which is called `word`; without a window if it has no family."""
    target = Target(key="1|m", model=word, api_base=None, api_key=None, context_length=None)
    deployment = Deployment(
        id="1", group=word, provider="lm_studio", kind="lm_studio", target=target, settings=DeploymentSettings()
    )
    report = DeploymentReport(target=target, carrier="transport")
    if family is not None:
        report = replace(
            report,
            window=Window(tokens=8192, source="api/v1", architecture="", instance_id=word, parallel=2, read_s=0.0),
            source=TokenizerSource(kind="pack", family=family),
            standing=Standing(("prefill", "turn"), ("prefill",)),
        )
    return Row(guard=GuardedDeployment(deployment, settings_from(None)), report=report, **fields)


def content(word: str = "local", **changes: Any) -> Content:
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
    number = Field(key="target_ratio", label="Down to", description=word, value=word, configured="0.4")
    family = replace(FAMILY, name=word, vocabulary=word, owns_vocabulary=False)
    shown = row(word, family, accuracy=Accuracy(1000, 900), own=[word], conflict=word)
    event = CompactionEvent(
        outcome="compacted",
        phase="pre_request",
        model=word,
        window_tokens=8192,
        window_source="api/v1",
        tokens_before=7000,
        tokens_after=3000,
        round=2,
        pruning_model=word,
        summary_calls=1,
        summary_ms=1500.0,
        reason=word,
        when_s=1e9,
    )
    alarm = TruncationAlarm(
        model=word, window_tokens=8192, expected_tokens=9000, reported_tokens=4000, reason=word, when_s=1e9
    )
    cut = ContinuationEvent(
        outcome="attempts",
        model=word,
        window_tokens=8192,
        attempt=3,
        attempts=3,
        tokens_before=7900,
        tokens_after=7900,
        when_s=1e9,
    )
    known: dict[str, Any] = {
        "visitor": ADMIN,
        "revision": word,
        "fields": [field, number],
        "notices": [Notice("problem", word)],
        "rows": [shown, row(word, None, state=word)],
        "talks": [talk(word)],
        "more_talks": 3,
        "events": [event, alarm, cut],
    }
    return Content(**{**known, **changes})


def plot(made: Talk) -> str:
    """A conversation's picture, as it stands in the page."""
    text = page(content(talks=[made]))
    return text[text.index("<figure") : text.index("</figure>")] + "</figure>"


def skeleton(text: str) -> list[tuple[str, tuple[str, ...]]]:
    """Elements and their attributes' names, without what a name that equals a setting's value chooses.

    A name with a slash has a place where its line may break.
    """
    return [
        (name, tuple(key for key in attributes if key not in ("selected", "checked")))
        for name, attributes in _Reader(text).elements
        if name != "wbr"
    ]


@given(st.text(st.characters()) | st.just(HOSTILE))
def test_no_value_becomes_markup(word: str) -> None:
    """Whatever a client calls its model: the same elements with the same attributes as for a plain name."""
    assert skeleton(page(content(word or "x"))) == skeleton(page(content("plain")))
    visitors = [Visitor(role=role, tenant="t", auth=None) for role in (word, "plain")]
    assert len({str(skeleton(page(content(visitor=visitor)))) for visitor in visitors}) == 1
    assert skeleton(plain_page(word)) == skeleton(plain_page("plain"))


@given(st.text(st.characters()))
def test_what_is_escaped_can_be_read(word: str) -> None:
    """In an element and in an attribute, but for characters that HTML does not have."""
    wanted = re.sub("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]", "\ufffd", word)
    around = "".join(_Reader(plain_page("PLACE")).texts)
    assert "".join(_Reader(plain_page(word)).texts) == around.replace("PLACE", wanted)
    inputs = _Reader(page(content(revision=word))).all("input")
    assert {each["value"] for each in inputs if each.get("name") == "revision"} == {wanted}


def test_the_header_allows_the_style_and_the_script_that_are_sent() -> None:
    """Browsers compare the hash of exactly what stands between the tags; nothing else is allowed by anything."""
    for text in (page(content()), plain_page("x")):
        for tag, source in (("style", STYLE), ("script", SCRIPT)):
            assert text.count(f"<{tag}") == 1
            assert text.partition(f"<{tag}>")[2].partition(f"</{tag}>")[0] == source
            digest = base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()
            assert f"; {tag}-src 'sha256-{digest}';" in SECURITY_HEADERS["Content-Security-Policy"]


def test_nothing_is_loaded_and_one_script_is_run() -> None:
    """No inline style or handler, no address outside; style sheet and script are those that the header allows."""
    reader = _Reader(page(content()))
    assert {name for name, _ in reader.elements}.isdisjoint({"link", "img", "iframe", "object"})
    for _, attributes in reader.elements:
        assert not [name for name in attributes if name.startswith("on") or name in ("style", "src")]
        assert attributes.get("href") in (None, "?")
        assert "action" not in attributes
    assert "url(" not in STYLE
    assert "@import" not in STYLE
    assert not re.search(r"fetch|XMLHttp|import|eval|innerHTML|cookie|storage|location", SCRIPT, re.IGNORECASE)
    assert "default-src 'none'" in SECURITY_HEADERS["Content-Security-Policy"]
    assert "unsafe" not in SECURITY_HEADERS["Content-Security-Policy"]


def test_every_control_has_a_label_and_every_reference_a_target() -> None:
    """Also what describes a control, and what names a section or a picture; no id twice."""
    reader = _Reader(page(content()))
    ids = [attributes["id"] for _, attributes in reader.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    labels = {attributes["for"] for attributes in reader.all("label")}
    controls = [each for name in ("select", "input") for each in reader.all(name) if each.get("type") != "hidden"]
    assert controls
    assert {each["id"] for each in controls} == labels
    for _, attributes in reader.elements:
        for name in ("aria-describedby", "aria-labelledby", "form"):
            assert set((attributes.get(name) or "").split()) <= set(ids), attributes
    assert all(attributes.get("scope") in ("col", "row") for attributes in reader.all("th"))
    assert [attributes.get("lang") for attributes in reader.all("html")] == ["en"]


def test_enter_saves_and_never_resets() -> None:
    """The first button of the form is Save; resetting has a form of its own."""
    text = page(content())
    buttons = [attributes for attributes in _Reader(text).all("button") if attributes.get("form") != "reset-form"]
    assert [attributes.get("name") for attributes in buttons] == [None]
    assert text.index("reset-form") < text.index("settings-form") < text.index(">Save<")
    assert '<button class="small" name="reset" value="mode" form="reset-form"' in text


def test_whoever_may_not_write_gets_no_controls() -> None:
    """But sees what is in force, and where it comes from."""
    text = page(content(visitor=Visitor(role="internal_user", tenant="t", auth=None)))
    reader = _Reader(text)
    assert not [name for name, _ in reader.elements if name in ("form", "select", "input", "button")]
    assert "The default is local, changed here to guard at 2001-09-09 01:46 by local." in "".join(reader.texts)


def test_what_a_row_says() -> None:
    """Numbers with their meaning, events with before and after."""
    text = "".join(_Reader(page(content())).texts)
    for expected in (
        "7,000 → 3,000",
        "85 %",
        "1\N{NO-BREAK SPACE}call, 1.5\N{NO-BREAK SPACE}s",
        "2001-09-09 01:46:40",
        "+11.1 % (1,000 counted, 900 reported)",
        "local (stand-in)",
        "9,000 expected, 4,000 seen",
        "3 more are not drawn: older, or of one turn.",
    ):
        assert expected in text


@pytest.mark.parametrize(
    ("owns_vocabulary", "cell"), [(True, "qwen3 · qwen2 (own vocabulary)"), (False, "qwen3 · qwen2 (stand-in)")]
)
def test_a_row_says_what_counts(owns_vocabulary: bool, cell: str) -> None:
    """By which vocabulary, and whose it is."""
    family = replace(FAMILY, name="qwen3", vocabulary="qwen2", owns_vocabulary=owns_vocabulary)
    assert f'<td data-label="Counts by">{cell}</td>' in page(content(rows=[row("m", family)]))


def test_a_row_says_how_an_answer_goes_on() -> None:
    """What carries it over the limit, and in which way its server has shown to go on."""
    made = row("m", FAMILY)
    text = " ".join(_Reader(page(content(rows=[made]))).texts)
    assert "transport, prefill" in text
    assert "prefill: the answer's end is the last message, which the server goes on with, as it has done." in text


def test_an_answer_that_was_cut_is_a_row() -> None:
    """How it ended and how full its window was; a compaction after a server's overflow shows no fill."""
    events = content().events
    text = " ".join(" ".join(_Reader(page(content(events=events))).texts).split())
    assert "answer cut : no restart was left Raise max_restarts, or load the model with a longer context." in text
    assert "7,900, restart 3 of 3 96 % of 8,192 local in mid-answer" in text
    (told,) = [replace(each, refusal="http_400") for each in events if isinstance(each, CompactionEvent)]
    assert "server overflow" in "".join(_Reader(page(content(events=[told]))).texts)


def test_reuses_in_a_row_are_one() -> None:
    """The newest of them, with their number; another compaction's are another row."""
    known: dict[str, Any] = {"phase": "pre_request", "model": "m", "window_tokens": 8192, "window_source": "operator"}
    events = [
        CompactionEvent(outcome="reused", tokens_before=number, tokens_after=1, compaction_id=name, **known)
        for number, name in ((4000, "b"), (3000, "b"), (2000, "b"), (1000, "a"))
    ]
    text = "".join(_Reader(page(content(events=events))).texts)
    assert "reused ×3" in text
    assert "4,000 → 1" in text
    assert "3,000 → 1" not in text
    assert "1,000 → 1" in text


def test_excerpts_are_numbers() -> None:
    """How many there were, and their tokens."""
    events = (each for each in content().events if isinstance(each, CompactionEvent))
    told = [replace(each, excerpts=3, excerpt_tokens=1400) for each in events]
    text = " ".join("".join(_Reader(page(content(events=told))).texts).split())
    assert "7,000 → 3,000, 3 excerpts of 1,400" in text


def test_an_empty_page_says_so() -> None:
    """Tables without rows are sentences, and one is the request to begin with."""
    empty = content(rows=[], talks=[], more_talks=0, events=[], visitor=Visitor(role="", tenant="t", auth=None))
    text = "".join(_Reader(page(replace(empty, base_url="http://proxy/v1"))).texts)
    assert "None that you may see." in text
    assert "None yet of your team, user or key." in text
    assert "0 models guarded · 0 conversations · 0 compactions · 0 cut by the server · 0 refused" in text
    assert 'curl http://proxy/v1/chat/completions -H "Authorization: Bearer KEY"' in text


def test_the_first_line_says_how_it_stands() -> None:
    """Reuses are no compactions; a truncation is what the plug-in is there to prevent."""
    known: dict[str, Any] = {"phase": "pre_request", "model": "m", "window_tokens": 8192, "window_source": "operator"}
    sizes = {"tokens_before": 7000, "tokens_after": 3000}
    outcomes: tuple[Any, ...] = ("compacted", "reused", "reused", "fallback", "refused")
    events = [
        *(CompactionEvent(outcome=outcome, **known, **sizes) for outcome in outcomes),
        TruncationAlarm(model="m", window_tokens=8192, expected_tokens=100, reported_tokens=50, reason="short"),
    ]
    made = content(rows=[], talks=[talk()], more_talks=0, events=events)
    text = "".join(_Reader(page(made)).texts)
    assert "0 models guarded · 1 conversation · 2 compactions · 1 cut by the server · 1 refused" in text


def test_what_is_red_comes_with_a_remedy() -> None:
    """Whatever its reason; what was planned so is neither."""
    known: dict[str, Any] = {"phase": "pre_request", "model": "m", "window_tokens": 8192, "window_source": "operator"}
    sizes = {"tokens_before": 7000, "tokens_after": 3000}
    kinds: tuple[Any, ...] = (
        *(("fallback", each) for each in ("empty", "paused", "")),
        ("refused", "does_not_fit"),
        ("failed_open", "KeyError"),
    )
    cuts: tuple[Any, ...] = get_args(Cut)
    bad = [
        *(CompactionEvent(outcome=outcome, reason=reason, **known, **sizes) for outcome, reason in kinds),
        *(replace(event, outcome=each) for event in content().events[2:] for each in cuts),  # type: ignore[call-arg]
        content().events[1],
    ]
    planned = [CompactionEvent(outcome="fallback", reason=each, **known, **sizes) for each in BY_PLAN]
    for events, marks in ((bad, len(bad)), (planned, 0)):
        table = page(content(events=events, rows=[], fields=[]))
        table = table[table.index("<tbody>") : table.index("</tbody>")]
        assert (table.count('class="bad"'), table.count('<br><span class="quiet">')) == (marks, marks)


def test_a_name_breaks_after_a_slash_and_is_isolated() -> None:
    """It cannot turn the text around it."""
    assert "<bdi>lm_studio/<wbr>a&lt;b</bdi>" in page(content("lm_studio/a<b"))


@pytest.mark.parametrize("program", ["Mozilla/5.0", "OpenAI/Python", ""])
def test_a_conversation_says_which_client(program: str) -> None:
    """A browser's user agent names none."""
    made = Talk([turn(1e9, 1, 1, 2, 8192, program=program)])
    shown = " ".join("".join(_Reader(plot(made)).texts).split())
    said = {"Mozilla/5.0": "a browser · since", "OpenAI/Python": "OpenAI/Python · since", "": "local since"}
    assert said[program] in shown
    assert "Mozilla" not in shown


@pytest.mark.parametrize("shows", [True, False])
def test_settings_are_folded_until_a_form_was_sent(shows: bool) -> None:
    """They are changed twice a year; an answer to a form shows its fields."""
    details = list(_Reader(page(content(shows_settings=shows))).all("details"))
    assert ("open" in details[-1]) == shows


def test_what_went_wrong_comes_with_a_remedy_and_its_record() -> None:
    """In the same row."""
    known: dict[str, Any] = {"phase": "pre_request", "model": "m", "window_tokens": 8192, "window_source": "operator"}
    event = CompactionEvent(
        outcome="fallback", reason="paused", tokens_before=7000, tokens_after=3000, compaction_id="0123abcd", **known
    )
    text = "".join(_Reader(page(content(events=[event]))).texts)
    assert "Name another pruning_model" in text
    assert "0123abcd" in text


@pytest.mark.parametrize("turns", [1, 2, 60, 120])
def test_a_plot_is_a_picture_with_a_description(turns: int) -> None:
    """All shapes inside of it; the lines at 100, 90 and 80 percent; compaction and restart marked."""
    figure = ElementTree.fromstring(plot(talk(turns=turns)))  # noqa: S314 - made here
    picture = figure.find("svg")
    assert picture is not None
    width, height = (float(part) for part in picture.attrib["viewBox"].split()[2:])
    texts = [each.text for each in picture.iter("text")]
    assert [text for text in texts if text and text.endswith("%")] == ["100 %", "90 %", "80 %"]
    assert picture.findtext("title")
    description = picture.findtext("desc") or ""
    if turns > 1:
        assert "1 compactions, 1 restarts" in description
        assert picture.find(".//path[@class='compact']") is not None
        assert picture.find(".//circle[@class='restart']") is not None
        assert len(picture.findall(".//rect[@class='bar']")) == min(turns, 60)
    for shape in picture.iter():
        for name, limit in (("x", width), ("x1", width), ("x2", width), ("cx", width), ("y", height), ("cy", height)):
            assert 0 <= float(shape.attrib.get(name, 0)) <= limit


@given(
    st.lists(st.tuples(*[st.integers(0, 10**9)] * 4), min_size=1, max_size=20),
    st.floats(0.01, 0.99),
    st.text(st.characters()),
)
def test_any_numbers_can_be_drawn(numbers: list[tuple[int, int, int, int]], ratio: float, model: str) -> None:
    """Windows of nothing, prompts far above them, any name."""
    ratios = {"compact_ratio": ratio, "carry_ratio": ratio}
    made = Talk([turn(1e9, *row[:2], row[1] + row[2], row[3], model=model, **ratios) for row in numbers])
    for each, (before, prompt, *_) in zip(made.turns, numbers, strict=True):
        each.action, each.restarts = "compacted", [Drop(before, prompt)]
    reader = _Reader(plot(made))
    assert "nan" not in "".join(str(attributes) for _, attributes in reader.elements)


@pytest.fixture
def _in_tokyo(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A proxy whose clock shows another zone than UTC, where a process can choose one."""
    with monkeypatch.context() as changed:
        changed.setenv("TZ", "Asia/Tokyo")
        getattr(time, "tzset", lambda: None)()
        yield
    getattr(time, "tzset", lambda: None)()


@pytest.mark.usefixtures("_in_tokyo")
def test_a_time_is_utc_until_a_script_makes_it_local() -> None:
    """With the seconds or without; what a script reads is what a person reads."""
    assert _clock(1e9) == '<time datetime="2001-09-09T01:46:40Z">2001-09-09 01:46:40</time>'
    assert _clock(1e9, 16) == '<time datetime="2001-09-09T01:46Z">2001-09-09 01:46</time>'
    assert '<span class="zone">Times are UTC.</span>' in page(content())


def test_a_time_that_no_calendar_has_is_empty() -> None:
    """A damaged event must not take the page away."""
    assert [_clock(when_s) for when_s in (1e300, 1e13, float("inf"), float("nan"))] == [""] * 4
