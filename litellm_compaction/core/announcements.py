"""Whether a line announces a continuation ("Sure, continuing from where I left off:") and is no part of an answer.

Asked by `preamble` about the first line of a continuation. English, German, French, Spanish and Chinese; wordings as
small instruct models open when told to go on. A sentence that merely starts with "Continuing" matches nothing here.
"""

from __future__ import annotations

import re

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
