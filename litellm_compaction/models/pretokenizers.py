"""Where a byte-level BPE vocabulary may not merge: llama.cpp's regular expressions, by the name of a pre-tokenizer.

Asked once per vocabulary by `encoders.py`. Source: `llm_tokenizer_bpe` in llama.cpp's src/llama-vocab.cpp, as vendored
in llama-cpp-python 0.3.36; for tekken and gpt-4o these differ from the published ones on combining marks.
"""

from __future__ import annotations

_CONTRACTION = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_AFTER_WORDS = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_AFTER_WORDS}"
_QWEN2 = rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_AFTER_WORDS}"
_QWEN35 = (
    rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# llama.cpp takes letters beyond ASCII as both upper and lower case, and marks as no letters.
_NOT_LOWER, _NOT_UPPER = r"(?:(?=\p{L})[^a-z])", r"(?:(?=\p{L})[^A-Z])"
_CASED = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_NOT_LOWER}*{_NOT_UPPER}+@|[^\r\n\p{{L}}\p{{N}}]?{_NOT_LOWER}+{_NOT_UPPER}*@|#"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TEKKEN = _CASED.replace("@", "").replace("#", r"\p{N}")
_GPT4O = _CASED.replace("@", rf"{_CONTRACTION}?").replace("#", r"\p{N}{1,3}")
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_LAST_DEEPSEEK = (
    "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+"
    "| ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+"
)
# The three expressions of deepseek-v3 in one, for tiktoken: what the first two take, the third must not see, and white
# space before it ends there. The last alternative is what none of them takes. 5,400 texts gave the same tokens.
_KANA_HAN = "一-龥\u3040-ゟ゠-ヿ"
_JOINED_DEEPSEEK = (
    rf"\p{{N}}{{1,3}}|[{_KANA_HAN}]+|[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{{|}}~][A-Za-z]+"
    rf"|[^\r\n\p{{L}}\p{{P}}\p{{S}}\p{{N}}{_KANA_HAN}]?[[\p{{L}}\p{{M}}]--[{_KANA_HAN}]]+"
    rf"| ?[[\p{{P}}\p{{S}}]--[{_KANA_HAN}]]+[\r\n]*|\s*[\r\n]+|\s+(?=[\p{{N}}{_KANA_HAN}])|\s+(?!\S)|\s+"
    rf"|(?:[^\s\p{{L}}\p{{M}}\p{{N}}\p{{P}}\p{{S}}{_KANA_HAN}](?![[\p{{L}}\p{{M}}]--[{_KANA_HAN}]]))+"
)

# Applied one after the other, each to what the one before has left in pieces.
_PATTERNS: dict[str, tuple[str, ...]] = {
    "llama-bpe": (_LLAMA3,),
    "qwen2": (_QWEN2,),
    "qwen35": (_QWEN35,),
    "tekken": (_TEKKEN,),
    "gpt-4o": (_GPT4O,),
    "gpt-2": (_GPT2,),
    "deepseek-v3": (r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+", _LAST_DEEPSEEK),
    "deepseek-coder": ("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", r"\p{N}"),
    "falcon": (r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]"),
    "starcoder": (r"\p{N}", _GPT2),
    "gemma4": (r"[^\n]+|[\n]+",),
    "default": (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]"),
}
_SAME_AS = {
    "llama-bpe": "llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano dbrx smaug-bpe chatglm-bpe glm4 "
    "glm5",
    "qwen2": "deepseek-r1-qwen kormo f2llmv2 stablelm2 hunyuan solar-open megrez grok-2",
    "gpt-4o": "llama4 kanana2 minimax-m2",
    "gpt-2": "phi-2 mpt olmo jais trillion granite-docling gigachat mellum a.x-4.0 exaone4 modern-bert",
    "deepseek-v3": "hunyuan-dense joyai-llm",
    "starcoder": "refact command-r smollm codeshell exaone minerva-7b mellum2",
}
_NAMES = {name: name for name in _PATTERNS} | {
    alias: name for name, aliases in _SAME_AS.items() for alias in aliases.split()
}
# Single expressions that leave no character out, which tiktoken would drop.
_TIKTOKEN = {name: _PATTERNS[name][0] for name in ("llama-bpe", "qwen2", "qwen35", "tekken", "gpt-4o")} | {
    "deepseek-v3": _JOINED_DEEPSEEK
}


def is_known(pre: str) -> bool:
    """Whether the pre-tokenizer is one of those here; others are split like `default`, which is near the truth."""
    return pre in _NAMES


def patterns(pre: str) -> tuple[str, ...]:
    """The regular expressions of a pre-tokenizer, in the order in which they are applied."""
    return _PATTERNS[_NAMES.get(pre, "default")]


def tiktoken_pattern(pre: str) -> str | None:
    """The one expression with which tiktoken does the same, or None where it cannot."""
    return _TIKTOKEN.get(_NAMES.get(pre, ""))


def has_whole_words(pre: str) -> bool:
    """Whether a piece that is a token as a whole is taken without looking at merges (llama.cpp: `ignore_merges`)."""
    return _NAMES.get(pre) in {"llama-bpe", "tekken", "gpt-4o"}
