"""The model of a scenario: it reads files, writes one, talks past the window, or stops in mid-answer.

It stands in the simulator's place of a model and decides by the prompt that reached the server. A client calls its
tools by names of its own; a `Tongue` says how.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Literal

from tests.builders import prose
from tests.integration.bench import SUMMARY, is_question, is_summary_call
from tests.integration.restart_bench import text_of
from tests.lmstudio_double import ChatCall, Gate, Reply
from tests.lmstudio_double.rendering import count

Name = Literal["task", "results", "long", "unfit", "cancel", "own"]
Call = tuple[str, str]
# What a file has to hold byte for byte: tabs, spaces at the end, fences, more than ASCII.
CONTENT = (
    'def größe(x: int) -> str:\n\t"""Tabs, “quotes” and 终."""\n\treturn f"{x!r}\\n"\n\n\n'
    "# ```python\n# a fence that opens nothing\n# ```\n\nGREETING = 'it''s <b>1 & 2</b> 😀'\n"
)
TARGET = "written.py"
DONE = "Everything is written."
OWN_SUMMARY = "SUMMARY-OF-THE-CLIENT: files are read one after the other; written.py comes last."
_GOES_ON = "cut off by the length limit"
_SEAM_CHARS = 48
_MOST_STEPS = 60
# Before the command for the client's own compaction.
_STEPS_BEFORE = 3


@dataclass(frozen=True)
class Tongue:
    """How a client's tools are called: to read a file, to write one, and to end, if an answer does not end the task.

    Attributes:
        at_once: results that it asks for together in the scenario of that name.
        most_words: of a file; a client that reads less of a longer one cuts it itself.
        is_text: there are no tools. What would be read is said instead, and `write` gives the answer's text.
    """

    read: Callable[[Path], Call]
    write: Callable[[Path, str], Call]
    end: Callable[[str], Call] | None = None
    _: KW_ONLY
    at_once: int = 2
    most_words: int = 100_000
    is_text: bool = False


@dataclass
class Model:
    """One model in one cell.

    Attributes:
        scenario: what it does.
        tongue: how it calls the client's tools.
        folder: where the client works; files are laid there before they are read.
        compactions: how many the proxy has logged for this client so far.
        window_tokens: of the scenario, also where the server's own is larger.
        most_answer_tokens: the client's own bound of an answer, which a long one must keep.
        asks_for_summary: a pattern of the client's own request for a summary: in the last message, or with which the
            first one begins.
        is_commanded: the client compacts its conversation at a command, between two prompts.
        missed: what did not reach the server as it should have.
    """

    scenario: Name
    tongue: Tongue
    folder: Path
    compactions: Callable[[], int]
    window_tokens: int = 8192
    most_answer_tokens: int | None = None
    asks_for_summary: str = ""
    is_commanded: bool = False
    missed: list[str] = field(default_factory=list)
    gate: Gate = field(default_factory=Gate)
    own_summaries: int = 0
    steps: int = 0
    said: str = ""
    _floor_tokens: int = 0
    _phase: str = "reading"
    _answered: str = ""
    _reading: dict[str, str] = field(default_factory=dict)
    _reply: Reply | None = None

    def __call__(self, call: ChatCall) -> Reply | None:
        """The answer to a request; None is the simulator's own."""
        if is_summary_call(call.body):
            return Reply(SUMMARY)
        if is_question(call.body):
            return None
        if self.said and (shown := _shown(call)) is not None:
            return self._goes_on(shown)
        last = call.messages[-1] if call.messages else {}
        if self.asks_for_summary and (
            re.search(self.asks_for_summary, text_of(last))
            or any(re.match(self.asks_for_summary, text_of(message)) for message in call.messages[:1])
        ):
            self.own_summaries += 1
            # What was just read is in the summary's prompt, and need not come again.
            self._reading = {}
            return Reply(OWN_SUMMARY)
        if not (call.body.get("tools") or self.tongue.is_text):
            return Reply("A title")
        newest = _newest(call)
        if newest != self._answered:
            self._answered = newest
            self._check(call)
            self._reply = self._next(call)
        return self._reply

    def _check(self, call: ChatCall) -> None:
        """Notes a result that did not reach the server whole: each line of what was just read has to be there."""
        for name, text in self._reading.items():
            lost = [line for line in text.splitlines() if line not in call.prompt_text]
            if lost:
                self.missed.append(f"{len(lost)} of {len(text.splitlines())} lines of {name} did not reach the server")
        self._reading = {}

    def _next(self, call: ChatCall) -> Reply:
        self._floor_tokens = self._floor_tokens or call.prompt_tokens
        if self.scenario == "cancel":
            # Slowly, so that the client has read a part of the answer when the gate is reached.
            return Reply(prose("cancelled", 4000), gate=self.gate, gate_after_tokens=40, tokens_per_second=30)
        if self._phase == "reading":
            self.steps += 1
            if self.steps > _MOST_STEPS:
                self.missed.append(f"{_MOST_STEPS} steps, and no end")
                return Reply(DONE)
            if self.is_commanded and not self.own_summaries and self.steps > _STEPS_BEFORE:
                return Reply(DONE)
            if not self._has_read_enough(call):
                return self._read(0.08 if self.scenario == "long" else 0.18)
            self._phase = "writing"
            if self.scenario == "results":
                return self._read(0.3, self.tongue.at_once)
            if self.scenario == "long":
                return self._talks(call)
        if self._phase == "writing":
            self._phase = "ending"
            called = self.tongue.write(self.folder / TARGET, CONTENT)
            return Reply(called[1]) if self.tongue.is_text else Reply(tool_calls=[called])
        return Reply(DONE) if self.tongue.end is None else Reply(tool_calls=[self.tongue.end(DONE)])

    def _has_read_enough(self, call: ChatCall) -> bool:
        if self.scenario == "results":
            return call.prompt_tokens - self._floor_tokens > 0.5 * self._room()
        if self.scenario == "long":
            # Once it was compacted, a conversation may stay below the higher one.
            return call.prompt_tokens > (0.62 if self.compactions() else 0.7) * self.window_tokens
        if self.scenario == "own":
            return self.own_summaries > 0
        return self.compactions() + self.own_summaries >= 2

    def _room(self) -> float:
        """Tokens between the client's first prompt and the size at which the proxy compacts."""
        return max(0.8 * self.window_tokens - self._floor_tokens, 0.1 * self.window_tokens)

    def _read(self, share: float, times: int = 1) -> Reply:
        if self.tongue.is_text:
            return Reply(prose(f"step {self.steps}", int(share * self._room())))
        calls = []
        for nth in range(times):
            name = f"part{self.steps:02d}{'abcd'[nth]}.txt"
            lines = prose(name, min(int(share * self._room()), self.tongue.most_words)).splitlines()
            text = "".join(f"{name} line {number} {line}\n" for number, line in enumerate(lines, 1))
            (self.folder / name).write_text(text, encoding="utf-8")
            self._reading[name] = text
            calls.append(self.tongue.read(self.folder / name))
        return Reply(tool_calls=calls)

    def _talks(self, call: ChatCall) -> Reply:
        tokens = min(1.12 * self.window_tokens - call.prompt_tokens, self.most_answer_tokens or self.window_tokens)
        words = [f"word{number}" for number in range(1, self.window_tokens)]
        while count(" ".join(words)) > tokens:
            words = words[: int(len(words) * 0.97)]
        self.said = " ".join(words)
        return Reply(self.said)

    def _goes_on(self, shown: str) -> Reply:
        seam = shown[-_SEAM_CHARS:]
        if self.said.count(seam) != 1:
            self.missed.append("asked to go on with a text that is not the answer's")
            return Reply("")
        return Reply(self.said[self.said.index(seam) + len(seam) :])


def _newest(call: ChatCall) -> str:
    """What the model is to answer: the newest result, or a prompt after it; the same for a request that comes again."""
    messages = list(call.messages)
    results = [place for place, message in enumerate(messages) if message.get("role") == "tool"]
    last = results[-1] if results else -1
    said = [message for message in messages[last + 1 :] if message.get("role") == "assistant"]
    return f"{messages[last]['tool_call_id'] if results else ''} {len(said)}"


def _shown(call: ChatCall) -> str | None:
    """The part of an answer that the model is asked to go on with; None if it is asked something else."""
    if not call.messages:
        return call.prompt_text
    last = call.messages[-1]
    if last["role"] == "assistant" and not last.get("tool_calls"):
        return text_of(last)
    return text_of(call.messages[-2]) if _GOES_ON in text_of(last) else None
