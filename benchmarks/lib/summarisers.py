"""Scripted pruning models for the benchmark: ideal, lossy, dead, lying, inventing; deterministic."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from typing import Literal

from benchmarks.lib.measuring import INVENTED, count
from tests.lmstudio_double import summary_of_facts

Kind = Literal["ideal", "lossy", "dead", "lying", "inventing"]
KINDS: tuple[Kind, ...] = ("ideal", "lossy", "dead", "lying", "inventing")
_LOSSY_KEEP_RATIO = 0.3
# No two lines alike: a summary that says one thing again and again is rejected. In the conversation's own script.
_PARTS = {
    "latin": (
        ("The work", "The assistant", "This part", "The next step", "A second look", "The check", "That change"),
        ("went on", "was done", "came out well", "took a while", "was weighed again"),
        (
            "before the next one began",
            "without any surprise",
            "as it had been agreed",
            "since nothing spoke against it",
        ),
        ("and the result was read", "and a note was made of it", "and it could be built upon", "and that was all"),
    ),
    "cyrillic": (
        ("Работа", "Беседа", "Эта часть", "Следующая просьба", "Вторая попытка", "Проверка", "Эта перемена"),
        ("шла дальше", "была закончена", "прошла хорошо", "заняла время", "была обдумана ещё раз"),
        ("до начала другой", "без неожиданностей", "как и было условлено", "поскольку ничто не мешало"),
        ("и ответ был прочитан", "и это отметили", "и на это можно опереться", "и это было всё"),
    ),
    "kana": (
        ("この話は", "やりとりは", "この部分は", "つぎの質問は", "見直しは", "たしかめる作業は", "その変更は"),
        ("先へ進み", "きちんと終わり", "うまくいき", "すこし時間がかかり", "もう一度考えられ"),
        ("つぎが始まる前に", "とくに驚きもなく", "話したとおりに", "反対する理由もなく"),
        ("答えが読まれた", "書き留められた", "あとで役に立つものになった", "それで終わりだった"),
    ),
    "han": (
        ("这项工作", "这次谈话", "这个部分", "下一个步骤", "第二次查看", "那次检查", "那个改动"),
        ("继续进行", "已经做完", "结果不错", "花了一些时间", "又被考虑了一遍"),
        ("在下一个开始之前", "没有什么意外", "和说好的一样", "因为没有人反对"),
        ("结果也看过了", "也记了下来", "以后可以接着用", "就是这些"),
    ),
}
_FILLER = {
    script: tuple(f"- {', '.join(parts)}.\n" for parts in itertools.product(*each)) for script, each in _PARTS.items()
}
# Behind the kana, since Japanese has both; the instruction before a conversation is English.
_SCRIPTS = (("cyrillic", "[а-яё]"), ("kana", "[\u3041-\u30ff]"), ("han", "[\u4e00-\u9fff]"))
_SCRIPT_RATIO = 0.08


def summary(kind: Kind, prompt: str, facts: Sequence[str], max_tokens: int) -> str:
    """What the model answers, "" for a dead one. As long as it may be: real models use the room that they are given.

    Args:
        kind: ideal keeps every fact that stands in the prompt, lossy 30 % of them, lying all with wrong values;
            inventing keeps every fact and adds three rules that nobody gave.
        prompt: what the model is shown.
        facts: of the conversation.
        max_tokens: bound on the answer.
    """
    if kind == "dead":
        return ""
    text = summary_of_facts(prompt, facts, keep_ratio=_LOSSY_KEEP_RATIO if kind == "lossy" else 1.0)
    if kind == "lying":
        for fact in facts:
            text = text.replace(f"- {fact}\n", f"- {_wrong(fact)}\n")
    if kind == "inventing":
        text += "\n" + "".join(f"- {rule}\n" for rule in INVENTED)
    room = int(0.95 * max_tokens) - count(text)
    filler = _FILLER[_script(prompt)]
    sizes = itertools.accumulate(map(count, filler))
    return text + "\n" + "".join(line for line, used in zip(filler, sizes, strict=True) if used <= room)


def _script(prompt: str) -> str:
    least = _SCRIPT_RATIO * len(prompt)
    return next((name for name, letters in _SCRIPTS if len(re.findall(letters, prompt)) > least), "latin")


def _wrong(fact: str) -> str:
    """A fact with each number one higher, or with its words in another order."""
    if re.search(r"\d", fact):
        return re.sub(r"\d", lambda digit: str((int(digit[0]) + 1) % 10), fact)
    return fact[::-1]
