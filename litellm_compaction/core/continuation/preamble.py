"""What a continuation says before it continues: a role label, an announcement, a reopened fence, an ellipsis.

A part is *certain* when the partial answer could hardly be followed by it; otherwise it is only *claimed*: dropped if
the text behind it turns out to repeat the partial's end.

Announcements ("Sure, continuing from where I left off:") are known in English, German, French, Spanish and Chinese, in
wordings with which small instruct models open when told to go on. A sentence that merely starts with "Continuing"
matches nothing here.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple, TypeAlias

from litellm_compaction.core.continuation.overlap import SEARCHED_CHARS
from litellm_compaction.core.continuation.text import FENCE, fence_language, is_no_space, open_fence

_YES_EN = r"(?:sure|certainly|of course|okay|ok|alright|absolutely|got it|understood|sorry|(?:my )?apologies)"
_YES_DE = r"(?:gerne|natürlich|klar|sicher|okay|ok|alles klar|selbstverständlich)"
_YES_FR = r"(?:bien s[uû]r|d['’]accord|certainement|très bien|entendu)"
_YES_ES = r"(?:claro|por supuesto|de acuerdo|vale|entendido|bien)(?: que sí)?"
_YES_ZH = r"(?:好的|好|当然可以|当然|没问题|明白了?|收到)"

_GOING_ON_EN = r"(?:continuing|resuming|picking up|carrying on|proceeding)"
_I_GO_ON_EN = (
    r"(?:i['’]ll|i will|let me|i['’]m|i am|let['’]s)(?: just| now)? "
    r"(?:continu(?:e|ing)|resum(?:e|ing)|pick(?:ing)? up|carry(?:ing)? on|proceed(?:ing)?|go(?:ing)? on|keep going)"
    r"(?: writing)?"
)
_HERE_EN = r"here(?:['’]s| is)? (?:the|my) (?:continuation|rest|remainder)"
_WHAT_EN = r"(?: (?:with|of|from|in)? ?(?:the|my|your|this) (?:[a-z]+ ){0,3}[a-z]+)?"
_WHERE_EN = (
    r",? (?:(?:exactly|right|directly|just|seamlessly) )*(?:(?:from|at) )?(?:exactly |right )?"
    r"(?:the (?:exact )?(?:point|place|spot) )?where (?:i|we|you|it|the [a-z]+(?: [a-z]+)?) (?:was |were )?"
    r"(?:left off|stopped|ended|paused|cut off|broke off|interrupted)"
)
_I_GO_ON_DE = r"ich (?:fahre|mache|setze|schreibe)(?: [a-zäöü]+){0,4} (?:fort|weiter)"
_HERE_DE = r"(?:hier (?:ist|kommt|folgt) (?:die fortsetzung|der rest)|(?:hier |weiter )?geht(?: es|['’]?s)(?: weiter)?)"
_WHERE_DE = r",? (?:(?:genau|direkt) )?(?:dort|da|an der stelle)?,? ?(?:weiter,? )?wo ich(?: [a-zäöü]+){1,4}"
_I_GO_ON_FR = r"je (?:continue|poursuis|reprends)(?: (?:ma|la) [a-zé]+)?"
_WHERE_FR = r",? (?:exactement )?(?:de )?(?:là|à l['’]endroit|au point)? ?où (?:je|nous|cela|j['’])[a-zéèêà'’ ]{1,40}"
_I_GO_ON_ES = r"(?:contin[uú]o|continuando|continuemos|sigo|prosigo|retomo)"
_WHERE_ES = r",? (?:exactamente )?(?:desde |en )?(?:el punto )?(?:en )?donde (?:me|lo|nos|yo|se)[a-záéíóúñ ]{1,40}"
_I_ZH = r"(?:我(?:将|会|来|们)?|让我|现在|下面|接下来){0,3}"

_WORDINGS = (
    rf"{_YES_EN}[,.!:—–-]* (?:{_GOING_ON_EN}|{_I_GO_ON_EN}|{_HERE_EN}){_WHAT_EN}(?:{_WHERE_EN})?",
    rf"(?:{_GOING_ON_EN}|{_I_GO_ON_EN}){_WHAT_EN}{_WHERE_EN}",
    rf"here(?:['’]s| is) (?:the|my) (?:continuation|continued [a-z]+){_WHAT_EN}(?:{_WHERE_EN})?",
    rf"{_YES_DE}[,.!:]* (?:{_I_GO_ON_DE}|{_HERE_DE})(?:{_WHERE_DE})?",
    rf"(?:{_I_GO_ON_DE}|weiter geht['’]?s|fortsetzung){_WHERE_DE}",
    rf"hier (?:ist|kommt|folgt) die fortsetzung(?: (?:der|des|meiner|deiner|ihrer) [a-zäöüß]+)?(?:{_WHERE_DE})?",
    rf"{_YES_FR} ?[,.!:]* (?:{_I_GO_ON_FR}|voici la suite|voici le reste|continuons|poursuivons)(?:{_WHERE_FR})?",
    rf"(?:{_I_GO_ON_FR}|reprenons|reprise|suite){_WHERE_FR}",
    rf"voici la (?:suite|continuation)(?: (?:de|du) [a-zéèà ]{{1,30}})?(?:{_WHERE_FR})?",
    rf"{_YES_ES}[,.!:]* (?:{_I_GO_ON_ES}|aquí (?:está|tienes|va) (?:la continuación|el resto))(?:{_WHERE_ES})?",
    rf"{_I_GO_ON_ES}{_WHERE_ES}",
    r"aquí (?:está|tienes|va) la continuación(?: (?:de|del) [a-záéíóúñ ]{1,30})?",
    rf"{_YES_ZH}[，,。.！! ]*{_I_ZH}(?:继续|接着|续写|接上文)[^\n：:。]{{0,20}}",
    rf"{_I_ZH}(?:继续|接着)?从?(?:上文|上次|之前|刚才|前面|刚刚)[^\n：:。]{{0,8}}(?:停|断|结束)[^\n：:。]{{0,12}}",
    r"以下(?:是|为)(?:续写|后续|接续|继续)[^\n：:。]{0,12}",
)
_MARKUP = "*_([（"
_END = r"[*_)\]） \t:：.…。!！,，—–-]*"
_ANNOUNCEMENT = re.compile(rf"[{re.escape(_MARKUP)}]*(?:{'|'.join(_WORDINGS)}){_END}", re.IGNORECASE)
_BARE = re.compile(r"(?:Continuing|Resuming)[ \t]*(?::|\.{3}|…)[ \t]*")
_TOPIC = re.compile(
    rf"[{re.escape(_MARKUP)}]*(?:"
    rf"(?:{_YES_EN}|{_YES_DE}|{_YES_FR}|{_YES_ES})[,.!:—–-]|{_YES_ZH}[，,。.！!：:]"
    r"|.*?(?:contin[uú]|resum|left off|picking up|the rest|remainder|fortsetz|weiter|la suite|poursui|repren|prosig"
    r"|retom|继续|接着|接上|续写|后续))",
    re.IGNORECASE,
)
_FIRST_WORD = re.compile(rf"[{re.escape(_MARKUP)}]*([^\W\d_]+)(.?)", re.DOTALL)
_FIRST_WORDS = frozenset(
    (
        *(
            "sure",
            "certainly",
            "of",
            "okay",
            "ok",
            "alright",
            "absolutely",
            "got",
            "understood",
            "sorry",
            "my",
            "apologies",
        ),
        *(
            "continuing",
            "continued",
            "continuation",
            "resuming",
            "picking",
            "carrying",
            "proceeding",
            "i",
            "let",
            "here",
        ),
        *(
            "gerne",
            "natürlich",
            "klar",
            "sicher",
            "alles",
            "selbstverständlich",
            "ich",
            "hier",
            "weiter",
            "fortsetzung",
        ),
        *("bien", "d", "certainement", "très", "entendu", "je", "voici", "suite", "reprise", "reprenons"),
        *("claro", "por", "de", "vale", "entendido", "continúo", "continuo", "sigo", "prosigo", "retomo", "aquí"),
        "continuando",
    )
)
_FIRST_CHARS_ZH = "好当没明收继接我让现下以从"
_LINE_CHARS = 160
_LABELS = (
    *("Assistant:", "ASSISTANT:", "**Assistant:**", "**Assistant**:", "### Assistant:", "Assistent:"),
    *("助手：", "助手:"),
)
_DIALOGUE = re.compile(
    r"^[ \t>*#]*(?:assistant|assistent|user|human|助手|用户)\**[ \t]*[:：]", re.IGNORECASE | re.MULTILINE
)
_OPENING_SIGNS = frozenset(":：\"'“„«‹「『(（[`>")
_COLON_INSIDE = re.compile(r"[:：](?=.)")
_ELLIPSIS = re.compile(r"(?:\.{3,}|…+)[ \t]*")
_FREE_ELLIPSIS = re.compile(r"(?:^|[^\S\n])(?:\.{3,}|…)")


def may_announce(text: str, *, ended: bool) -> bool:
    """Whether `text`, the beginning of a line, could grow into an announcement."""
    if not text.strip(_MARKUP):
        return not ended
    word = _FIRST_WORD.match(text)
    if word is None:
        return False
    first = word[1].lower()
    if first in _FIRST_WORDS or first[0] in _FIRST_CHARS_ZH:
        return True
    is_unfinished = not word[2] and not ended
    return is_unfinished and any(known.startswith(first) for known in _FIRST_WORDS)


def is_announcement(line: str) -> bool:
    """Whether `line` says nothing but that the answer goes on here."""
    return _ANNOUNCEMENT.fullmatch(line.strip()) is not None


def is_bare_announcement(line: str) -> bool:
    """Whether `line` is a single "Continuing…", which a program's output may say as well."""
    return _BARE.fullmatch(line.strip()) is not None


def speaks_of_continuing(line: str) -> bool:
    """Whether `line` is an assent or mentions going on: not enough to drop it, unless a repeat follows it."""
    return _TOPIC.match(line) is not None


class Preamble(NamedTuple):
    """How much of a continuation's start is not continuation.

    Attributes:
        certain_chars: to be dropped in any case.
        claimed_chars: longer starts, ascending, each dropped only if what follows it repeats the partial's end.
    """

    certain_chars: int
    claimed_chars: tuple[int, ...]


class _Part(NamedTuple):
    end: int
    is_certain: bool


class Scene(NamedTuple):
    """What a rule needs to know about the partial answer."""

    tail: str
    fence: str | None
    is_dialogue: bool
    invites_speech: bool
    ends_inside_sentence: bool


# (continuation from here on, whether it has ended, scene) -> the parts with which it begins, None while undecided.
_Rule: TypeAlias = Callable[[str, bool, Scene], "tuple[_Part, ...] | None"]


def scene_of(partial: str) -> Scene:
    """The `Scene` in which a continuation of `partial` begins."""
    tail = partial[-SEARCHED_CHARS:]
    written = tail.rstrip()
    last = written[-1:]
    fence = open_fence(partial)
    on_same_line = "\n" not in tail[len(written) :]
    return Scene(
        tail=tail,
        fence=fence,
        is_dialogue=_DIALOGUE.search(tail) is not None,
        invites_speech=last in _OPENING_SIGNS and fence is None,
        ends_inside_sentence=on_same_line and (last.isalnum() or last == ","),
    )


def read_preamble(head: str, scene: Scene, *, ended: bool) -> Preamble | None:
    """The preamble with which a continuation opens, None when `head` is too short to tell.

    Args:
        head: the continuation so far.
        scene: of the partial that it continues.
        ended: whether nothing comes after `head`.
    """
    certain, claimed = 0, list[int]()
    position = 0
    for rule in _RULES:
        rest = head[position:].lstrip()
        if not rest and not ended:
            return None
        parts = rule(rest, ended, scene)
        if parts is None:
            return None
        for part in parts:
            end = len(head) - len(rest) + part.end
            if part.is_certain and not claimed:
                certain = end
            else:
                claimed.append(end)
            position = end
    return Preamble(certain, tuple(claimed))


def _label(rest: str, ended: bool, scene: Scene) -> tuple[_Part, ...] | None:
    if not ended and any(label.startswith(rest) for label in _LABELS):
        return None
    end = max((len(label) for label in _LABELS if rest.startswith(label)), default=0)
    if not end:
        return ()
    return (_Part(end, not (scene.is_dialogue or scene.invites_speech or scene.fence is not None)),)


def _announcement(rest: str, ended: bool, scene: Scene) -> tuple[_Part, ...] | None:
    if scene.ends_inside_sentence and rest[:1].islower():
        return ()
    if not may_announce(rest, ended=ended):
        return ()
    line_end = rest.find("\n", 0, _LINE_CHARS)
    if line_end < 0 and not ended and len(rest) < _LINE_CHARS:
        return None
    line = rest[:line_end] if line_end >= 0 else rest[:_LINE_CHARS]
    if not speaks_of_continuing(line):
        return ()
    is_whole = line_end >= 0 or len(rest) < _LINE_CHARS
    if is_whole and _is_spoken(line, scene):
        return (_Part(len(line), True),)
    parts = [_Part(len(line), False)] if is_whole else []
    colon = _COLON_INSIDE.search(line)
    if colon is not None:
        # On one line with its announcement, new text is only believed to be new where no sentence could start.
        is_certain = scene.ends_inside_sentence and _is_spoken(line[: colon.end()], scene)
        parts.insert(0, _Part(colon.end(), is_certain))
    return tuple(parts)


def _is_spoken(line: str, scene: Scene) -> bool:
    """Whether `line` announces the continuation and could not stand in the answer itself."""
    if scene.invites_speech or line.strip() in scene.tail:
        return False
    may_be_bare = scene.ends_inside_sentence and scene.fence is None
    return is_announcement(line) or (may_be_bare and is_bare_announcement(line))


def _fence(rest: str, ended: bool, scene: Scene) -> tuple[_Part, ...] | None:
    if scene.fence is None or rest[0:1] not in ("`", "~"):
        return ()
    line_end = rest.find("\n", 0, _LINE_CHARS)
    if line_end < 0:
        return None if not ended and len(rest) < _LINE_CHARS else ()
    opener = FENCE.fullmatch(rest, 0, line_end)
    if opener is None:
        return ()
    language = fence_language(opener["info"])
    return (_Part(line_end, bool(language) and language == scene.fence),)


def _ellipsis(rest: str, ended: bool, scene: Scene) -> tuple[_Part, ...] | None:
    found = _ELLIPSIS.match(rest)
    if found is None:
        return None if not ended and rest in (".", "..") else ()
    if found.end() == len(rest) and not ended:
        return None if len(rest) < _LINE_CHARS else ()
    follower = rest[found.end() : found.end() + 1]
    goes_on = follower.islower() or (bool(follower) and is_no_space(follower) and follower.isalpha())
    stands_for_cut = scene.ends_inside_sentence and scene.fence is None and goes_on
    return (_Part(found.end(), stands_for_cut and _FREE_ELLIPSIS.search(scene.tail) is None),)


_RULES: tuple[_Rule, ...] = (_label, _announcement, _announcement, _fence, _ellipsis)
