"""Invented constraints: directive sentences in the record of a compaction that nobody said.

`measuring.py` asks it of every new compaction. Users report rules that a summary made up (codegraff 738,
oh-my-openagent 1483). Written apart from the package's rules, and shares no pattern with them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import lru_cache

from litellm_compaction.core.prompts import FRAME_BEGIN, FRAME_END, FRAME_NOTE
from tests.integration.validity import JsonDict, searchable

# Modal and negation forms; a language is added with a line here.
_SIGNALS = (
    r"must|never|always|do not|don['’]t|only|should(?:n['’]t)?|shall|may not|cannot|not allowed|forbidden|required?",
    r"have to|has to|needs? to|from now on|make sure|ensure|avoid|at (?:most|least)|no more than|without asking",
    r"muss|müssen|darf|dürfen|niemals|immer|nur|soll(?:en|te)?|ab jetzt|keinesfalls|verboten|höchstens",
    r"doit|doivent|jamais|toujours|ne pas|interdit|seulement|désormais|il faut",
    r"debe[ns]?|nunca|siempre|no se puede|solo|sólo|prohibido|hay que|a partir de ahora",
    r"deve|devono|mai|sempre|soltanto|vietato|não pode|jamais|apenas|proibido",
    r"должен|должна|должны|нельзя|никогда|всегда|только|обязательно|запрещено|надо|нужно",
    r"moet|mag niet|nooit|altijd|alleen|verboden|musi|nie wolno|nigdy|zawsze|tylko",
    r"asla|her zaman|sadece|yasak|zorunda",
)
_SIGNALS_CJK = (
    *(
        "必须|不要|不得|不能|不可|禁止|务必|只能|应该|从现在起|总是",
        "絶対|必ず|しないで|してはいけ|禁じ|べき|のみ|なければ",
    ),
    "해야|하지 마|절대|금지|항상|반드시",
)
_DIRECTIVE = re.compile(rf"(?<!\w)(?:{'|'.join(_SIGNALS)})(?!\w)|{'|'.join(_SIGNALS_CJK)}", re.IGNORECASE)
_SENTENCES = re.compile(r"(?<=[.!?])\s+|[。！？；\n]+|\[?…[^\]\n…]{0,60}…?\]?|; ")
_MARKUP = re.compile(r"[*`\"'“”„«»>#|\s_]+|(?<!\w)[-+•](?=\s)|\(later: [^)\n]*\)")
_TERM = re.compile(r"[a-zà-ÿа-яё]{4,}|\d+|[\u3040-\u30ff\u4e00-\u9fff\uac00-\ud7af]{2}", re.IGNORECASE)
_LEAST_TERMS = 2
_SHARED_RATIO = 0.6


def invented(client: Sequence[JsonDict], upstream: Sequence[JsonDict]) -> list[str]:
    """The directive sentences of the record in `upstream` without a source sentence in the client's messages.

    A sentence is directive where it holds a modal or negation form (`must`, `never`, `only`, `darf`, `nunca`, `必须`).
    Its source is the client's text that reads the same but for markup and white space, or one directive sentence of the
    client that has all of its numbers and shares three fifths of the words of four letters or more that the shorter of
    the two has: a fact that was made a rule, or a rule whose number was changed, has none. Headings, and lines that end
    in a colon, state nothing.
    """
    rules = [sentence for sentence in _sentences(record(client, upstream)) if _is_rule(sentence)]
    if not rules:
        return []
    said = searchable(client)
    plain = _plain(said)
    sources = [_terms(sentence) for sentence in _sentences(said) if _DIRECTIVE.search(sentence)]
    return [
        rule
        for rule in rules
        if _plain(rule) not in plain and not any(_is_source(_terms(rule), source) for source in sources)
    ]


def record(client: Sequence[JsonDict], upstream: Sequence[JsonDict]) -> str:
    """What a compaction adds: what stands inside our frame; of another method, its lines that are not the client's."""
    added = searchable([message for message in upstream if message not in client])
    if FRAME_BEGIN in added:
        return added.partition(FRAME_BEGIN)[2].partition(FRAME_END)[0].replace(FRAME_NOTE, "")
    lines = set(searchable(client).split("\n"))
    return "\n".join(line for line in added.split("\n") if line not in lines)


def _sentences(text: str) -> Iterator[str]:
    return (sentence.strip() for sentence in _SENTENCES.split(text) if sentence and sentence.strip())


def _is_rule(sentence: str) -> bool:
    is_head = sentence.startswith("#") or sentence.endswith((":", "："))
    return not is_head and _DIRECTIVE.search(sentence) is not None and len(_terms(sentence)) > 0


@lru_cache(maxsize=100_000)
def _terms(sentence: str) -> frozenset[str]:
    return frozenset(term.lower() for term in _TERM.findall(_DIRECTIVE.sub(" ", sentence)))


def _is_source(rule: frozenset[str], source: frozenset[str]) -> bool:
    numbers = {term for term in rule if term.isdigit()}
    least = min(len(rule), max(len(source), _LEAST_TERMS))
    return numbers <= source and len(rule & source) >= _SHARED_RATIO * least


def _plain(text: str) -> str:
    return " ".join(_MARKUP.sub(" ", text).split()).lower().rstrip(".!?,;: ")
