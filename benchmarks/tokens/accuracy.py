"""How exact our counts are beside those of a real llama.cpp, family by family and kind by kind.

    LLAMA_SERVER=/path/to/llama-server python benchmarks/tokens/accuracy.py [FOLDER] [--family qwen3] [--kind agent]

The models are made here: no weights, but the vocabulary and the chat template of each family (`lib/engine_models.py`).
FOLDER (or COMPACTION_TRANSCRIPTS) holds conversations as JSON: `messages`, `tools`; without it that kind is left out.
Truth is `usage.prompt_tokens` of `/v1/chat/completions`. Errors are (ours − truth) / truth; "low" counts the requests
whose truth is above what we keep free for it, "refused" those that the engine does not take.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.lib.accuracy_requests import JsonObject, kinds
from benchmarks.lib.engine_models import MODELS, write_model
from benchmarks.lib.llama_server import VARIABLE, LlamaServer, Refused, program, served
from litellm_compaction.core.messages import Request, parse_message
from litellm_compaction.tokenizers.families import Family
from litellm_compaction.tokens.counter import TokenCounter
from litellm_compaction.tokens.estimate import Estimate

_FOLDER_VARIABLE = "COMPACTION_TRANSCRIPTS"
_CUTS = 12


class Outcome(NamedTuple):
    """One request: our count, and the engine's number, or why it gave none."""

    ours: Estimate
    truth: int
    refusal: str = ""

    @property
    def error(self) -> float:
        """How far we are off, as a part of the truth."""
        return self.ours.tokens / self.truth - 1

    @property
    def is_low(self) -> bool:
        """Whether the prompt is longer than what we keep free for it."""
        return self.truth > max(self.ours.likely, self.ours.tokens + 64)


def main() -> None:
    """Measures, and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", default=os.environ.get(_FOLDER_VARIABLE))
    parser.add_argument("--family", choices=MODELS, action="append")
    parser.add_argument("--kind", action="append")
    parser.add_argument("--models", type=Path, help="where the made models are kept for the next time")
    parser.add_argument("--verbose", action="store_true", help="one line for each request that is not exact")
    chosen = parser.parse_args()
    binary = program()
    if binary is None:
        parser.error(f"name the llama-server of llama.cpp in the environment variable {VARIABLE}")
    asked = kinds()
    if chosen.folder:
        asked["transcripts"] = list(transcripts(Path(chosen.folder)))
    asked = {name: requests for name, requests in asked.items() if not chosen.kind or name in chosen.kind}
    print(f"{'':34} requests  exact  refused    low   errors")
    with tempfile.TemporaryDirectory() as scratch:
        for name in chosen.family or MODELS:
            path = write_model((chosen.models or Path(scratch)) / f"{name}.gguf", MODELS[name])
            with served(binary, path) as server:
                for kind, requests in asked.items():
                    outcomes = list(compare(server, MODELS[name].family, requests))
                    print(f"{name:18}{kind:16}{_cells(outcomes)}", flush=True)
                    if chosen.verbose:
                        _print_details(requests, outcomes)


def compare(server: LlamaServer, family: Family, requests: Iterable[JsonObject]) -> Iterator[Outcome]:
    """Our first count of each request, and the engine's."""
    for request in requests:
        ours = asyncio.run(TokenCounter().count("t", family, parsed(request)))
        try:
            yield Outcome(ours, server.prompt_tokens(request))
        except Refused as refusal:
            yield Outcome(ours, 0, str(refusal))


def parsed(request: Mapping[str, object]) -> Request:
    """A client's request as the counter takes it."""
    messages, tools = request["messages"], request.get("tools", ())
    assert isinstance(messages, list)
    assert isinstance(tools, Sequence)
    return Request(messages=tuple(map(parse_message, messages)), tools=tuple(tools))


def transcripts(folder: Path) -> Iterator[JsonObject]:
    """Requests out of real sessions: some of those that a stateless client would have sent."""
    for file in sorted(folder.glob("*.json")):
        read = json.loads(file.read_text(encoding="utf-8"))
        messages = read["messages"]
        ends = [index for index, message in enumerate(messages) if message["role"] == "assistant" and index]
        # Mistral's templates refuse other ids.
        ids = {call["id"]: "" for message in messages for call in message.get("tool_calls") or ()}
        short = {old: f"call{index:05d}" for index, old in enumerate(ids)}
        messages = [_with_ids(message, short) for message in messages]
        for end in ends[:: max(1, len(ends) // _CUTS)]:
            yield {"messages": messages[:end], **({"tools": read["tools"]} if read.get("tools") else {})}


def _with_ids(message: JsonObject, ids: Mapping[str, str]) -> JsonObject:
    changed = dict(message)
    if changed.get("tool_calls"):
        changed["tool_calls"] = [{**call, "id": ids[call["id"]]} for call in changed["tool_calls"]]
    if changed.get("tool_call_id") in ids:
        changed["tool_call_id"] = ids[changed["tool_call_id"]]
    return changed


def _cells(outcomes: Sequence[Outcome]) -> str:
    taken = [outcome for outcome in outcomes if not outcome.refusal]
    errors = [outcome.error for outcome in taken]
    exact = sum(outcome.ours.tokens == outcome.truth for outcome in taken)
    low = sum(outcome.is_low for outcome in taken)
    span = f"{min(errors):+.2%} to {max(errors):+.2%}" if any(errors) else ""
    return f"{len(taken):8} {exact:6} {len(outcomes) - len(taken):8} {low:6}   {span}"


def _print_details(requests: Sequence[JsonObject], outcomes: Sequence[Outcome]) -> None:
    for index, (request, outcome) in enumerate(zip(requests, outcomes, strict=True)):
        if outcome.refusal:
            print(f"    {index}: refused: {outcome.refusal[-120:]}")
        elif outcome.error:
            roles = "".join(message["role"][0] for message in request["messages"])[-40:]
            marks = "".join(
                ("exact " if outcome.ours.own.exact else "", "" if outcome.ours.own.rendered else "formula")
            )
            print(f"    {index}: {roles}: ours {outcome.ours.tokens}, engine {outcome.truth} {marks}")


if __name__ == "__main__":
    main()
