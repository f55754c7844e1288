"""Restarts of an answer by a simulated model: an original text, a cut, and how the model takes it up again.

Ground truth for the joiner: partial + joined must be the original. `is_ambiguous` names the combinations in which two
different originals lead to the same partial and the same continuation, so that no joiner can serve both.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from dataclasses import dataclass

from litellm_compaction.core.cuts import open_fence, settled_length
from litellm_compaction.core.joiner import Joiner

WORDS = (
    *("the", "a", "of", "and", "model", "window", "answer", "river", "stone", "light", "carries"),
    *("green", "under", "while", "before", "between", "context", "token", "summary", "walks", "quiet", "number"),
    *("every", "because", "system", "proxy", "stream", "first", "second", "again", "house", "paper", "small"),
    *("large"),
)
PHRASES = ("as I said before, ", "the same thing again ", "on the one hand ", "it is what it is ")
CHATTER = (
    *("Sure, continuing…", "Here is the continuation:", "Continuing from where I left off:"),
    *("Sure! Here's the rest of the answer:", "I'll continue from where I stopped."),
    *("Gerne, ich fahre dort fort, wo ich aufgehört habe:", "Hier ist die Fortsetzung:"),
    *("Bien sûr, je continue là où je me suis arrêté :", "Voici la suite :"),
    *("Claro, continúo desde donde me quedé:", "Aquí está la continuación:"),
    *("好的，我继续：", "以下是续写的内容："),
)
STYLES = (
    *("exact", "doubles white space", "restarts last sentence", "restarts last line", "repeats the whole partial"),
    *("repeats last words", "loses white space", "reopens the fence", "chatters first", "chatters then repeats"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Restart:
    """One answer in two streams; `repeated` is the end of `partial` with which `continuation` begins again."""

    partial: str
    rest: str
    repeated: str
    continuation: str


def numbered_words(rng: random.Random) -> str:
    """Words that are all different, and numbers that count on."""
    kind = rng.choice(("word{}", "{}", "item-{},", "{}."))
    return " ".join(kind.format(number) for number in range(rng.randrange(50), rng.randrange(120, 300)))


def prose(rng: random.Random) -> str:
    """Sentences in paragraphs, with phrases and whole sentences that come again."""
    sentences: list[str] = []
    for _ in range(rng.randrange(8, 40)):
        if sentences and rng.random() < 0.12:
            sentences.append(rng.choice(sentences))
            continue
        words = [rng.choice(WORDS) for _ in range(rng.randrange(4, 16))]
        body = rng.choice(("", *PHRASES)) + " ".join(words)
        sentences.append(body[0].upper() + body[1:] + rng.choice(".!?") + rng.choice((" ", " ", " ", "\n\n")))
    return "".join(sentences).strip()


def code(rng: random.Random) -> str:
    """Python or JavaScript with repeated lines, mostly inside a fence, with text around it."""
    python = rng.random() < 0.5
    lines: list[str] = []
    for number in range(rng.randrange(3, 9)):
        name = f"{rng.choice(WORDS)}_{number}"
        lines.append(f"def {name}(items):" if python else f"function {name}(items) {{")
        for _ in range(rng.randrange(2, 6)):
            line = rng.choice(
                (
                    f"total = total + {rng.randrange(9)}",
                    "items.append(0)",
                    f"{name}.update(key, value)",
                    "x = 1",
                    "// ---",
                )
            )
            lines.extend(["    " + line] * rng.choice((1, 1, 1, 2, 4)))
        lines.extend(("    return total", "") if python else ("    return total;", "}", ""))
    body = "\n".join(lines).rstrip()
    if rng.random() < 0.2:
        return body
    language = rng.choice(("python", "py") if python else ("js", "javascript"))
    return f"Here is the code:\n\n```{language}\n{body}\n```\n\nIt {prose(rng)[:200]}"


def json_text(rng: random.Random) -> str:
    """A JSON list of records, some of them equal, indented or not."""
    records = [
        {"id": rng.randrange(3 if rng.random() < 0.3 else 500), "name": rng.choice(WORDS), "tags": rng.sample(WORDS, 2)}
        for _ in range(rng.randrange(4, 25))
    ]
    text = json.dumps([*records, *[None, 0, 0, 0]], indent=rng.choice((None, 2, 4)), ensure_ascii=False)
    return f"```json\n{text}\n```\n\nDone." if rng.random() < 0.5 else text


def table(rng: random.Random) -> str:
    """A Markdown table in which rows follow that equal the one before."""
    rows = ["| name | value | state |", "|------|-------|-------|"]
    while len(rows) < 30:
        row = f"| {rng.choice(WORDS)} {rng.choice(WORDS)} | {rng.randrange(4)} | {rng.choice(('open', 'closed'))} |"
        rows.extend([row] * rng.choice((1, 1, 2, 3, 6)))
    return "Results:\n\n" + "\n".join(rows) + "\n\nThat is all of them."


def runs(rng: random.Random) -> str:
    """Degenerate text: one character, one word or one line over and over."""
    unit = rng.choice(("a", "ha ", "no, ", "very ", "- \n", "0 0 ", "-", "abcabc", "哈", "the end of it all\n"))
    return f"{rng.choice(WORDS)}: {unit * rng.randrange(40, 200)}and then it stops."


def bullets(rng: random.Random) -> str:
    """Bulleted and numbered lists with equal items."""
    lines: list[str] = []
    for number in range(1, rng.randrange(10, 40)):
        item = " ".join(rng.choice(WORDS) for _ in range(rng.randrange(1, 8)))
        mark = rng.choice(("-", "*", f"{number}."))
        lines.extend([f"{mark} {item}"] * rng.choice((1, 1, 1, 3)))
    return "\n".join(lines)


def cjk(rng: random.Random) -> str:
    """Chinese and Japanese prose, no spaces, some sentences again."""
    signs = "的一是在不了有和人这中大为上个国我以要他时来用们生到作地于出就分对成会可主发年动同工也能下过子说のはをがた"
    sentences: list[str] = []
    for _ in range(rng.randrange(8, 40)):
        fresh = (
            "".join(rng.choice(signs) for _ in range(rng.randrange(5, 25)))
            + rng.choice("。！？")
            + rng.choice(("", "", "\n\n"))
        )
        sentences.append(rng.choice(sentences) if sentences and rng.random() < 0.1 else fresh)
    return "".join(sentences).strip()


def emoji(rng: random.Random) -> str:
    """Emoji sequences, flags, combining marks and markup between words."""
    marks = (
        "👩‍👩‍👧",
        "❤️",
        "🇩🇪",
        "🇫🇷🇪🇸",
        "👍🏽",
        "1️⃣",
        "🙂🙂",
        "e\u0301te\u0301",
        "n\u0303",
        "**bold**",
        "`x`",
        "สวัสดี",
        "한국어",
        "नमस्ते",
    )
    return " ".join(
        rng.choice((rng.choice(marks), rng.choice(WORDS), rng.choice(marks) * 2)) for _ in range(rng.randrange(60, 200))
    )


GENERATORS: tuple[Callable[[random.Random], str], ...] = (
    *(numbered_words, prose, code, json_text, table, runs, bullets, cjk, emoji),
)


def dense(text: str) -> str:
    """`text` without white space."""
    return "".join(text.split())


def is_distinctive(block: str) -> bool:
    """The documented threshold: 12 characters (two for each CJK letter), or 3 words with letters."""
    wide = sum(("\u0e00" <= char <= "\u0eff" or "\u2e80" <= char < "\uac00") and char.isalpha() for char in block)
    chars = len(dense(block)) + wide
    return chars >= 12 or sum(any(map(str.isalpha, word)) for word in block.split()) >= 3


def looks_repeated(partial: str, block: str) -> bool:
    """Whether the partial itself shows that its last `block` comes repeatedly (the documented rule, naively)."""
    text, unit = dense(partial), dense(block)
    is_power = (unit + unit).find(unit, 1) < len(unit)
    last_line = dense(partial[partial.rfind("\n") + 1 :])
    follows_line = len(last_line) >= 6 and text[: len(text) - len(unit)].endswith(last_line)
    return is_power or unit + unit in text or follows_line or _looks_like_equal_row(partial, len(unit))


def _looks_like_equal_row(partial: str, size: int) -> bool:
    """Whether rows have come twice in a row, and a block of `size` is the last row or ends inside the next one."""
    lines = [line for line in partial.split("\n") if line.strip()]
    rows = [dense(line) if re.match(r"[ \t]*(\||[-*+] |\d+\. )", line) else "" for line in lines]
    if not rows[-1] or not any(len(row) >= 6 and row == rows[index] for index, row in enumerate(rows[1:])):
        return False
    if not partial[partial.rfind("\n") + 1 :].strip():
        return size == len(rows[-1])
    return len(rows[-1]) < size < len(rows[-1]) + len(rows[-2])


def is_ambiguous(partial: str, rest: str, repeated: str) -> bool:
    """Whether another original gives the same partial and continuation, and the documented rules choose that one.

    Without a repeat: the original goes on with a distinctive block that the partial has just ended with, and has not
    repeated before. That is what a restart looks like. With a repeat: it is too short to tell from chance, the partial
    has already repeated it back to back (equal table rows and "restarts last line"), or the original goes on so that a
    longer end of the partial seems to be repeated.
    """
    text, continuation, known = dense(partial), dense(repeated + rest), len(dense(repeated))
    for index, match in enumerate(re.finditer(r"\S", partial)):
        if len(text) - index <= known or text[index] != continuation[:1] or not continuation.startswith(text[index:]):
            continue
        block = partial[match.start() :]
        starts_line = not partial[: match.start()].rpartition("\n")[2].strip()
        is_line = starts_line and "\n" not in block and len(block.split()) >= 3
        if (is_distinctive(block) or is_line) and not looks_repeated(partial, block):
            return True
    return bool(repeated) and (not is_distinctive(repeated) or looks_repeated(partial, repeated))


def draw(rng: random.Random, text: str, style: str) -> Restart | None:
    """A restart of `text` in `style` at a random settled cut; None where the style does not apply there."""
    cut = settled_length(text[: rng.randrange(len(text) // 10 + 2, len(text))])
    return continued(rng, text[:cut], text[cut:], style) if text[:cut].strip() else None


def continued(rng: random.Random, partial: str, rest: str, style: str, *, shown: str | None = None) -> Restart | None:
    """A continuation of `partial` by `rest` in `style`; None where the style does not apply there.

    Args:
        rng: draws what is left open.
        partial: the answer so far.
        rest: what the model has still to say.
        style: one of `STYLES`.
        shown: the end of the partial that the model sees; None for all of it.
    """
    repeated, before = _taken_up(rng, partial, style), ""
    if shown is not None and repeated is not None and len(repeated) > len(shown):
        repeated = shown
    if repeated is None:
        return None
    after = rest
    if style.startswith("chatters"):
        if open_fence(partial) is None and partial.rstrip()[-1] in ":：\"'“„«‹「『(（[`>":
            return None  # where speech is invited, an announcement may belong to the answer
        before = rng.choice(CHATTER) + rng.choice(("\n", "\n\n"))
    elif style == "reopens the fence":
        before = f"```{open_fence(partial)}\n"
    elif style == "doubles white space":
        before = partial[len(partial.rstrip()) :]
    if style == "loses white space":
        seam = " " if re.search(r"\w\s*\Z", repeated) and partial[-1].isspace() else ""
        return Restart(
            partial=partial, rest=rest, repeated=repeated, continuation=_spoiled(rng, repeated) + seam + after
        )
    return Restart(partial=partial, rest=rest, repeated=repeated, continuation=before + repeated + after)


def join(restart: Restart, rng: random.Random) -> str:
    """What the joiner makes of the continuation, fed in random pieces."""
    joiner = Joiner(restart.partial)
    sent, place = [], 0
    while place < len(restart.continuation):
        size = rng.choice((1, 1, 2, 3, 5, 8, 40, 1000))
        sent.append(joiner.feed(restart.continuation[place : place + size]))
        place += size
    return "".join((*sent, joiner.finish()))


def _taken_up(rng: random.Random, partial: str, style: str) -> str | None:
    """The end of `partial` that the style repeats, "" for none; None where the style does not apply."""
    if style in ("exact", "chatters first", "doubles white space"):
        return ""
    if style == "repeats the whole partial":
        return partial
    if style == "reopens the fence":
        if not open_fence(partial):
            return None
        return rng.choice(("", _last(partial, r"^[^\n]*\S[^\n]*\s*\Z")))
    if style == "restarts last line":
        return _last(partial, r"^[^\n]*\S[^\n]*\s*\Z")
    if style == "repeats last words":
        count = rng.randrange(3, 9)
        return _last(partial, rf"(?:(?:(?<=\s)|\A)(?:\S+\s+){{{count}}}|[一-鿿ぁ-ん。！？]{{{2 * count}}})\Z") or None
    return (
        _last(partial, r"(?:\A|(?<=[.!?]\s)|(?<=[。！？])|^)\s*(?:(?![.!?]\s|[。！？]|\n).)+[.!?。！？]?\s*\Z") or None
    )


def _last(text: str, pattern: str) -> str:
    found = re.search(pattern, text[-3000:], re.MULTILINE)
    return found[0] if found else ""


def _spoiled(rng: random.Random, text: str) -> str:
    """`text` with its white space collapsed, its line breaks changed, or lost where no words grow together."""
    how = rng.choice((" ", "\n", ""))
    return re.sub(r"(?<!\w)\s+|\s+(?!\w)", how, re.sub(r"\s+", " ", text)) if how == "" else re.sub(r"\s+", how, text)
