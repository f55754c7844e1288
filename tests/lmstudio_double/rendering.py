"""The template of the simulator's prompts as text, and how LM Studio cuts the middle of a prompt."""

from __future__ import annotations

import importlib.util
import json
import math
import os
from pathlib import Path
from typing import Literal
from unittest import mock

import tiktoken

from litellm_compaction.simulator.rendering import (
    TOOLS_AFTER,
    TOOLS_BEFORE,
    Block,
    Prompt,
    count,
    count_by,
    decode,
    encode,
    load_vocabulary,
    with_newest,
)

__all__ = ["TEMPLATE", "Overflow", "count", "decode", "encode", "keep_tokens", "load_vocabulary", "truncate_middle"]


def _o200k() -> tiktoken.Encoding:
    """The vocabulary that LiteLLM ships: not the one that the counter under test has for any model's name."""
    spec = importlib.util.find_spec("litellm")
    assert spec is not None
    [root] = spec.submodule_search_locations or ()
    with mock.patch.dict(os.environ, TIKTOKEN_CACHE_DIR=str(Path(root, "litellm_core_utils", "tokenizers"))):
        return tiktoken.get_encoding("o200k_base")


count_by(_o200k)

Overflow = Literal["truncate_middle", "error_400_object", "error_event", "empty"]

# The same template as LM Studio would hold it.
TEMPLATE = """\
{%- set ns = namespace(last_user=-1) -%}
{%- for message in messages -%}
  {%- if message.role == 'user' -%}{%- set ns.last_user = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{%- set has_system = messages[0].role == 'system' -%}
{%- if tools or has_system -%}
  {{- '<|im_start|>system\\n' -}}
  {{- messages[0].content if has_system else '' -}}
  {%- if tools -%}
    {{- ('\\n\\n' if has_system else '') + BEFORE -}}
    {%- for tool in tools -%}{{- '\\n' + tool | tojson -}}{%- endfor -%}
    {{- AFTER -}}
  {%- endif -%}
  {{- '<|im_end|>\\n' -}}
{%- endif -%}
{%- for message in messages -%}
  {%- if message.role == 'system' and loop.first -%}
  {%- elif message.role == 'tool' -%}
    {%- if loop.first or loop.previtem.role != 'tool' -%}{{- '<|im_start|>user' -}}{%- endif -%}
    {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' -}}
    {%- if loop.last or loop.nextitem.role != 'tool' -%}{{- '<|im_end|>\\n' -}}{%- endif -%}
  {%- elif message.role == 'assistant' -%}
    {%- set keeps = loop.last or loop.index0 > ns.last_user -%}
    {%- set said = message.content or '' -%}
    {%- if not keeps and '</think>' in said -%}
      {%- set said = said.split('</think>')[-1].lstrip('\\n') -%}
    {%- endif -%}
    {{- '<|im_start|>assistant\\n' -}}
    {%- if keeps and message.reasoning_content -%}
      {{- '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' -}}
    {%- endif -%}
    {{- said -}}
    {%- for call in message.tool_calls or [] -%}
      {%- set function = call.function or call -%}
      {{- '\\n' if said or not loop.first -}}
      {{- '<tool_call>\\n{"name": ' + function.name | tojson + ', "arguments": ' -}}
      {{- function.arguments if function.arguments is string else function.arguments | tojson -}}
      {{- '}\\n</tool_call>' -}}
    {%- endfor -%}
    {{- '' if loop.last else '<|im_end|>\\n' -}}
  {%- else -%}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' -}}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt and messages[-1].role != 'assistant' -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
""".replace("BEFORE", json.dumps(TOOLS_BEFORE)).replace("AFTER", json.dumps(TOOLS_AFTER))


def keep_tokens(prompt: Prompt, factor: float) -> int:
    """The tokens that middle truncation never drops: system, first user message, opening of the answer."""
    return math.ceil(Prompt(_head(prompt), prompt.opening).count_tokens() * factor)


def truncate_middle(prompt: Prompt, window_tokens: int, factor: float) -> Prompt:
    """The prompt with the middle dropped: system, first user message, and the newest messages that fit.

    The newest message loses its front if it does not fit. `keep_tokens(prompt, factor) < window_tokens` must hold.
    """
    return with_newest(prompt, window_tokens, _head(prompt), factor)


def _head(prompt: Prompt) -> tuple[Block, ...]:
    for index, block in enumerate(prompt.blocks):
        if block.role == "user":
            return prompt.blocks[: index + 1]
    return prompt.blocks[:1]
