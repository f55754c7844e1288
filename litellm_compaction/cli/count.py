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
from litellm_compaction.events import harmless
from litellm_compaction.proxy.report import counted_by
from litellm_compaction.tokenizers.model_files import ModelFiles
from litellm_compaction.tokenizers.sources import Sources, TokenizerSource, check_tokenizer
from litellm_compaction.tokens.counter import Count, TokenCounter
from litellm_compaction.windows.lmstudio import WantedModel
from litellm_compaction.windows.windows import Target


class BadRequest(CompactionError):
    """The input is no request; the message names the expected form."""


@click.command()
@click.option("--model", required=True, metavar="NAME", help="The model, as LM Studio names it.")
@click.option("--tokenizer", default="", metavar="PATH", help="A .gguf or tokenizer.json file of the model.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON: one object.")
@click.argument("file")
def count(file: str, model: str, tokenizer: str, as_json: bool) -> int:
    """Count the tokens of a request.

    FILE holds {"messages": […], "tools": […]}, or a list of messages; with - it is the standard input. The model's
    own vocabulary counts, as far as this package or the file has it.
    """
    if tokenizer:
        check_tokenizer(tokenizer, "--tokenizer")
    request = _read(file)
    counted, source = asyncio.run(_counted(request, model, tokenizer))
    if as_json:
        fields = {"model": model, "tokens": counted.tokens, "exact": counted.exact, "messages": list(counted.sizes)}
        print(json.dumps(fields))
    else:
        print("\n".join(map(harmless, _lines(counted, request, source))))
    return 0


async def _counted(request: Request, model: str, tokenizer: str) -> tuple[Count, TokenizerSource]:
    source = await Sources(tokenizer=tokenizer, files=ModelFiles(), on_failure=_complain).source(
        Target(key=model, model=model, api_base=None, api_key=None, context_length=None),
        "",
        WantedModel(key=model),
        patient=True,
    )
    return await TokenCounter().count(model, source.family, request), source


def _lines(counted: Count, request: Request, source: TokenizerSource) -> Iterator[str]:
    certainty = "exact" if counted.exact else f"an estimate, at most {counted.error_ratio:.0%} too low"
    yield f"{counted.overhead_tokens:>9,}  around the conversation"
    if request.tools:
        yield f"{counted.tools_tokens:>9,}  {len(request.tools)} tools"
    for index, (message, tokens) in enumerate(zip(request.messages, counted.sizes, strict=True)):
        # A role may hold half a surrogate pair, which no terminal can show.
        yield f"{tokens:>9,}  messages[{index}] {message.role[:40].encode('utf-8', 'replace').decode()}"
    yield f"tokens     {counted.tokens:,}, {certainty}"
    refused = source.template != "formula" and not counted.rendered
    formula = " (it refuses this request: estimated by a formula)" if refused else ""
    yield f"counted    with {counted_by(source)}{formula}"


def _complain(failure: str) -> None:
    print(f"litellm-compaction: {failure} The next source counts.", file=sys.stderr)


def _read(name: str) -> Request:
    """The request in a file, or in the standard input for `-`; a list is one of messages without tools.

    Raises:
        BadRequest: it cannot be read, or is something else.
    """
    try:
        raw = sys.stdin.buffer.read() if name == "-" else Path(name).read_bytes()
        document = json.loads(raw)
        asked = document if isinstance(document, dict) else {"messages": document}
        messages = tuple(map(parse_message, asked["messages"]))
        return Request(messages=messages, tools=tuple(asked.get("tools") or ()))
    except OSError as error:
        raise BadRequest(f"{name} cannot be read: {error.strerror or error}") from error
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        what = error if isinstance(error, ValueError) else type(error).__name__
        raise BadRequest(f'{name} is no request {{"messages": [...], "tools": [...]}} in JSON: {what}') from error
