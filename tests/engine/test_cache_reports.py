"""What servers report of their caches, and what that says about how they read a changed prompt."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from litellm_compaction.core.budget import Budget
from litellm_compaction.core.continuation.request import Way
from litellm_compaction.core.messages import Request
from litellm_compaction.engine.cache_reports import LEAST_SHARED_TOKENS, CacheReports, joined
from litellm_compaction.engine.context import PreparedRequest, RequestContext
from litellm_compaction.tokenizers.families import HEURISTIC
from litellm_compaction.tokens.count import Count
from litellm_compaction.tokens.prefix import fingerprints
from litellm_compaction.windows.windows import Window
from tests.builders import JsonDict, assistant, count, parsed, size, system, user
from tests.engine.bench import NOW_S, Bench, Clock, RecordingStore, settled

LEAD_TOKENS = 600
LEAD = system("x" * 4 * LEAD_TOKENS)


@dataclass
class Server:
    """One slot that holds what came last, with its answer; by fingerprints, as prompts are compared.

    Attributes:
        goes_back: whether it finds the beginning of what it holds, and not only all of it.
        reports: whether its usage says what it found.
    """

    goes_back: bool = True
    reports: bool = True
    held: list[str] = field(default_factory=list)

    def read(self, prompt: list[JsonDict]) -> int | None:
        said = [str(each) for each in prompt]
        common = 0
        while common < min(len(said), len(self.held)) and said[common] == self.held[common]:
            common += 1
        # An answer is part of what it holds; a prompt that goes on behind it holds it as a message.
        found = common if self.goes_back or common == len(self.held) else 0
        self.held = said
        return sum(size(each) for each in parsed(prompt[:found])) if self.reports else None


@dataclass
class Scene:
    """Reports of one deployment, with a clock that a test sets."""

    server: Server = field(default_factory=Server)
    clock: Clock = field(default_factory=Clock)
    model: str = "odd-model"
    turns: int = 0
    store: RecordingStore | None = None

    def __post_init__(self) -> None:
        self.reports = CacheReports(self.store, clock=self.clock, wall_clock=self.clock)
        self.bench = Bench()
        self.rereads()

    @property
    def case(self) -> RequestContext:
        return self.bench.case(target=self.bench.target(8192, model=self.model))

    def rereads(self, *, said: bool = False, name: str = HEURISTIC.name) -> bool:
        family = replace(HEURISTIC, name=name, rereads=said)
        self.reports.recall(self.case.target, family)
        return self.reports.rereads(self.case.target, family)

    def ask(self, prompt: list[JsonDict], *, case: RequestContext | None = None, way: Way | None = None) -> None:
        """An answer that comes to its end."""
        case, guarded = case or self.case, as_sent(prompt, way)
        self.reports.sending(case, guarded)
        # Each of two who send: the loop takes its room again.
        self.reports.sending(case, guarded)
        cached_tokens = self.server.read(prompt)
        self.clock.now_s += 1
        self.reports.learn(case, guarded, prompt_tokens=guarded.count.tokens, cached_tokens=cached_tokens)

    def leave(self, prompt: list[JsonDict]) -> None:
        """An answer whose client goes: there is no usage."""
        self.reports.sending(self.case, as_sent(prompt))
        self.server.read(prompt)

    def go_on(self, prompt: list[JsonDict]) -> list[JsonDict]:
        """The next turn of a conversation."""
        self.turns += 1
        return [*prompt, assistant(f"Answer {self.turns}."), user(f"Question {self.turns}.")]

    def round(self, *, lead: JsonDict = LEAD, **asking: Any) -> None:
        """A turn that goes on, and one whose prompt has become another behind its system message."""
        self.turns += 1
        prompt = [lead, user(f"Begun {self.turns}.")]
        self.ask(prompt, **asking)
        self.ask(self.go_on(prompt), **asking)


def as_sent(prompt: list[JsonDict], way: Way | None = None) -> PreparedRequest:
    messages = parsed(prompt)
    sizes = tuple(size(message) for message in messages)
    bench = Bench()
    counted = Count(
        tokens=20 + sum(sizes),
        sizes=sizes,
        tools_tokens=0,
        overhead_tokens=20,
        error_ratio=0.0,
        text_error_ratio=0.0,
        exact=True,
        raw_tokens=20 + sum(sizes),
        prints=fingerprints(Request(messages=messages)),
    )
    return PreparedRequest(
        action="none",
        messages=messages,
        tokens_before=counted.tokens,
        count=counted,
        count_text=count,
        budget=Budget(rules=bench.case().rules(reasons=False), window_tokens=8192, floor_tokens=0, error_ratio=0.0),
        window=Window(tokens=8192, source="operator", architecture="", instance_id="odd-model", parallel=1, read_s=0.0),
        way=way,
    )


def test_three_changes_in_a_row_of_which_nothing_was_kept_are_enough(caplog: pytest.LogCaptureFixture) -> None:
    """The fourth prompt is planned by it, and the log says so once."""
    scene = Scene(Server(goes_back=False))
    assert not scene.rereads()
    with caplog.at_level(logging.INFO, "litellm_compaction"):
        for _ in range(3):
            assert not scene.rereads()
            scene.round()
        # The first round had no prompt before it.
        assert not scene.rereads()
        scene.round()
        assert scene.rereads()
        scene.round()
    assert [record.getMessage().split(":")[0] for record in caplog.records] == ["rereads model=served"]


def test_a_server_that_keeps_prefixes_is_never_taken_for_another() -> None:
    """Nor one that says nothing, as LM Studio."""
    for server in (Server(), Server(reports=False), Server(goes_back=False, reports=False)):
        scene = Scene(server)
        for _ in range(6):
            scene.round()
        assert not scene.rereads()


def test_one_answer_to_the_contrary_takes_it_back(caplog: pytest.LogCaptureFixture) -> None:
    """A server may be updated, or started in another way; what was said once is not said again."""
    scene = Scene(Server(goes_back=False))
    scene.rereads()
    with caplog.at_level(logging.INFO, "litellm_compaction"):
        for _ in range(4):
            scene.round()
        scene.server.goes_back = True
        scene.round()
        assert not scene.rereads()
        scene.server.goes_back = False
        for _ in range(3):
            scene.round()
        assert scene.rereads()
    assert len(caplog.records) == 1


def test_what_a_file_says_is_not_learned_and_not_taken_back(caplog: pytest.LogCaptureFixture) -> None:
    """A server may have the beginning of one prompt at hand, and not the middle of the next."""
    with caplog.at_level(logging.INFO, "litellm_compaction"):
        for goes_back in (True, False):
            scene = Scene(Server(goes_back=goes_back))
            for _ in range(6):
                assert scene.rereads(said=True)
                scene.round()
    assert not caplog.records


def test_another_model_under_the_same_name_has_shown_nothing() -> None:
    """What was learned belongs to the one that was loaded."""
    scene = Scene(Server(goes_back=False))
    scene.rereads()
    for _ in range(4):
        scene.round()
    assert not scene.rereads(name="another")
    assert scene.rereads()


def test_deployments_that_lead_to_one_model_learn_together() -> None:
    """And what one sends lies in the cache of the other."""
    scene = Scene(Server(goes_back=False))
    targets = [
        scene.bench.target(8192, model="odd-model", key=key, api_base=base)
        for key, base in (("one", "http://there/v1"), ("two", "http://there"))
    ]
    cases = [replace(scene.case, target=target) for target in targets]
    for target in targets:
        scene.reports.recall(target, HEURISTIC)
    for number in range(8):
        scene.round(case=cases[number % 2])
    assert all(scene.reports.rereads(target, HEURISTIC) for target in targets)


@pytest.mark.parametrize(
    "why",
    ["short", "cold", "late", "left", "probed", "summarized", "siblings", "small share"],
)
def test_what_proves_nothing(why: str) -> None:
    """A beginning that may not be in the cache for another reason is no evidence."""
    scene = Scene(Server(goes_back=False))
    lead = system("x" * 4 * (LEAST_SHARED_TOKENS // 2)) if why == "short" else LEAD
    case = replace(scene.case, has_siblings=why == "siblings")
    for number in range(6):
        prompt = [lead, user(f"Begun {number}." + "y" * 40_000 * (why == "small share"))]
        scene.ask(prompt, case=case)
        if why == "cold":
            # Its cache is off: what only went on is read again as well.
            scene.server.held = []
        scene.ask(scene.go_on(prompt), case=case)
        if why == "late":
            scene.clock.now_s += 301
        if why == "left":
            scene.leave([user("Something else.")])
        if why == "probed":
            scene.reports.asking(case.target)
            scene.server.read([user("How long is this?")])
        if why == "summarized":
            scene.reports.asking(case.target)
            scene.server.read([user("Summarize this.")])
            scene.reports.asked(case.target)
    assert not scene.rereads()


def test_the_same_prompt_again_proves_nothing() -> None:
    """LiteLLM may have answered it out of its own cache, with the usage of then."""
    scene = Scene(Server(goes_back=False))
    prompt = [LEAD, user("Begun.")]
    for _ in range(6):
        scene.ask(prompt)
        prompt = scene.go_on(prompt)
        scene.ask(prompt)
        scene.server.held = []
        scene.ask(prompt)
        prompt = scene.go_on(prompt)
    assert not scene.rereads()


def test_a_summary_behind_the_conversation_itself_is_known() -> None:
    """A record in the place of what it was written of is compared with it; the turn that goes on without it is not."""
    for goes_back in (False, True):
        scene = Scene(Server(goes_back=goes_back))
        prompt = [LEAD, user("Begun.")]
        for number in range(4):
            for _ in range(2):
                scene.ask(prompt)
                prompt = scene.go_on(prompt)
            asked = [*prompt, user("Summarize all of this.")]
            scene.reports.asking(scene.case.target, fingerprints(Request(messages=parsed(asked))))
            scene.server.read(asked)
            scene.reports.asked(scene.case.target)
            assert scene.rereads() is (not goes_back and number == 3)
            prompt = [LEAD, user(f"Summary {number}."), *prompt[-1:]]
        scene.ask(prompt)


def test_a_checkpoint_at_the_end_takes_nothing_back() -> None:
    """Without its last message alone a prompt may be at hand where nothing before that is."""
    scene = Scene(Server(goes_back=False))
    for _ in range(4):
        scene.round()
    scene.server.goes_back = True
    prompt = [LEAD, user("Begun.")]
    scene.leave(prompt)
    for last in ("One.", "Two.", "Three."):
        scene.ask([*prompt, user(last)])
    assert scene.rereads()


def test_an_answer_that_the_server_goes_on_with_is_part_of_what_it_holds() -> None:
    """The next prompt has the whole answer in place of its beginning, which no server has to read again."""
    scene = Scene(Server(goes_back=False))
    for _ in range(4):
        scene.round()
    prompt = [LEAD, user("Begun.")]
    scene.ask(prompt)
    scene.ask([*prompt, assistant("Ans")], way="prefill")
    whole = [*prompt, assistant("Answer.")]
    scene.server.held = [str(each) for each in whole]
    scene.ask([*whole, user("Go on.")])
    assert scene.rereads()


async def test_what_was_learned_is_there_after_a_restart(caplog: pytest.LogCaptureFixture) -> None:
    """And is not said again; what another process has seen since counts."""
    store, clock = RecordingStore(), Clock(now_s=NOW_S)
    first = Scene(Server(goes_back=False), clock, store=store)
    for _ in range(4):
        first.round()
    await settled()
    with caplog.at_level(logging.INFO, "litellm_compaction"):
        second, third = (Scene(Server(goes_back=False), clock, store=store) for _ in range(2))
        await settled()
        assert second.rereads()
        assert third.rereads()
        for _ in range(4):
            second.round()
    assert not caplog.records
    third.server.goes_back = True
    for _ in range(2):
        third.round()
    await settled()
    again = Scene(store=store)
    await settled()
    assert not again.rereads()
    await again.reports.aclose()


async def test_a_store_that_fails_costs_nothing_but_the_memory() -> None:
    """What this process sees counts all the same."""
    store = RecordingStore()
    store.broken = True
    scene = Scene(Server(goes_back=False), store=store)
    for _ in range(4):
        scene.round()
        await settled()
    assert scene.rereads()


SAMPLES = st.lists(st.tuples(st.integers(1, 9), st.booleans()).map(list), max_size=5).map(json.dumps)


@given(one=SAMPLES, other=SAMPLES, third=SAMPLES)
def test_in_whatever_order_processes_write(one: str, other: str, third: str) -> None:
    """And however often, the same comes out."""
    assert joined(one, other) == joined(other, one)
    assert joined(joined(one, other), third) == joined(one, joined(other, third))
    assert joined(joined(one, other), other) == joined(one, other)


@given(text=st.one_of(st.text(), st.recursive(st.none() | st.integers() | st.booleans(), st.lists).map(json.dumps)))
def test_what_nobody_has_written_is_no_sample(text: str) -> None:
    """A store may hold anything."""
    assert isinstance(json.loads(joined(text, "[]")), list)


STEPS = st.lists(st.sampled_from(["turn", "change", "other", "leave", "probe", "summary", "pause"]), max_size=60)


def played(scene: Scene, steps: list[str]) -> list[bool]:
    """What is known after each of some steps of two conversations, which may go on at any time."""
    prompts, known = [[LEAD, user("One.")], [system("Another."), user("Two.")]], []
    for number, step in enumerate(steps):
        prompt = prompts[0]
        if step == "turn":
            prompt = scene.go_on(prompt)
            scene.ask(prompt)
        elif step == "change":
            prompt = [prompt[0], user(f"Summary {number}."), *prompt[-1:]]
            scene.ask(prompt)
        elif step == "other":
            prompts.reverse()
            continue
        elif step == "leave":
            scene.leave(scene.go_on(prompt))
        elif step == "probe":
            scene.reports.asking(scene.case.target)
            scene.server.read([user(f"Question {number}.")])
        elif step == "summary":
            asked = [*prompt[:-1], user(f"Summarize {number}.")]
            scene.reports.asking(scene.case.target, fingerprints(Request(messages=parsed(asked))))
            scene.server.read(asked)
            scene.reports.asked(scene.case.target)
        else:
            scene.clock.now_s += 1000
        prompts[0] = prompt
        known.append(scene.rereads())
    return known


@given(steps=STEPS)
def test_a_server_that_goes_back_is_never_taken_for_one_that_cannot(steps: list[str]) -> None:
    """Whatever comes in between."""
    assert not any(played(Scene(), steps))


@given(steps=STEPS)
def test_what_is_learned_stays_where_nothing_contradicts_it(steps: list[str]) -> None:
    """Whatever comes in between, a server that cannot go back never reports that it did."""
    known = played(Scene(Server(goes_back=False)), ["turn", "turn", *["change", "turn"] * 3, *steps])
    assert all(known[7:])
