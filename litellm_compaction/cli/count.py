"""`litellm-compaction count`: how many tokens does this request take?"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from litellm_compaction.cli.requests import Asked, BadRequest, lines, opened, parse_request, read_request
from litellm_compaction.cli.servers import listing_of
from litellm_compaction.core.messages import Request
from litellm_compaction.errors import CompactionError, ConfigError
from litellm_compaction.events import harmless
from litellm_compaction.proxy.config_check import API_BASE_VARIABLE
from litellm_compaction.proxy.report import source_words, template_words, tokenizer_name
from litellm_compaction.tokenizers.model_files import ModelFiles
from litellm_compaction.tokenizers.sources import Sources, TokenizerSource, check_tokenizer
from litellm_compaction.tokens.counter import TokenCounter
from litellm_compaction.tokens.estimate import Estimate
from litellm_compaction.windows.fetch import without_userinfo
from litellm_compaction.windows.lmstudio import DEFAULT_API_BASE, Listing, WantedModel, match
from litellm_compaction.windows.windows import Target


def count(
    file: str,
    *,
    model: str,
    api_base: str | None,
    tokenizer: str,
    as_json: bool,
    batch: bool,
    environ: Mapping[str, str],
) -> int:
    """Prints the count; 0 when all could be counted, else 1.

    Args:
        file: a path, or `-` for the standard input.
        model: as LM Studio names it; "" if each line of a batch names its own.
        api_base: of the LM Studio that may know the model; None looks at the usual address.
        tokenizer: as the setting of that name; "" is `auto`.
        batch: one request per line.

    Raises:
        CompactionError: an option or the one request cannot be used.
    """
    if not model and not batch:
        raise ConfigError("--model is missing: name the model as LM Studio does, such as qwen/qwen3-8b.")
    if tokenizer:
        check_tokenizer(tokenizer, "--tokenizer")
    address = api_base or environ.get(API_BASE_VARIABLE) or DEFAULT_API_BASE

    def teller() -> _Teller:
        return _Teller(address, listing_of(address, environ.get("LM_STUDIO_API_KEY")), tokenizer)

    if batch:
        with opened(file) as stream:
            return asyncio.run(_batch(lines(stream), model, teller()))
    # Before any server is asked: a wrong file is reported at once.
    asked = read_request(file)
    counted = asyncio.run(teller().count(model, asked.request))
    if as_json:
        # Roles may hold characters that a terminal cannot show, such as lone surrogates.
        print(json.dumps(_document(counted, asked), indent=2))
    else:
        print("\n".join(map(harmless, _lines(counted, asked, address))))
    return 0


async def _batch(rows: Iterator[bytes], model: str, teller: _Teller) -> int:
    code = 0
    for row in rows:
        try:
            asked = parse_request(row)
            name = asked.model or model
            if not name:
                raise BadRequest("model: it is missing, and there is no --model")
            found = (await teller.count(name, asked.request)).count
            answer = {"model": name, "tokens": found.tokens, "exact": found.own.exact}
        except CompactionError as error:
            answer, code = {"error": str(error)}, 1
        # At once: the other program may wait for each answer.
        print(json.dumps(answer), flush=True)
    return code


@dataclass(frozen=True, slots=True)
class _Counted:
    model: str
    count: Estimate
    source: TokenizerSource
    # None if it is not loaded, or not known.
    window_tokens: int | None
    # The version of LM Studio's; "" if none answered.
    api: str


class _Teller:
    def __init__(self, api_base: str, listing: Listing | None, tokenizer: str) -> None:
        self._api_base = api_base
        self._listing = listing
        self._counter = TokenCounter()
        self._sources = Sources(tokenizer=tokenizer, files=ModelFiles(), on_failure=_complain)

    async def count(self, model: str, request: Request) -> _Counted:
        found = match(self._listing, model) if self._listing is not None else None
        listed, instance = found if found is not None else (None, None)
        target = Target(key=model, model=model, api_base=self._api_base, api_key=None, context_length=None)
        source = await self._sources.source(
            target,
            listed.architecture if listed is not None else "",
            # Files can be found by name too, while LM Studio is not running.
            listed.wanted if listed is not None else WantedModel(key=model),
            patient=True,
        )
        return _Counted(
            model=model,
            count=await self._counter.count(model, source.family, request),
            source=source,
            window_tokens=instance.context_length if instance is not None else None,
            api=self._listing.api if self._listing is not None else "",
        )


def _document(counted: _Counted, asked: Asked) -> dict[str, object]:
    count, source, window = counted.count, counted.source, counted.window_tokens
    return {
        "model": counted.model,
        "tokens": count.tokens,
        "exact": count.own.exact,
        "low_tokens": count.low,
        "high_tokens": count.likely,
        "family": source.family.name,
        "tokenizer": tokenizer_name(source),
        "tokenizer_source": source.kind,
        "template": source.template if count.own.rendered else "formula",
        "overhead_tokens": count.overhead_tokens,
        "tools_tokens": count.tools_tokens,
        "messages": [
            {"role": message.role, "tokens": tokens}
            for message, tokens in zip(asked.request.messages, count.sizes, strict=True)
        ],
        "window_tokens": window,
        "window_source": f"api/{counted.api}" if window else "",
        "used_ratio": round(count.tokens / window, 4) if window else None,
    }


def _lines(counted: _Counted, asked: Asked, address: str) -> Iterator[str]:
    count, source, window = counted.count, counted.source, counted.window_tokens
    certainty = "exact" if count.own.exact else f"an estimate, from {count.low:,} to {count.likely:,}"
    yield f"tokens     {count.tokens:,}, {certainty}"
    where = without_userinfo(address)
    if window:
        yield f"window     {window:,} tokens, from api/{counted.api}: {count.tokens / window:.1%} used"
    elif counted.api:
        yield f"window     not known: {counted.model} is not loaded in the LM Studio at {where}"
    else:
        yield f"window     not known: no LM Studio answers at {where}"
    yield f"family     {source.family.name}"
    yield f"tokenizer  {source_words(source)}"
    refused = source.template != "formula" and not count.own.rendered
    yield f"template   {'it refuses this request: estimated by a formula' if refused else template_words(source)}"
    yield ""
    yield f"{count.overhead_tokens:>9,}  around the conversation"
    if asked.request.tools:
        yield f"{count.tools_tokens:>9,}  {len(asked.request.tools)} tools"
    for index, (message, tokens) in enumerate(zip(asked.request.messages, count.sizes, strict=True)):
        role = message.role[:40].encode("utf-8", "replace").decode() if message.role.isprintable() else "?"
        yield f"{tokens:>9,}  messages[{index}] {role}"


def _complain(failure: str) -> None:
    print(f"litellm-compaction: {failure} The next source counts.", file=sys.stderr)
