"""`litellm-compaction count`: how many tokens does this request take?"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from litellm_compaction.cli.config_file import API_BASE_VARIABLE
from litellm_compaction.cli.examined import source_words, template_words, tokenizer_name
from litellm_compaction.cli.lm_studio import listing_of
from litellm_compaction.cli.requests import Asked, BadRequest, lines, opened, parse_request, read_request
from litellm_compaction.core.messages import Request
from litellm_compaction.errors import CompactionError, ConfigError
from litellm_compaction.events import harmless
from litellm_compaction.tokenizers.model_files import ModelFiles
from litellm_compaction.tokenizers.sources import Sources, TokenizerSource, check_tokenizer
from litellm_compaction.tokens.counter import Count, TokenCounter
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
        model: as LM Studio names it; only a batch whose lines name theirs does without.
        api_base: of the LM Studio that may know the model; None looks where it usually is.
        tokenizer: as the setting of that name; "" is `auto`.
        batch: one request per line.

    Raises:
        CompactionError: an option or the one request cannot be used.
    """
    if not model and not batch:
        raise ConfigError("--model is missing: name the model as LM Studio does, such as qwen/qwen3-8b.")
    if tokenizer:
        check_tokenizer(tokenizer, "--tokenizer")
    with opened(file) as stream:
        # Before any server is asked: a wrong file is said at once.
        asked = None if batch else read_request(stream)
        address = api_base or environ.get(API_BASE_VARIABLE) or DEFAULT_API_BASE
        listing = listing_of(address, environ.get("LM_STUDIO_API_KEY"))
        teller = _Teller(address, listing, tokenizer)
        if asked is None:
            return asyncio.run(_batch(lines(stream), model, teller))
        counted = asyncio.run(teller.count(model, asked.request))
        if as_json:
            # Roles may hold what a terminal cannot show, such as lone surrogates.
            print(json.dumps(_document(counted, asked), indent=2))
        else:
            print("\n".join(map(harmless, _lines(counted, asked, address))))
        return 0


async def _batch(rows: Iterator[bytes], model: str, teller: _Teller) -> int:
    code = 0
    for row in rows:
        answer = await _answer(row, model, teller)
        if "error" in answer:
            code = 1
        # At once: whoever asks may wait for each answer.
        print(json.dumps(answer), flush=True)
    return code


async def _answer(row: bytes, model: str, teller: _Teller) -> dict[str, object]:
    try:
        asked = parse_request(row)
        name = asked.model or model
        if not name:
            raise BadRequest("model: it is missing, and there is no --model")
        counted = await teller.count(name, asked.request)
    except CompactionError as error:
        return {"error": str(error)}
    return {"model": name, "tokens": counted.count.tokens, "exact": counted.count.exact}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Counted:
    """A count, and what is known of the model.

    Attributes:
        window_tokens: None where it is not loaded, or nobody knows.
        window_source: which of LM Studio's APIs said so.
        is_reachable: whether an LM Studio answered at all.
    """

    model: str
    count: Count
    source: TokenizerSource
    window_tokens: int | None
    window_source: str
    is_reachable: bool


class _Teller:
    """Counts for any models of one server, whether it answers or not."""

    def __init__(self, api_base: str, listing: Listing | None, tokenizer: str) -> None:
        self._api_base = api_base
        self._listing = listing
        self._counter = TokenCounter()
        self._sources = Sources(tokenizer=tokenizer, files=ModelFiles(), on_failure=_complain)

    async def count(self, model: str, request: Request) -> _Counted:
        """The count of a request to a model."""
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
        counted = await self._counter.count(model, source.family, request)
        window_tokens = instance.context_length if instance is not None else None
        return _Counted(
            model=model,
            count=counted,
            source=source,
            window_tokens=window_tokens,
            window_source=f"api/{self._listing.api}" if self._listing is not None and window_tokens else "",
            is_reachable=self._listing is not None,
        )


def _document(counted: _Counted, asked: Asked) -> dict[str, object]:
    count, source = counted.count, counted.source
    window = counted.window_tokens
    return {
        "model": counted.model,
        "tokens": count.tokens,
        "exact": count.exact,
        "error_ratio": count.error_ratio,
        "family": source.family.name,
        "tokenizer": tokenizer_name(source),
        "tokenizer_source": source.kind,
        "template": source.template if count.rendered else "formula",
        "overhead_tokens": count.overhead_tokens,
        "tools_tokens": count.tools_tokens,
        "messages": [
            {"role": message.role, "tokens": tokens}
            for message, tokens in zip(asked.request.messages, count.sizes, strict=True)
        ],
        "window_tokens": window,
        "window_source": counted.window_source,
        "used_ratio": round(count.tokens / window, 4) if window else None,
    }


def _lines(counted: _Counted, asked: Asked, address: str) -> Iterator[str]:
    count, source = counted.count, counted.source
    certainty = "exact" if count.exact else f"an estimate, at most {count.error_ratio:.0%} too low"
    yield f"tokens     {count.tokens:,}, {certainty}"
    yield f"window     {_window_words(counted, address)}"
    yield f"family     {source.family.name}"
    yield f"tokenizer  {source_words(source)}"
    refused = source.template != "formula" and not count.rendered
    yield f"template   {'it refuses this request: estimated by a formula' if refused else template_words(source)}"
    yield ""
    yield f"{count.overhead_tokens:>9,}  around the conversation"
    if asked.request.tools:
        yield f"{count.tools_tokens:>9,}  {len(asked.request.tools)} tools"
    for index, (message, tokens) in enumerate(zip(asked.request.messages, count.sizes, strict=True)):
        yield f"{tokens:>9,}  messages[{index}] {_printable(message.role)}"


def _window_words(counted: _Counted, address: str) -> str:
    window = counted.window_tokens
    if not window:
        where = _without_credentials(address)
        if not counted.is_reachable:
            return f"not known: no LM Studio answers at {where}"
        return f"not known: {counted.model} is not loaded in the LM Studio at {where}"
    return f"{window:,} tokens, from {counted.window_source}: {counted.count.tokens / window:.1%} used"


def _printable(text: str) -> str:
    return text[:40].encode("utf-8", "replace").decode() if text.isprintable() else "?"


def _without_credentials(address: str) -> str:
    scheme, separator, rest = address.partition("://")
    authority, slash, path = rest.partition("/")
    return f"{scheme}{separator}{authority.rpartition('@')[2]}{slash}{path}"


def _complain(failure: str) -> None:
    print(f"litellm-compaction: {failure} The next source counts.", file=sys.stderr)
