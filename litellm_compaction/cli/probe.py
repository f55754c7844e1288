"""`doctor --probe`: is our count of a prompt the server's own?"""

from __future__ import annotations

from typing import Any

import httpx

from litellm_compaction.core.messages import Request, parse_message
from litellm_compaction.proxy.config_check import Finding, note, problem
from litellm_compaction.tokenizers.sources import TokenizerSource
from litellm_compaction.tokens.counter import TokenCounter
from litellm_compaction.tokens.estimate import Estimate
from litellm_compaction.windows.lmstudio import server_root
from litellm_compaction.windows.windows import Target

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
_PATH = {"type": "object", "properties": {"path": {"type": "string", "description": "Where it is."}}}
_TOOL = {"name": "read_file", "description": "Reads a text file and returns its lines.", "parameters": _PATH}
_TOOLS: list[dict[str, Any]] = [{"type": "function", "function": _TOOL}]


async def probe(
    http: httpx.AsyncClient, place: str, target: Target, source: TokenizerSource
) -> tuple[str, Finding | None]:
    """Compares our count with the server's, for a request with a tool; it generates 16 tokens at most.

    Args:
        place: of the deployment, in findings.
        target: must be loaded: a probe must not load it, and evict another.
        source: counts its prompts.

    Returns:
        A line of the report, and what is wrong.
    """
    asked = Request(messages=tuple(map(parse_message, _MESSAGES)), tools=tuple(_TOOLS))
    count = await TokenCounter().count(target.key, source.family, asked)
    try:
        told = await _prompt_tokens(http, target)
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, TypeError, LookupError, RecursionError) as error:
        why = f"the probe failed: the answer has no usage.prompt_tokens ({type(error).__name__})."
        return "failed", problem(place, why)
    line = f"{count.tokens} tokens by us, {told} by the server ({count.tokens / told - 1:+.1%})"
    return line, _judged(place, line, count, told)


async def _prompt_tokens(http: httpx.AsyncClient, target: Target) -> int:
    url = f"{server_root(target.api_base or '')}/v1/chat/completions"
    body = {"model": target.model, "messages": _MESSAGES, "tools": _TOOLS, "temperature": 0}
    body["max_tokens"] = _MAX_OUTPUT_TOKENS
    headers = {"Authorization": f"Bearer {target.api_key}"} if target.api_key else {}
    answer = await http.post(url, json=body, headers=headers, timeout=_PROBE_LIMIT_S)
    tokens = answer.json()["usage"]["prompt_tokens"]
    if not isinstance(tokens, int) or tokens <= 0:
        raise ValueError("no number of tokens")
    return tokens


def _judged(place: str, line: str, count: Estimate, told: int) -> Finding | None:
    todo = "set `tokenizer:` to the path of the model's own tokenizer.json"
    if abs(count.tokens / told - 1) <= _TOLERANCE_RATIO:
        return None
    if count.own.exact:
        why = "though it should be exact: see whether the server's prompt template is the model's own"
        return problem(place, f"{line}, {why}, or {todo}.")
    if not count.low <= told <= count.likely:
        return problem(place, f"{line}, outside what it may be ({count.low} to {count.likely}): {todo}.")
    return note(place, f"{line}; usage corrects it. To count better from the start, {todo}.")
