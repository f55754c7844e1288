"""What a continuation says before it continues: a role label, an announcement, a reopened fence, an ellipsis.

Asked by `continuation` about the first characters. A part is *certain* when the partial answer could hardly be followed
by it; otherwise it is only *claimed*: dropped if the text behind it turns out to repeat the partial's end.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple, TypeAlias

from litellm_compaction.core.enclosures import FENCE, fence_language, open_fence
from litellm_compaction.core.overlap import SEARCHED_CHARS
from litellm_compaction.core.settled import is_no_space

_LINE_CHARS = 160
_LABELS = ("Assistant:", "ASSISTANT:", "**Assistant:**", "**Assistant**:", "### Assistant:", "Assistent:", "助手：", "助手:")
_DIALOGUE = re.compile(r"^[ \t>*#]*(?:assistant|assistent|user|human|助手|用户)\**[ \t]*[:：]", re.IGNORECASE | re.MULTILINE)
_OPENING_SIGNS = frozenset(":：\"'“„«‹「『(（[`>")
_ELLIPSIS = re.compile(r"(?:\.{3,}|…+)[ \t]*")
_FREE_ELLIPSIS = re.compile(r"(?:^|[^\S\n])(?:\.{3,}|…)")

_END = r"[ \t]*(?:[:：.…。!！,，—–-]|\*)*[ \t]*"
_STOPPED_EN = (
    r"(?:,? (?:exactly |right |directly |just |seamlessly )*(?:from|at)? ?(?:exactly |right )?"
    r"(?:the (?:exact )?(?:point|place|spot) )?where (?:i|we|you|it|the [a-z ]{1,30}?) (?:was |were )?"
    r"(?:left off|stopped|ended|paused|cut off|broke off|interrupted))"
)
_OBJECT_EN = r"(?: (?:with|of|from|in)? ?(?:the|my|your|this) (?:[a-z]+ ){0,3}[a-z]+)?"
_STOPPED_DE = r"(?:,? (?:genau |direkt )?(?:dort|da|an der stelle)?,? ?(?:weiter,? )?wo ich (?:[a-zäöü]+ ?){1,4})"
_STOPPED_FR = r"(?:,? (?:exactement )?(?:de )?(?:là|à l['’]endroit|au point)? ?où (?:je|j['’]|nous|cela)[a-zéèêà'’ ]{1,40})"
_STOPPED_ES = r"(?:,? (?:exactamente )?(?:desde |en )?(?:el punto )?(?:en )?donde (?:me|lo|nos|yo|se)[a-záéíóúñ ]{1,40})"
_VERB_EN = r"(?:continuing|resuming|picking up|carrying on|proceeding)"
_FIRST_EN = (
    r"(?:i['’]ll|i will|let me|i['’]m|i am|let['’]s)(?: just| now)?"
    r" (?:continu(?:e|ing)|resum(?:e|ing)|pick(?:ing)? up|carry(?:ing)? on|proceed(?:ing)?|go(?:ing)? on|keep going)(?: writing)?"
)
# Each announces the continuation itself; a sentence that merely starts with "Continuing" matches none of them.
_ANNOUNCEMENTS = (
    rf"(?:sure|certainly|of course|okay|ok|alright|absolutely|got it|understood|sorry|apologies|my apologies)[,.!:—–-]*"
    rf" (?:{_VERB_EN}|{_FIRST_EN}|here(?:['’]s| is)? (?:the|my) (?:continuation|rest|remainder)){_OBJECT_EN}{_STOPPED_EN}?",
    rf"(?:{_VERB_EN}|{_FIRST_EN}){_OBJECT_EN}{_STOPPED_EN}",
    rf"here(?:['’]s| is) (?:the|my) (?:continuation|continued [a-z]+){_OBJECT_EN}{_STOPPED_EN}?",
    rf"(?:gerne|natürlich|klar|sicher|okay|ok|alles klar|selbstverständlich)[,.!:]* (?:ich (?:fahre|mache|setze|schreibe)"
    rf"(?: [a-zäöü]+){{0,4}} (?:fort|weiter)|hier (?:ist|kommt|geht es|geht['’]s) (?:die fortsetzung|der rest|weiter)|weiter"
    rf" geht['’]?s){_STOPPED_DE}?",
    rf"(?:ich (?:fahre|mache|setze|schreibe)(?: [a-zäöü]+){{0,4}} (?:fort|weiter)|weiter geht['’]?s|fortsetzung){_STOPPED_DE}",
    rf"hier (?:ist|kommt|folgt) die fortsetzung(?: (?:der|des|meiner|deiner|ihrer) [a-zäöüß]+)?{_STOPPED_DE}?",
    rf"(?:bien s[uû]r|d['’]accord|certainement|très bien|ok|entendu)[ ]?[,.!:]* (?:je (?:continue|poursuis|reprends)"
    rf"(?: (?:ma|la) [a-zé]+)?|voici la suite|voici le reste|continuons|poursuivons|suite){_STOPPED_FR}?",
    rf"(?:je (?:continue|poursuis|reprends)|reprenons|reprise|suite){_STOPPED_FR}",
    rf"voici la (?:suite|continuation)(?: (?:de|du) [a-zéèà ]{{1,30}})?{_STOPPED_FR}?",
    rf"(?:claro|por supuesto|de acuerdo|vale|entendido|bien)(?: que sí)?[,.!:]* (?:contin[uú]o|continuando|continuemos|sigo|prosigo"
    rf"|retomo|aquí (?:está|tienes|va) (?:la continuación|el resto)){_STOPPED_ES}?",
    rf"(?:contin[uú]o|continuando|sigo|prosigo|retomo){_STOPPED_ES}",
    r"aquí (?:está|tienes|va) la continuación(?: (?:de|del) [a-záéíóúñ ]{1,30})?",
    r"(?:好的|好|当然可以|当然|没问题|明白了?|收到)[，,。.！! ]*(?:我(?:将|会|来|们)?|让我|现在|下面|接下来)*(?:继续|接着|续写|接上文)[^\n：:。]{0,20}",
    r"(?:我(?:将|会|来)?|让我|现在|下面)*(?:继续|接着|从)(?:从)?(?:上文|上次|之前|刚才|前面|刚刚)[^\n：:。]{0,8}(?:停|断|中断|结束)[^\n：:。]{0,12}",
    r"以下(?:是|为)(?:续写|后续|接续|继续)[^\n：:。]{0,12}",
)
_ANNOUNCEMENT = re.compile(r"[*_(\[（]*(?:" + "|".join(_ANNOUNCEMENTS) + r")[*_)\]）]*" + _END, re.IGNORECASE)
_BARE_ANNOUNCEMENT = re.compile(r"(?:Continuing|Resuming)[ \t]*(?::|\.{3}|…)[ \t]*")
# First words of lines worth waiting for; such a line is at least claimed.
_FIRST_WORDS = ["sure", "certainly", "of", "okay", "ok", "alright", "absolutely", "got", "understood", "sorry", "apologies", "my", "continuing", "continued", "continuation", "resuming", "picking", "carrying", "proceeding", "i'll", "i’ll", "i", "i'm", "i’m", "let", "let's", "let’s", "here", "here's", "here’s", "as", "to", "gerne", "natürlich", "klar", "sicher", "alles", "selbstverständlich", "ich", "hier", "weiter", "fortsetzung", "bien", "d'accord", "d’accord", "certainement", "très", "entendu", "je", "voici", "suite", "reprise", "reprenons", "claro", "por", "de", "vale", "entendido", "continúo", "continuo", "continuando", "sigo", "prosigo", "retomo", "aquí"]
_FIRST_WORD = re.compile(r"[*_(\[（]*([^\W\d_]+(?:['’][^\W\d_]+)?)(.?)")
_FIRST_CHINESE = ("好", "当然", "没问题", "明白", "收到", "继续", "接", "我", "让我", "现在", "下面", "以下", "从")


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


# A rule answers with the part that starts at the beginning of a text, None for no such part, "more" when undecided.
_Rule: TypeAlias = "Callable[[str, bool, Scene], tuple[_Part, ...] | None]"


def scene_of(partial: str) -> Scene:
    """The `Scene` in which a continuation of `partial` begins."""
    tail = partial[-SEARCHED_CHARS:]
    written = tail.rstrip()
    last = written[-1:]
    on_same_line = "\n" not in tail[len(written) :]
    return Scene(
        tail=tail,
        fence=open_fence(partial),
        is_dialogue=_DIALOGUE.search(tail) is not None,
        invites_speech=last in _OPENING_SIGNS,
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
    for rule in (_label, _announcement, _announcement, _fence, _ellipsis):
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
    if not _may_announce(rest, ended):
        return ()
    line_end = rest.find("\n", 0, _LINE_CHARS)
    if line_end < 0 and not ended and len(rest) < _LINE_CHARS:
        return None
    line = rest[:line_end] if line_end >= 0 else rest[:_LINE_CHARS]
    parts = []
    colon = re.search(r"[:：](?=.)", line)
    if colon is not None:
        is_certain = scene.ends_inside_sentence and _is_announcement(line[: colon.end()], scene)
        parts.append(_Part(colon.end(), is_certain))
    if line_end >= 0 or (ended and len(rest) < _LINE_CHARS):
        whole = _is_announcement(line, scene)
        if whole:
            return (_Part(len(line), True),)
        parts.append(_Part(len(line), False))
    return tuple(parts)


def _may_announce(rest: str, ended: bool) -> bool:
    word = _FIRST_WORD.match(rest)
    if word is None:
        return rest.strip("*_([（") == "" and not ended
    first = word[1].lower()
    if first in _FIRST_WORDS or first.startswith(_FIRST_CHINESE):
        return True
    unfinished = not word[2] and not ended
    return unfinished and any(known.startswith(first) for known in (*_FIRST_WORDS, *_FIRST_CHINESE))


def _is_announcement(line: str, scene: Scene) -> bool:
    """Whether `line` announces the continuation and could not stand in the answer itself."""
    spoken = line.strip()
    if scene.invites_speech or spoken in scene.tail:
        return False
    first = spoken.lstrip("*_([（")[:1]
    if scene.ends_inside_sentence and first.islower():
        return False
    if _ANNOUNCEMENT.fullmatch(spoken):
        return True
    return scene.ends_inside_sentence and scene.fence is None and _BARE_ANNOUNCEMENT.fullmatch(spoken) is not None


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
