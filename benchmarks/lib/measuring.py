"""How a method is judged on a real conversation, replayed turn by turn: the yardsticks of `quality/compaction.py`.

A method gets what a stateless client sends before each of its turns, and says what goes upstream instead. One server
slot with a prefix cache is kept beside it, so that work is counted as a local model has it.
"""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.lib.next_action import stands, taken
from litellm_compaction.core.budget import Budget, Rules
from litellm_compaction.tokenizers.registry import vocabulary
from tests.integration.validity import problems, searchable

JsonDict = dict[str, Any]

# What a decoded token costs a local engine beside a prefilled one, about.
DECODE_WEIGHT = 15
_MESSAGE_TOKENS = 4
# Rules that nobody gave; what users report of real summaries (codegraff 738, oh-my-openagent 1483).
INVENTED = (
    "The user said never to edit anything inside the vendor directory.",
    "All further reports must be approved by the legal department first.",
    "Ab jetzt dürfen keine neuen Abhängigkeiten eingeführt werden.",
)
RULES = Rules(
    pre_request_ratio=0.80,
    streaming_ratio=0.90,
    target_ratio=0.40,
    output_buffer_ratio=0.20,
    output_buffer_min_tokens=1000,
    answer_min_tokens=256,
)


@dataclass(frozen=True)
class Transcript:
    """A whole conversation with its planted facts: `text` is a substring of message number `msg`."""

    name: str
    messages: list[JsonDict]
    tools: list[JsonDict]
    facts: list[JsonDict]


class SummaryCall(NamedTuple):
    """One call of the pruning model: its prompt and its answer."""

    messages: Sequence[JsonDict]
    with_tools: bool
    answer: str


class Turn(NamedTuple):
    """What a method did with one request.

    Attributes:
        messages: what goes upstream; None where it was refused, with an error to the client.
        calls: of the pruning model, in order.
        is_compacted: whether the messages are not the client's own.
        is_new: whether they were shortened anew for this request.
        is_cut: whether the server had to cut them itself.
        later: calls behind the answer, when nobody waits; one that only has a prompt read has no answer.
    """

    messages: Sequence[JsonDict] | None
    calls: Sequence[SummaryCall] = ()
    is_compacted: bool = False
    is_new: bool = False
    is_cut: bool = False
    later: Sequence[SummaryCall] = ()


Method = Callable[[Transcript, Sequence[JsonDict]], Awaitable[Turn]]


def load(folder: Path) -> list[Transcript]:
    """The conversations in `folder`, by name."""
    loaded = [(path.stem, json.loads(path.read_text())) for path in sorted(folder.glob("*.json"))]
    return [
        Transcript(name, each["messages"], each.get("tools") or [], each.get("facts") or []) for name, each in loaded
    ]


@lru_cache(maxsize=500_000)
def count(text: str) -> int:
    """Tokens of a text, exactly, for the server that is played here."""
    return vocabulary("o200k_base").lengths([text])[0]


# Messages of the conversation that is replayed, by their identity: they come again in each of its requests.
_rendered: dict[int, tuple[JsonDict, str]] = {}


def rendered(message: JsonDict) -> str:
    """A message as the played server's template writes it."""
    known = _rendered.get(id(message))
    if known is None or known[0] is not message:
        known = _rendered[id(message)] = (message, _written(message))
    return known[1]


def _written(message: JsonDict) -> str:
    content = message.get("content") or ""
    if not isinstance(content, str):
        content = json.dumps(content, ensure_ascii=False)
    called = "".join(
        f"\n{call['function']['name']}({call['function']['arguments']})" for call in message.get("tool_calls") or ()
    )
    return f"{message['role']}\n{content}{called}"


def size(message: JsonDict) -> int:
    """Tokens of one message."""
    return _MESSAGE_TOKENS + count(rendered(message))


def tools_text(tools: Sequence[JsonDict]) -> str:
    """Tool schemas as the template writes them."""
    return json.dumps(tools, ensure_ascii=False) if tools else ""


def prompt_tokens(tools: Sequence[JsonDict], messages: Sequence[JsonDict]) -> int:
    """Tokens of a whole prompt."""
    return count(tools_text(tools)) + sum(map(size, messages))


def budget(window_tokens: int, floor_tokens: int = 0) -> Budget:
    """The budget under which every method is asked to compact."""
    return Budget(rules=RULES, window_tokens=window_tokens, floor=lambda: floor_tokens, likely_ratio=1.0)


class Slot:
    """One server slot: prefills what it does not hold, decodes, and holds both afterwards."""

    def __init__(self) -> None:
        self._held: list[str] = []
        self.work = 0

    def run(self, tools: Sequence[JsonDict], messages: Sequence[JsonDict], answer: str) -> int:
        """Counts the work of one request, uncached prefill tokens + 15 × decode tokens; returns what it prefilled."""
        prompt = [tools_text(tools), *map(rendered, messages)]
        same = 0
        while same < min(len(prompt), len(self._held)) and prompt[same] == self._held[same]:
            same += 1
        tokens = sum(count(text) + _MESSAGE_TOKENS for text in prompt[same:])
        if same < min(len(prompt), len(self._held)):
            # The messages part inside: what stands before is still held.
            tokens -= count(_common(prompt[same], self._held[same]))
        self.work += tokens + DECODE_WEIGHT * count(answer)
        self._held = [*prompt, answer]
        return tokens


def _common(one: str, other: str) -> str:
    length = next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    return one[:length]


@dataclass
class Tally:
    """What came of one conversation at one context length."""

    name: str
    turns: int = 0
    truncated: int = 0
    refused: int = 0
    calls: int = 0
    waited: int = 0
    pairs: int = 0
    stable: int = 0
    work: int = 0
    bound: int = 0
    invalid: list[str] = field(default_factory=list)
    kept: list[float] = field(default_factory=list)
    bound_kept: list[float] = field(default_factory=list)
    supported: list[float] = field(default_factory=list)
    compactions: int = 0
    invented: int = 0


async def replay(transcript: Transcript, window_tokens: int, method: Method) -> Tally:
    """Sends every request of the conversation's client through `method`, in order."""
    _rendered.clear()
    tally = Tally(transcript.name)
    slot, ideal = Slot(), Slot()
    before: list[JsonDict] | None = None
    for index, message in enumerate(transcript.messages):
        if message["role"] != "assistant" or index < 2:
            continue
        client = transcript.messages[:index]
        answer = rendered(message)
        before_work = ideal.work
        new_tokens = ideal.run(transcript.tools, client, answer)
        turn = await method(transcript, client)
        tally.turns += 1
        tally.calls += len(turn.calls) + sum(bool(call.answer) for call in turn.later)
        begun_work = slot.work
        for call in turn.calls:
            slot.run(transcript.tools if call.with_tools else (), call.messages, call.answer)
        if turn.messages is None:
            # Nothing was answered, so nothing is owed.
            tally.refused += 1
            continue
        tally.bound += ideal.work - before_work
        tokens = prompt_tokens(transcript.tools, turn.messages)
        tally.truncated += turn.is_cut or tokens + RULES.answer_min_tokens > window_tokens
        summaries_work = slot.work - begun_work
        tally.waited += summaries_work + max(slot.run(transcript.tools, turn.messages, answer) - new_tokens, 0)
        for call in turn.later:
            slot.run(transcript.tools if call.with_tools else (), call.messages, call.answer)
        prompt = list(turn.messages)
        if before is not None:
            tally.pairs += 1
            tally.stable += prompt[: len(before)] == before
        before = prompt
        if turn.is_new:
            tally.compactions += 1
            tally.invented += any(rule in searchable(turn.messages) for rule in INVENTED)
        if turn.is_compacted:
            _judge(tally, transcript, client, turn.messages)
            _judge_next(tally, client, turn.messages, message)
    tally.work = slot.work
    return tally


def _judge(tally: Tally, transcript: Transcript, client: Sequence[JsonDict], upstream: Sequence[JsonDict]) -> None:
    tally.invalid += [f"{len(client)}: {problem}" for problem in problems(client, upstream)]
    due = [fact for fact in transcript.facts if fact["msg"] < len(client)]
    if not due:
        return
    shown = searchable(upstream)
    kept = [fact for fact in due if fact["text"] in shown]
    tally.kept.append(len(kept) / len(due))
    with_cue = [fact for fact in kept if _has_cue(fact["text"], searchable([client[fact["msg"]]]), shown)]
    tally.bound_kept.append(len(with_cue) / len(due))


def _judge_next(tally: Tally, client: Sequence[JsonDict], upstream: Sequence[JsonDict], answer: JsonDict) -> None:
    needed = taken(client, answer)
    if not needed:
        return
    shown = searchable(upstream)
    tally.supported.append(sum(stands(token, shown) for token in needed) / len(needed))


_CUE_CHARS = 60
_WORD = re.compile(r"[^\W\d_]{3,}")


def _has_cue(fact: str, original: str, shown: str) -> bool:
    """Whether the fact stands beside a word beside which it stood, so that a bag of strings does not count.

    Facts that are a sentence of their own carry their cue in them.
    """
    if len(_WORD.findall(fact)) >= 4:
        return True
    cues = {word.lower() for place in _places(fact, original) for word in _WORD.findall(place.replace(fact, " "))}
    return not cues or any(
        cues & {word.lower() for word in _WORD.findall(place.replace(fact, " "))} for place in _places(fact, shown)
    )


def _places(fact: str, text: str) -> list[str]:
    found: list[str] = []
    at = text.find(fact)
    while at >= 0 and len(found) < 50:
        found.append(text[max(at - _CUE_CHARS, 0) : at + len(fact) + _CUE_CHARS])
        at = text.find(fact, at + 1)
    return found


# One or two next answers say nothing of a conversation, and would weigh as much as another's fifty.
_LEAST_NEXT_TURNS = 3


class Row(NamedTuple):
    """The figures of one method at one context length, over all conversations.

    Facts and next-action support are means over the conversations that were compacted: one that fits whole loses
    nothing and proves nothing.

    Attributes:
        next_ratio: the share of what the recorded next answers take from far back (`next_action.taken`) that the
            compacted prompts before them hold; a mean over turns, then over conversations with three of them or more.
        waited_per_100: work that stood between 100 requests and the first words of their answers, beside the prefill of
            what is new in them: summaries, and prompts that had changed.
        invented_ratio: the share of compactions with a rule that nobody gave (`INVENTED`).
    """

    truncated: int
    refused: int
    valid_ratio: float
    facts: float
    bound_facts: float
    calls_per_100: float
    stability: float
    work_ratio: float
    waited_per_100: float
    next_ratio: float
    invented_ratio: float


def row(tallies: Sequence[Tally]) -> Row:
    """The figures over all conversations."""
    turns = sum(each.turns for each in tallies)
    judged = sum(len(each.kept) for each in tallies)
    broken = len({(each.name, text.split(":")[0]) for each in tallies for text in each.invalid})
    pairs = sum(each.pairs for each in tallies)
    return Row(
        truncated=sum(each.truncated for each in tallies),
        refused=sum(each.refused for each in tallies),
        valid_ratio=1 - broken / judged if judged else 1.0,
        facts=_mean([statistics.mean(each.kept) for each in tallies if each.kept]),
        bound_facts=_mean([statistics.mean(each.bound_kept) for each in tallies if each.bound_kept]),
        calls_per_100=100 * sum(each.calls for each in tallies) / turns,
        stability=sum(each.stable for each in tallies) / pairs if pairs else 1.0,
        work_ratio=sum(each.work for each in tallies) / sum(each.bound for each in tallies),
        waited_per_100=100 * sum(each.waited for each in tallies) / turns,
        next_ratio=_mean(
            [statistics.mean(each.supported) for each in tallies if len(each.supported) >= _LEAST_NEXT_TURNS]
        ),
        invented_ratio=sum(each.invented for each in tallies) / max(sum(each.compactions for each in tallies), 1),
    )


def _mean(values: Sequence[float]) -> float:
    return statistics.mean(values) if values else 1.0
