"""Servers as commands ask them without a proxy: LM Studio's listing, chat completions, and `doctor --probe`."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Any

import httpx

from litellm_compaction.core.messages import JsonObject, JsonValue, Request, parse_message
from litellm_compaction.errors import ServerUnavailable
from litellm_compaction.library.context import Completion
from litellm_compaction.proxy.config_check import Finding, note, problem
from litellm_compaction.tokenizers.sources import TokenizerSource
from litellm_compaction.tokens.counter import TokenCounter
from litellm_compaction.tokens.estimate import Estimate
from litellm_compaction.windows.fetch import KeyRefused, without_userinfo
from litellm_compaction.windows.lmstudio import Listing, answers_as_lmstudio, list_models
from litellm_compaction.windows.windows import Target

# A server that generates may be slow to answer; one that is not there refuses at once.
LISTING_LIMIT_S = 5
_CONNECT_S = 5.0
_ERROR_CHARS = 300


def listing_of(url: str, api_key: str | None) -> Listing | None:
    """The models of the LM Studio at `url`; None if nothing, or something else, answers there in time.

    Raises:
        KeyRefused: a server answers, and wants another key.
    """

    async def read() -> Listing | None:
        # The environment's web proxy must not be asked for a server on this machine or network.
        async with httpx.AsyncClient(trust_env=False) as http:
            is_lm_studio = await answers_as_lmstudio(http, url, api_key, timeout_s=LISTING_LIMIT_S)
            listing = await list_models(http, url, api_key, timeout_s=LISTING_LIMIT_S)
            return listing if is_lm_studio else None

    try:
        return asyncio.run(asyncio.wait_for(read(), LISTING_LIMIT_S))
    except KeyRefused:
        raise
    except (ServerUnavailable, asyncio.TimeoutError):
        return None


class ChatServer:
    """`/v1/chat/completions` of a server at `api_base`, with or without `/v1`.

    A server that cannot be used raises `ServerUnavailable`, to be put right: a proxy would go on without a summary.
    """

    def __init__(self, api_base: str, api_key: str | None) -> None:
        base = api_base.rstrip("/")
        self._url = f"{base if base.endswith('/v1') else f'{base}/v1'}/chat/completions"
        # An address may hold a password, and a report is pasted into bug reports.
        self._shown = without_userinfo(self._url)
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}

    def completion(self, timeout_s: float) -> Completion:
        """The completion as the library takes one; `timeout_s` is the limit for a whole answer."""
        timeout = httpx.Timeout(timeout_s, connect=_CONNECT_S)

        async def complete(**body: JsonValue) -> object:
            return self._document(await self._posted(body, timeout))

        return complete

    async def _posted(self, body: JsonObject, timeout: httpx.Timeout) -> httpx.Response:
        try:
            async with httpx.AsyncClient(trust_env=False) as http:
                return await http.post(self._url, json=body, headers=self._headers, timeout=timeout)
        except httpx.ConnectError as exc:
            raise ServerUnavailable(
                f"nothing answers at {self._shown}. Start LM Studio's server, name another one with --api-base, "
                "or see without a model what would be done: --dry-run"
            ) from exc
        except (httpx.HTTPError, httpx.InvalidURL) as exc:
            raise ServerUnavailable(
                f"{self._shown} gave no summary ({type(exc).__name__}). Is --api-base right?"
            ) from exc

    def _document(self, response: httpx.Response) -> object:
        with contextlib.suppress(ValueError, RecursionError):
            document = response.json()
            # LM Studio answers 200 with an error on unknown paths.
            if response.status_code == 200 and isinstance(document, dict) and document.get("choices"):
                return document
        raise ServerUnavailable(
            f"{self._shown} answered HTTP {response.status_code} and no chat completion: "
            f"{' '.join(response.text.split())[:_ERROR_CHARS]!r}. Check --model and --api-base"
        )


# Generous: the server may be busy with a long prompt.
_PROBE_LIMIT_S = 120.0
_MAX_OUTPUT_TOKENS = 16
_TOLERANCE_RATIO = 0.02
# Letters, code, numbers, and other scripts: long enough that one token is less than the tolerance.
_MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "You are a careful assistant. Answer with one word."},
    {
        "role": "user",
        "content": "Here is a function:\n\n```python\ndef mean(values: list[float]) -> float:\n"
        "    if not values:\n        raise ValueError('no values')\n    return sum(values) / len(values)\n```\n\n"
        "Over 1,250 runs in 2026 it took 38.5 ms. Größe, naïve, 东京, привет. Is it correct? Say yes or no.",
    },
]
_TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "read_file",
            "description": "Reads a text file and returns its lines.",
            "parameters": {
                "type": "object",
                "properties": {"path": {"type": "string", "description": "Where the file is."}},
                "required": ["path"],
            },
        },
    }
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """One comparison.

    Attributes:
        tools: True if the request had tools.
        counted_tokens, exact: our count, and its claim.
        server_tokens: `usage.prompt_tokens`.
        rpc_tokens: by LM Studio's own protocol; None if it did not answer.
    """

    tools: bool
    counted_tokens: int
    server_tokens: int
    exact: bool
    rpc_tokens: int | None = None


async def probe(
    name: str,
    target: Target,
    source: TokenizerSource,
    tokens_of: Callable[[Target, Request], Awaitable[int | None]],
) -> tuple[tuple[Probe, ...], list[Finding]]:
    """Two comparisons, and their findings; at most 16 tokens are generated for each.

    Args:
        name: of the deployment, in findings.
        target: must be loaded: a probe must not load it, and evict another.
        source: counts its prompts.
        tokens_of: asks its server's tokenizer, if there is one.
    """
    counter = TokenCounter()
    complete = ChatServer(target.api_base or "", target.api_key).completion(_PROBE_LIMIT_S)
    probes: list[Probe] = []
    findings: list[Finding] = []
    for tools in ([], _TOOLS):
        asked = Request(messages=tuple(map(parse_message, _MESSAGES)), tools=tuple(tools))
        count = await counter.count(target.key, source.family, asked)
        body = {"model": target.model, "messages": _MESSAGES, "max_tokens": _MAX_OUTPUT_TOKENS, "temperature": 0}
        try:
            told = _prompt_tokens(await complete(**body, **({"tools": tools} if tools else {})))
        except ServerUnavailable as error:
            findings.append(problem(name, f"the probe{' with tools' if tools else ''} failed: {error}."))
            continue
        rpc_tokens = await tokens_of(target, asked) if target.is_lmstudio else None
        probes.append(
            Probe(
                tools=bool(tools),
                counted_tokens=count.tokens,
                server_tokens=told,
                exact=count.own.exact,
                rpc_tokens=rpc_tokens,
            )
        )
        findings += _judged(name, count, told, source, tools=bool(tools))
    return tuple(probes), findings


def _prompt_tokens(document: object) -> int:
    usage = document.get("usage") if isinstance(document, dict) else None
    tokens = usage.get("prompt_tokens") if isinstance(usage, dict) else None
    if not isinstance(tokens, int) or tokens <= 0:
        raise ServerUnavailable("the answer has no usage.prompt_tokens: update the server")
    return tokens


def _judged(name: str, count: Estimate, told: int, source: TokenizerSource, *, tools: bool) -> Iterator[Finding]:
    ratio = count.tokens / told - 1
    if abs(ratio) <= _TOLERANCE_RATIO:
        return
    with_tools = "with tools" if tools else "without tools"
    what = f"{with_tools} our count is {count.tokens} tokens, the server's {told} ({ratio:+.1%})"
    is_inside = count.low <= told <= count.likely
    has_own = source.family.owns_vocabulary and source.path is not None
    set_own = "set `tokenizer:` to the path of the model's .gguf or tokenizer.json"
    if count.own.exact:
        put_back = "see whether the prompt template of the model was changed on the server, and put the original back"
        yield problem(name, f"{what}, though it should be exact: {put_back if has_own else set_own}.")
    elif tools and count.own.rendered and count.own.optional_tokens and is_inside:
        left_out = "the model's chat template leaves tools out, and what its server shows of them is only estimated"
        yield note(name, f"{what}: {left_out} until its first number is known; where that decides, it is asked.")
    elif is_inside:
        advice = "" if has_own else f" To count exactly from the start, {set_own}."
        yield note(name, f"{what}; usage corrects it, and is asked for where that decides.{advice}")
    else:
        advice = "see whether it is of this very model" if has_own else set_own
        yield problem(name, f"{what}, outside what it may be ({count.low} to {count.likely}): {advice}.")
