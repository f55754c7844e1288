"""What becomes of real conversations at a model whose vocabulary and template nobody knows.

    python benchmarks/tokens/unknown_models.py FOLDER [--windows 4096 8192] [--truth qwen3-8b] [--name glm-4]
                                                      [--shared] [--protocol] [--refusals]

FOLDER (or the environment variable COMPACTION_TRANSCRIPTS) holds conversations as JSON: `messages`, `tools`. Each is
resent turn by turn, as a stateless client does, to an engine of its own. In-process: no server, no proxy. What counts
the prompts is the vocabulary and the template of another family (`--truth`), which the engine is not told: it is asked
for `--name`, or for the name before a `=` in the truth. A truth that ends in `:no-tools` has a template that leaves
the tools out, `:no-calls` one that leaves out tool calls and their results as well; one that ends in `:x1.2` counts 1.2
times as many tokens as the family's. With `--shared` one engine answers all the conversations, with `--protocol` the
server counts a request for nothing.

refused, of which wrong: by the truth a compaction could have made room. truncated: prompts and answers that may
together be longer than the window (promise P1), those of summaries and questions included. low: requests whose truth
lies above what is kept free for them, whether that did harm or not. early: compacted although prompt and output buffer
were below the trigger. questions: to the server, by an answer of one token. prefill: tokens that one server slot with a
prefix cache has to read, decode: those that it writes. error: of a count against the truth, in percent, from the third
request of a conversation on: median, and at the 90th percentile. The exit code is 1 where something was truncated or
invalid.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.lib.measuring import JsonDict, Transcript, budget, load
from litellm_compaction.core.budget import MARGIN_MIN_TOKENS
from litellm_compaction.core.messages import JsonValue, Message, Request
from litellm_compaction.core.view import RECORD_TOKENS, View
from litellm_compaction.engine import PreparedRequest, PruningModel
from litellm_compaction.engine.context import SummaryAnswer
from litellm_compaction.errors import DoesNotFit
from litellm_compaction.tokenizers.families import Family, family_of
from litellm_compaction.tokens.counter import TokenCounter
from litellm_compaction.tokens.prompt import TextCounts, own_count, render
from litellm_compaction.windows.windows import Target, Windows
from tests.builders import parsed
from tests.engine.bench import SUMMARY, Bench
from tests.integration.validity import problems

_VARIABLE = "COMPACTION_TRANSCRIPTS"
_TRUTHS = ("qwen3-8b", "qwen3-8b:no-tools", "qwen3-8b:no-calls", "llama-3.1-8b", "gemma-4-12b", "mistral-nemo")

_texts = TextCounts()


class Truth:
    """The server's own tokenizer, and one slot of it with a prefix cache."""

    def __init__(self, name: str, window_tokens: int) -> None:
        family, _, self._mode = name.partition(":")
        self._factor = float(self._mode[1:]) if self._mode[:1] == "x" else 1.0
        self.window_tokens = window_tokens
        self._family: Family = family_of("", family)
        self._held = ""
        self.prefill_tokens = 0
        self.decode_tokens = 0
        self.over = 0

    async def tokens(self, request: Request) -> int:
        """Of a prompt."""
        return round(self._factor * own_count(self._family, self._seen(request), _texts, share=1).tokens)

    async def run(self, request: Request, answer_tokens: int, most_tokens: int) -> int:
        """The prompt tokens of a request that is answered with so many; it may be answered with `most_tokens`."""
        tokens = await self.tokens(request)
        self.over += tokens + most_tokens > self.window_tokens
        seen = self._seen(request)
        prompt = render(self._family, seen.messages, seen.tools)
        text = prompt.text if prompt is not None else json.dumps([dict(message.raw) for message in request.messages])
        same = _common_chars(text, self._held)
        self.prefill_tokens += round(tokens * (1 - same / max(1, len(text))))
        self.decode_tokens += answer_tokens
        self._held = text
        return tokens

    def _seen(self, request: Request) -> Request:
        if not self._mode or self._factor != 1:
            return request
        if self._mode == "no-tools":
            return replace(request, tools=())
        seen = [
            message if not message.calls else parsed([{"role": "assistant", "content": message.text}])[0]
            for message in request.messages
            if message.role != "tool"
        ]
        return replace(request, tools=(), messages=tuple(seen))


@dataclass
class Server:
    """What the engine may ask: for a count by an answer of one token, and for summaries."""

    truth: Truth
    questions: int = 0
    summaries: int = 0

    async def __call__(self, request: Request) -> int | None:
        self.questions += 1
        tokens = await self.truth.run(request, 1, 1)
        return min(tokens, self.truth.window_tokens)

    async def summarize(
        self,
        messages: Sequence[Message],
        *,
        max_tokens: int,
        tools: Sequence[JsonValue] = (),
        tool_choice: JsonValue = None,
    ) -> SummaryAnswer:
        """A summary of usual length."""
        self.summaries += 1
        request = Request(messages=tuple(messages), tools=tuple(tools), tool_choice=tool_choice)
        await self.truth.run(request, len(SUMMARY) // 4, max_tokens)
        return SummaryAnswer(text=SUMMARY)


class Refusal(NamedTuple):
    """A request that was refused, what it takes, and what no compaction can shrink of it."""

    name: str
    messages: int
    tokens: int
    floor_tokens: int
    can_fit: bool
    error: str


@dataclass
class Found:
    """Figures of one conversation, or of several added up."""

    turns: int = 0
    refused: int = 0
    wrong: int = 0
    truncated: int = 0
    low: int = 0
    invalid: int = 0
    compacted: int = 0
    early: int = 0
    summaries: int = 0
    questions: int = 0
    prefill: int = 0
    decode: int = 0
    errors: list[float] = field(default_factory=list)
    refusals: list[Refusal] = field(default_factory=list)

    def add(self, other: Found) -> None:
        """Takes another one's figures in."""
        for each in fields(self):
            setattr(self, each.name, getattr(self, each.name) + getattr(other, each.name))


def main() -> int:
    """Prints one table for each context length."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", default=os.environ.get(_VARIABLE))
    parser.add_argument("--windows", type=int, nargs="+", default=[4096, 8192, 16_384], metavar="TOKENS")
    parser.add_argument("--truth", nargs="+", default=list(_TRUTHS), help="families that count, by a model's name")
    parser.add_argument("--name", default="nobody-knows", help="the model that the engine is asked for")
    parser.add_argument("--shared", action="store_true", help="one engine for all conversations")
    parser.add_argument("--protocol", action="store_true", help="the server counts for nothing")
    parser.add_argument("--refusals", action="store_true", help="print each")
    chosen = parser.parse_args()
    if chosen.folder is None:
        parser.error(f"name a folder of conversations, or set {_VARIABLE}")
    talks = load(Path(chosen.folder))
    if not talks:
        parser.error(f"{chosen.folder} holds no .json file")
    is_bad = False
    for window in chosen.windows:
        print(f"\n{window} tokens, {chosen.name} counted by:\n{'':20} {_HEADINGS}")
        for truth in chosen.truth:
            name, _, counting = truth.rpartition("=")
            whole = asyncio.run(
                replayed(talks, counting, name or chosen.name, window, shared=chosen.shared, protocol=chosen.protocol)
            )
            print(f"{truth:20} {_line(whole)}", flush=True)
            for refusal in whole.refusals if chosen.refusals else ():
                print(f"    {refusal.name} {refusal.messages}: {'CAN' if refusal.can_fit else 'cannot'} fit, ", end="")
                print(f"{refusal.tokens} tokens, floor {refusal.floor_tokens}; {refusal.error}")
            is_bad = is_bad or whole.truncated + whole.invalid > 0
    return int(is_bad)


_HEADINGS = (
    "turns refused wrong truncated low invalid compacted early summaries questions/turn prefill/turn decode/turn error"
)


def _line(found: Found) -> str:
    turns = max(1, found.turns)
    return (
        f"{found.turns:5} {found.refused:7} {found.wrong:5} {found.truncated:9} {found.low:3} {found.invalid:7} "
        f"{found.compacted:9} {found.early:5} {found.summaries:9} {found.questions / turns:14.2f} "
        f"{found.prefill / turns:12.0f} {found.decode / turns:11.0f} "
        f"{_percent(found.errors, 0.5):.2f}/{_percent(found.errors, 0.9):.2f}"
    )


def _percent(errors: Sequence[float], share: float) -> float:
    """The error that so large a share of all does not exceed."""
    ordered = sorted(errors)
    return 100 * ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


def _common_chars(one: str, other: str) -> int:
    """How far two texts are the same."""
    least, most = 0, min(len(one), len(other))
    while least < most:
        middle = (least + most + 1) // 2
        least, most = (middle, most) if one[least:middle] == other[least:middle] else (least, middle - 1)
    return least


class Protocol(Windows):
    """The windows of a server that counts a request without reading it."""

    def __init__(self, truth: Truth) -> None:
        super().__init__(cache_s=5.0)
        self._truth = truth

    async def tokens_of(self, target: Target, request: Request) -> int | None:
        return await self._truth.tokens(request)


async def replayed(
    talks: Sequence[Transcript],
    truth_name: str,
    name: str,
    window: int,
    *,
    shared: bool = False,
    protocol: bool = False,
) -> Found:
    """The conversations, each at an engine that has learned nothing yet, or all at one that is `shared`."""
    whole = Found()
    together = [talks] if shared else [[talk] for talk in talks]
    for each in together:
        truth, found = Truth(truth_name, window), Found()
        bench = Bench(counter=TokenCounter(), **({"windows": Protocol(truth)} if protocol else {}))
        server = Server(truth)
        for talk in each:
            await _conversation(talk, bench, server, name, found)
        await bench.compactor.aclose()
        found.truncated, found.questions, found.summaries = truth.over, server.questions, server.summaries
        found.prefill, found.decode = truth.prefill_tokens, truth.decode_tokens
        whole.add(found)
    return whole


async def _conversation(talk: Transcript, bench: Bench, server: Server, name: str, found: Found) -> None:
    messages, tools, truth = talk.messages, tuple(talk.tools), server.truth
    target = bench.target(truth.window_tokens, model=name)
    pruning = PruningModel(label=name, target=target, ask=server.summarize, is_same=True)
    turns = 0
    for index, message in enumerate(messages):
        if message["role"] != "assistant" or index < 2:
            continue
        found.turns += 1
        turns += 1
        request = Request(messages=parsed(messages[:index]), tools=tools)
        context = bench.context(truth.window_tokens, measure=server, target=target, pruning_models=[pruning])
        try:
            guarded = await bench.compactor.guard(request, context)
        except DoesNotFit as error:
            await _refused(found, request, truth, talk.name, str(error))
            continue
        tokens = await _answered(found, request, messages[: index + 1], guarded, truth)
        if turns > 2:
            found.errors.append(abs(guarded.count.tokens / tokens - 1))
        bench.compactor.replies.learn(context, guarded, prompt_tokens=tokens, completion_tokens=1)


async def _refused(found: Found, request: Request, truth: Truth, name: str, error: str) -> None:
    """Takes a refusal in, and whether the truth makes it a wrong one."""
    exact = budget(truth.window_tokens)
    tokens = await truth.tokens(request)
    view = View(messages=request.messages, sizes=(), fixed_tokens=0, count_text=len, hashes=())
    protected = sorted(view.protected)
    floor_tokens = await truth.tokens(replace(request, messages=tuple(request.messages[index] for index in protected)))
    if len(protected) < len(request.messages):
        floor_tokens += RECORD_TOKENS
    can_fit = exact.fits(tokens) or exact.fits(floor_tokens)
    found.refused += 1
    found.wrong += can_fit
    found.refusals.append(Refusal(name, len(request.messages), tokens, floor_tokens, can_fit, error))


async def _answered(
    found: Found, request: Request, talk: Sequence[JsonDict], guarded: PreparedRequest, truth: Truth
) -> int:
    """Takes an answered request in: the last of `talk` is the answer. Gives the prompt's true tokens."""
    sent = request if guarded.messages is None else replace(request, messages=guarded.messages)
    most_tokens = guarded.max_output_tokens(None)
    written = json.dumps([talk[-1].get("content"), talk[-1].get("tool_calls")], ensure_ascii=False)
    tokens = await truth.run(sent, min(len(written) // 4, most_tokens), most_tokens)
    found.low += tokens > max(guarded.count.likely, guarded.count.tokens + MARGIN_MIN_TOKENS)
    if guarded.messages is not None:
        found.compacted += 1
        found.early += not budget(truth.window_tokens).triggers(await truth.tokens(request))
        found.invalid += bool(problems(talk[:-1], [dict(message.raw) for message in guarded.messages]))
    return tokens


if __name__ == "__main__":
    sys.exit(main())
