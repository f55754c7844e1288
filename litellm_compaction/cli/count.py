"""`litellm-compaction count`: how many tokens does this request take?"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import click

from litellm_compaction.core.messages import Request, parse_message
from litellm_compaction.errors import CompactionError
from litellm_compaction.proxy.report import counted_by
from litellm_compaction.tokenizers.registry import Sources, TokenizerSource, check_tokenizer
from litellm_compaction.tokens.counter import TokenCounter
from litellm_compaction.tokens.estimate import Estimate
from litellm_compaction.windows.windows import Target


@click.command()
@click.option("--model", required=True, metavar="NAME", help="The model, as LM Studio names it.")
@click.option("--tokenizer", metavar="PATH", help="A tokenizer.json, or what else the setting takes.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON: one object.")
@click.argument("file")
def count(file: str, model: str, tokenizer: str | None, as_json: bool) -> int:
    """Count the tokens of a request.

    FILE holds {"messages": […], "tools": […]}, or a list of messages; with - it is the standard input. The model's
    own vocabulary counts, as far as this package or the file has it.
    """
    if tokenizer:
        check_tokenizer(tokenizer, "--tokenizer")
    request = _read(file)
    target = Target(key=model, model=model, api_base=None, api_key=None, context_length=None)
    source = Sources(tokenizer or "").source(target, "")
    counted = asyncio.run(TokenCounter().count(model, source.family, request))
    if as_json:
        fields = {"model": model, "tokens": counted.tokens, "exact": counted.own.exact, "messages": list(counted.sizes)}
        print(json.dumps(fields))
    else:
        print("\n".join(_lines(counted, request, source)))
    return 0


def _lines(counted: Estimate, request: Request, source: TokenizerSource) -> Iterator[str]:
    certainty = "exact" if counted.own.exact else f"an estimate, from {counted.low:,} to {counted.likely:,}"
    yield f"{counted.overhead_tokens:>9,}  around the conversation"
    if request.tools:
        yield f"{counted.tools_tokens:>9,}  {len(request.tools)} tools"
    for index, (message, tokens) in enumerate(zip(request.messages, counted.sizes, strict=True)):
        yield f"{tokens:>9,}  messages[{index}] {message.role[:40]}"
    yield f"tokens     {counted.tokens:,}, {certainty}"
    yield f"counted    with {counted_by(source)}"


def _read(name: str) -> Request:
    """The request in a file, or in the standard input for `-`; a list is one of messages without tools."""
    try:
        raw = sys.stdin.buffer.read() if name == "-" else Path(name).read_bytes()
        document = json.loads(raw)
        asked = document if isinstance(document, dict) else {"messages": document}
        messages = tuple(map(parse_message, asked["messages"]))
        return Request(messages=messages, tools=tuple(asked.get("tools") or ()))
    except OSError as error:
        raise CompactionError(f"{name} cannot be read: {error.strerror or error}") from error
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        what = error if isinstance(error, ValueError) else type(error).__name__
        raise CompactionError(f'{name} is no request {{"messages": [...], "tools": [...]}} in JSON: {what}') from error
