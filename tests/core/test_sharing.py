"""The rules by which several processes fit their requests into one context, without any of them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from litellm_compaction.core.sharing import Loan, Part, Verdict, Wish, settle

WINDOW_TOKENS = 100


def test_alone_it_may_hold_more_than_the_window() -> None:
    """It harms nobody else; the window is its budget's business."""
    assert settle(Part(seats=1, wishes=(Wish(1, 300, 500),)), (), WINDOW_TOKENS).grants == {1: 500}
    beside = settle(Part(seats=1, wishes=(Wish(1, 300),)), (Part(held_tokens=1, seats=1),), WINDOW_TOKENS)
    assert (beside.grants, beside.is_waited_for) == ({}, True)


@pytest.mark.parametrize(("others_tokens", "granted"), [(70, True), (71, False)])
def test_what_others_hold_counts(others_tokens: int, granted: bool) -> None:
    """Up to the last token of the window."""
    verdict = settle(Part(seats=1, wishes=(Wish(1, 30),)), (Part(held_tokens=others_tokens, seats=1),), WINDOW_TOKENS)
    assert (verdict.grants == {1: 30}) is granted
    assert (verdict.is_waited_for, verdict.others_tokens) == (not granted, others_tokens)


def test_another_process_that_came_first_is_let_in_first() -> None:
    """A small request does not overtake a large one that waits, and room that is the other's is not given away."""
    first = Part(seats=1, wishes=(Wish(1, 60, ticket=1),))
    running = Part(held_tokens=50, seats=1)
    late = Part(seats=1, wishes=(Wish(1, 10, 100),))
    verdict = settle(late, (first, running), WINDOW_TOKENS)
    assert (verdict.grants, verdict.is_waited_for) == ({}, True)
    assert [wish.ticket for wish in verdict.part.wishes] == [2]
    verdict = settle(verdict.part, (first, replace(running, held_tokens=30)), WINDOW_TOKENS)
    assert verdict.grants == {1: 10}
    verdict = settle(late, (first, replace(running, held_tokens=31)), WINDOW_TOKENS)
    assert verdict.grants == {}


@dataclass
class _Request:
    number: int
    tokens: int
    most_tokens: int = 0
    is_restart: bool = False
    ticket: int = 0
    held_tokens: int = 0
    needed_tokens: int | None = None
    is_leaving: bool = False

    @property
    def lent_tokens(self) -> int:
        return 0 if self.needed_tokens is None else max(self.held_tokens - self.needed_tokens, 0)


@dataclass
class _Process:
    """One process as the rules expect it, with what it has told the others; `until` is when that is forgotten."""

    requests: list[_Request] = field(default_factory=list)
    told: Part = field(default_factory=Part)
    until: int = 0

    def part(self) -> Part:
        lent = [each for each in self.requests if each.lent_tokens]
        return Part(
            held_tokens=sum(each.held_tokens for each in self.requests),
            seats=len(self.requests),
            spare_tokens=sum(each.lent_tokens for each in lent if not each.is_leaving),
            leaving_tokens=sum(each.lent_tokens for each in lent if each.is_leaving),
            wishes=tuple(
                Wish(each.number, each.tokens, each.most_tokens, each.is_restart, each.ticket)
                for each in self.requests
                if not each.held_tokens
            ),
        )

    def obey(self, verdict: Verdict) -> None:
        tickets = {wish.number: wish.ticket for wish in verdict.part.wishes}
        for each in self.requests:
            each.ticket = tickets.get(each.number, each.ticket)
            each.held_tokens = verdict.grants.get(each.number, each.held_tokens)
            each.is_leaving |= each.number in verdict.called_back
        self.told = verdict.part
        assert self.told == self.part()


def _place(wish: _Request | Wish) -> tuple[bool, float, int]:
    """In the queue of all; who has no ticket is behind those who have one."""
    return (not wish.is_restart, wish.ticket or float("inf"), wish.number)


LEASE = 10


class SharingMachine(RuleBasedStateMachine):
    """Processes that come, run, are stopped, leave and are killed, and look at each other in any order."""

    @initialize(processes=st.integers(2, 4))
    def open(self, processes: int) -> None:
        self.now = 0
        self.last = 0
        self.processes = [_Process() for _ in range(processes)]

    def alive(self) -> list[_Process]:
        return [each for each in self.processes if self.now < each.until]

    def look(self, process: _Process) -> Verdict:
        others = [each.told for each in self.alive() if each is not process]
        mine = process.part()
        loans = tuple(
            Loan(each.number, each.lent_tokens) for each in process.requests if each.lent_tokens and not each.is_leaving
        )
        places = {each.number: _place(each) for each in process.requests if not each.held_tokens}
        verdict = settle(mine, others, WINDOW_TOKENS, loans=loans)
        process.obey(verdict)
        process.until = self.now + LEASE
        for granted in (places[number] for number in verdict.grants):
            # Whoever came before it was let in as well, or has room left for it.
            assert not any(places[wish.number] < granted for wish in verdict.part.wishes)
            earlier = [wish for part in others for wish in part.wishes if _place(wish) < granted]
            held = sum(part.held_tokens for part in (verdict.part, *others))
            assert not earlier or held + sum(wish.tokens for wish in earlier) <= WINDOW_TOKENS
        return verdict

    def picked(self, requests: list[_Request], pick: int) -> _Request:
        return requests[pick % len(requests)]

    @rule(at=st.integers(0, 3), tokens=st.integers(1, 110), most=st.integers(0, 120), looks=st.booleans())
    def come(self, at: int, tokens: int, most: int, looks: bool) -> None:
        self.last += 1
        process = self.processes[at % len(self.processes)]
        process.requests.append(_Request(self.last, tokens, most))
        if looks:
            self.look(process)

    @rule(at=st.integers(0, 3))
    def looked(self, at: int) -> None:
        self.look(self.processes[at % len(self.processes)])

    @precondition(lambda self: any(each.requests for each in self.processes))
    @rule(pick=st.integers(0, 99), looks=st.booleans())
    def leave(self, pick: int, looks: bool) -> None:
        process = self.picked([each for each in self.processes if each.requests], pick)  # type: ignore[arg-type]
        process.requests.pop(pick % len(process.requests))
        if looks:
            self.look(process)

    @precondition(lambda self: any(each.held_tokens for process in self.processes for each in process.requests))
    @rule(pick=st.integers(0, 99), needed=st.integers(1, 110), more=st.booleans())
    def change(self, pick: int, needed: int, more: bool) -> None:
        """An answer can be cut from now on, or goes on as another request: at once for less, else behind others."""
        running = [each for process in self.processes for each in process.requests if each.held_tokens]
        request = self.picked(running, pick)
        if more:
            request.held_tokens = 0 if needed > request.held_tokens else needed
            request.tokens, request.is_restart, request.ticket = needed, True, 0
            request.needed_tokens, request.is_leaving = None, False
        elif not request.is_leaving:
            request.needed_tokens = needed

    @rule(at=st.integers(0, 3))
    def killed(self, at: int) -> None:
        """What it held is not its any more; the others learn it by the time."""
        self.processes[at % len(self.processes)].requests.clear()

    @rule(seconds=st.integers(1, 15))
    def passes(self, seconds: int) -> None:
        """Whoever lives renews what it has said, and nothing of the others stays longer than a lease."""
        self.now += seconds
        for process in self.processes:
            if process.requests:
                process.until = max(process.until, self.now + LEASE)

    @invariant()
    def never_over_the_window(self) -> None:
        """But for one that is alone."""
        held = [each.held_tokens for process in getattr(self, "processes", ()) for each in process.requests]
        running = [tokens for tokens in held if tokens]
        assert sum(running) <= WINDOW_TOKENS or len(running) == 1

    def teardown(self) -> None:
        """Nobody starves: when all who run come to their ends, everybody has run."""
        if not hasattr(self, "processes"):
            return
        while any(process.requests for process in self.processes):
            self.now += LEASE
            running = [each for process in self.processes for each in process.requests if each.held_tokens]
            for process in self.processes:
                process.requests = [each for each in process.requests if not each.held_tokens]
                process.until = self.now + LEASE
                process.told = process.part()
            before = sum(len(process.requests) for process in self.processes)
            for process in self.processes:
                self.look(process)
            for process in self.processes:
                self.look(process)
            now_running = any(each.held_tokens for process in self.processes for each in process.requests)
            assert now_running or not before, (running, before)


TestSharing = SharingMachine.TestCase
TestSharing.settings = settings(stateful_step_count=40)
