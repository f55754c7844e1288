"""What is counted and believed at the bounds of counting: a table for each question, a line for each input.

`GOLDENS=write pytest tests/goldens -n 0` writes the file anew; its diff belongs into the commit that changes it.
"""

from __future__ import annotations

import asyncio
import base64
import itertools
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from litellm_compaction.tokenizers.families import HEURISTIC, Family, family_of
from litellm_compaction.tokenizers.vocabulary import Vocabulary
from litellm_compaction.tokens.counter import GeneratedTokens, TokenCounter
from litellm_compaction.tokens.estimate import Estimate, Span
from litellm_compaction.tokens.known import Protocol
from litellm_compaction.tokens.prompt import TextCounts, image_tokens
from tests.builders import JsonDict, assistant, image, request_of, result, system, tools, user
from tests.goldens.tellers import TELLS, Teller, recorded

_FILE = Path(__file__).parent / "counts.txt"
_QWEN, _VISION, _GLM = family_of("", "qwen3-8b"), family_of("", "qwen2.5-vl-7b"), family_of("glm4", "glm-4")
_LLAMA = family_of("", "llama-2-7b")
_NAMES = ("nobody-knows", "glm-4", "gpt-4o", "llama-2-7b", "mistral-nemo", "qwen3-8b", "gpt-oss-20b")
# Of 640 by 480 pixels; the JPEG's behind a segment of 16 bytes, and by a mark for each kind.
_JPEG = b"\xff\xd8\xff\xe0\x00\x10JFIF" + bytes(10) + b"\xff%c\0\x11\x08\x01\xe0\x02\x80" + bytes(9)
_HEADERS = {
    "GIF": b"GIF89a\x80\x02\xe0\x01\0",
    "WEBP": b"RIFF\0\0\0\0WEBPVP8 " + bytes(10) + b"\x80\x02\xe0\x01" + bytes(8),
    "WEBP X": b"RIFF\0\0\0\0WEBPVP8X" + bytes(8) + b"\x7f\x02\0\xdf\x01\0" + bytes(6),
}
# A token in each of these families.
_WORD = "word"
# What a server says of a prompt, as a share of ours, and what comes behind it.
_MORE = ((0.8, []), (0.8, [assistant(_WORD * 100)]), (3.0, [assistant(_WORD * 100), user(_WORD * 300), assistant("")]))


def _count(counter: TokenCounter, family: Family, *raw: JsonDict, **more: Any) -> Estimate:
    return asyncio.run(counter.count("t", family, request_of(*raw, **more)))


def _seen(words: int, images: int = 0) -> JsonDict:
    """Of a person: so many tokens of text, and so many pictures."""
    return _asked(_WORD * words, *[400] * images)


def _asked(text: str, *widths: int) -> JsonDict:
    return user([{"type": "text", "text": text}, *(image(width, 300) for width in widths)] if widths else text)


def _shown(count: Estimate) -> str:
    ends = f"{count.low} {count.tokens} {count.likely} {count.high} {count.unpriced_tokens}"
    parts = f"{sum(count.sizes)} {count.tools_tokens} {count.overhead_tokens} {count.is_told:d}{count.is_counted:d}"
    ratios = (count.other_ratio, count.made_likely_ratio, count.likely_ratio, count.other_likely_ratio)
    spans = f"{' '.join(f'{ratio:.3f}' for ratio in ratios)} {_span(count.text)} {_span(count.rates[1])}"
    return f"{ends}; {parts}; {spans}"


def _span(span: Span) -> str:
    return f"{span.low:.3f}-{span.usual:.3f}-{span.high:.3f}"


def _believed() -> Iterator[str]:
    """Of which numbers is an answer's taken, and one that was asked for; from which on is none suspected of a cut?"""
    thought = {**assistant(_WORD), "reasoning_content": _WORD * 1500}
    for family, asked, is_long in (
        *((HEURISTIC, [_seen(words)], words == 1025) for words in (1, 1024, 1025, 2275, 2276)),
        *((HEURISTIC, [_seen(words, images)], True) for words, images in ((10, 1), (1000, 3))),
        *((_QWEN, [_seen(words)], words > 1) for words in (1, 1500)),
        *((_QWEN, [_seen(200), thought], True), (_VISION, [_seen(1000, 2)], True), (_LLAMA, [_seen(900)], True)),
        (family_of("", "mistral-nemo"), [_seen(900), _seen(9)], False),
    ):
        counter, offered = TokenCounter(), tools(2) if family is _LLAMA else ()
        first = _count(counter, family, *asked, tools=offered)
        yield f"{family.name} {first.own.tokens:.0f}: {_shown(first)}; {_limits(counter, first)}"
        for share, more in _MORE if is_long else ():
            counter = TokenCounter()
            counter.learn("t", first, int(first.tokens * share), is_asked=True)
            count = _count(counter, family, *asked, *more, tools=offered)
            yield f"  {share} + {len(more)}: {_shown(count)}; {_limits(counter, count)}"
    count = Estimate.exactly(1000)
    yield f"exactly: {_shown(count)}; {count.sizes} {count.fingerprint}"
    yield f"exactly: {', '.join(map(str, count.own))}; {', '.join(map(str, count.own.amounts))}"


def _parts() -> Iterator[str]:
    """What is made of a prompt by a part of it that a server has counted, and which window is surely large enough?"""
    counter, behind = TokenCounter(), [assistant(_WORD * 100), _seen(2000)]
    new = _count(counter, HEURISTIC, *behind)
    counter.learn("t", new, 2000)
    whole, part = (_count(counter, HEURISTIC, *asked) for asked in ([_seen(300, 1), *behind], behind))
    for name, one, other in (("none", whole, None), ("told", whole, part), ("new", whole, new), ("whole", part, whole)):
        count = one.with_part(other)
        yield f"{name}: {_shown(count)}; {count.sizes} {_first(range(9999), count.surely_fits)}"


def _limits(counter: TokenCounter, count: Estimate) -> str:
    fresh = map(str, itertools.count())

    def takes(is_asked: bool, tokens: int) -> bool:
        return counter.learn(next(fresh), count, tokens, is_asked=is_asked)

    low, high = range(1, count.tokens), range(count.tokens, 9 * count.tokens + 99_999)
    cut = " ".join(str(_last(low, partial(each, count)) + 1) for each in (counter.is_suspicious, counter.may_be_cut))
    least = "".join(f"{counter.is_suspicious(count, n):d}{counter.may_be_cut(count, n):d}" for n in (0, 1))
    return f"{_first(low, takes, False)}-{_last(high, takes, False)} {_first(low, takes, True)} {cut} {least}"


def _first(numbers: range, is_so: Callable[..., bool], *given: Any) -> int:
    """The first of the numbers of which something holds, as it does of all behind it."""
    return numbers.start + bisect_left(numbers, True, key=lambda number: is_so(*given, number))


def _last(numbers: range, is_so: Callable[..., bool], *given: Any) -> int:
    """The last of the numbers of which something holds, as it does of all before it."""
    return _first(numbers, lambda number: not is_so(*given, number)) - 1


def _ratios() -> Iterator[str]:
    """What is made of text after each of many numbers of a server's."""
    for family, shares in (
        (HEURISTIC, [1.2] * 3 + [0.9] * 4 + [1.0] * 14),
        (_QWEN, [1.01] * 3 + [0.99] * 14 + [1.0] * 5),
        (_QWEN, [1.3, 0.8]),
        (HEURISTIC, [3.0, 0.5]),
    ):
        yield from _after(family, shares, lambda at: _asked(f"{at:04d}{_WORD * 400}"), of=0)


def _prices() -> Iterator[str]:
    """What is made of pictures after each of many prices, of one size and of several."""
    for shares, step in (([2.0, 1.5, 1.0, *[0.9] * 9], 0), ([2.0] * 4, 20), ([0.0] * 4, 20)):
        yield from _after(_VISION, shares, lambda at, step=step: _asked(f"{at:04d}{_WORD * 40}", 400 + step * at), of=1)


def _after(family: Family, shares: Iterable[float], said: Callable[[int], JsonDict], *, of: int) -> Iterator[str]:
    counter, spans = TokenCounter(), []
    for at, share in enumerate(shares):
        count = _count(counter, family, said(at))
        spans.append(_span(count.rates[of]))
        own = count.own.amounts
        tokens = own.text + share * own.media if of else share * own.text
        counter.learn("t", count, int(tokens), is_asked=True)
    cells = (f"{span} x{len([*same])}" for span, same in itertools.groupby(spans))
    yield from _rows(family.name, cells, 5)


def _rows(name: str, cells: Iterable[str], most: int) -> Iterator[str]:
    """So many in a line."""
    cells = [*cells]
    for start in range(0, len(cells), most):
        yield f"{name}: {', '.join(cells[start : start + most])}"


def _taught() -> Iterator[str]:
    """Of how long a prompt does a number teach something, from which to which, and beside how much text of pictures?"""

    def teaches(family: Family, images: int, words: int, tokens: int) -> bool:
        counter = TokenCounter()
        count = _count(counter, family, _seen(words, images))
        counter.learn("t", count, tokens, is_asked=True)
        return _count(counter, family, _seen(words, images)).rates[images > 0].is_confirmed

    def is_beside(family: Family, more: int, words: int) -> bool:
        return teaches(family, 1, words, words + more)

    yield f"words: {_first(range(400), lambda words: teaches(HEURISTIC, 0, words, words))}"
    for family, images, words, middle in ((HEURISTIC, 0, 1000, 1000), (_VISION, 1, 40, 300), (_VISION, 2, 400, 900)):
        first = _first(range(middle), teaches, family, images, words)
        last = _last(range(middle, 19_999), teaches, family, images, words)
        beside = [_last(range(9999), is_beside, family, more) for more in (99, 999)]
        yield f"{family.name} {words} {images}: {first}-{last}, {beside}"


def _odd() -> Iterator[str]:
    """Of which second prompt and number is a server believed that says far less than expected?"""

    def is_believed(words: int, tokens: int, first: int = 1200) -> bool:
        counter = TokenCounter()
        counter.learn("t", _count(counter, HEURISTIC, _seen(4000)), first)
        return counter.learn("t", _count(counter, HEURISTIC, _seen(words)), tokens)

    def is_other(words: int) -> bool:
        return is_believed(words, words * 3 // 10)

    first, last = _first(range(1000, 1800), is_believed, 6000), _last(range(1800, 2600), is_believed, 6000)
    yield f"{_last(range(2000, 4000), is_other)} {_first(range(4000, 8000), is_other)}; {first}-{last}"
    yield f"halved: {_last(range(1000, 3000), lambda words: is_believed(words, words // 2, 4000))}"
    counter, again = TokenCounter(), []
    for tokens, is_asked in ((2000, False), (1990, False), (2010, False), (1990, True)):
        counter.learn("t", _count(counter, HEURISTIC, _seen(2000)), tokens, is_asked=is_asked)
        again.append(_count(counter, HEURISTIC, _seen(2000)).tokens)
    yield f"again: {again}"


def _protocols() -> Iterator[str]:
    """Which answers agree with the protocol's number, how far is one in doubt then, and before?"""

    def agrees(asked: int, answered: int) -> bool:
        protocol = Protocol()
        protocol.take("t", 1, asked)
        return protocol.compare("t", "m", 1, answered) and protocol.doubt_tokens("t", 9) == abs(asked - answered)

    for asked in (1, 2000):
        first, last = _first(range(asked), agrees, asked), _last(range(asked, 4000), agrees, asked)
        yield f"{asked}: {first}-{last}, {Protocol().doubt_tokens('t', asked)}"


def _running() -> Iterator[str]:
    """In which pieces is an answer counted that comes in steps, and how many tokens does it have on the way?"""
    texts = ("x" * 600, ("x" * 126 + " ") * 8, ("x" * 127 + " ") * 8, ("x" * 128 + " ") * 8, "a b " * 150)
    for text, step in itertools.product(texts, (1, 7)):
        pieces: list[int] = []
        running = GeneratedTokens(lambda piece, pieces=pieces: pieces.append(len(piece)) or len(piece) // 5)
        tokens = [running.tokens]
        for at in range(0, len(text), step):
            running.add(text[at : at + step])
            tokens.append(running.tokens)
        yield f"{step}: {tokens[:: len(tokens) // 12]} {running.exact()} {running.exact()} {pieces}"


def _pieces() -> Iterator[str]:
    """In which pieces is a long text counted?"""
    for text in (
        *("w" * 4096, "w" * 4097, f"{'w' * 3584} {'w' * 4000}", f"{'w' * 3583} {'w' * 4000}", "word " * 2000),
        *("w\n" * 5000, "中文，" * 3000, f"{'w' * 4094} {'w' * 3000}", f"{'w' * 4095} {'w' * 3000}", ""),
    ):
        pieces: list[int] = []
        Vocabulary(lambda piece, pieces=pieces: pieces.append(len(piece)) or 1).lengths([text])
        yield str(pieces)


def _shares() -> Iterator[str]:
    """What a part of a text makes of all of it; in a family that takes each digit by itself, too."""
    text = " ".join(f"{at} {'会議 notes'[: at % 9] * (at % 7)}" for at in range(1000))
    parts = [*(text[:chars] for chars in (0, 1, 64, 65, 127, 128, 129, 1000)), text]
    for share in (1e-9, 0.02, 0.1, 0.3, 0.9, 1):
        yield f"{share}: {' '.join(f'{tokens:.1f}' for tokens in TextCounts().lengths(_GLM, parts, share=share))}"


def _long() -> Iterator[str]:
    """What is made of texts so long that no window holds them, and that a part of them is counted for the rest."""
    for chars, window_tokens in ((1_000_000, 1), (1_000_001, 1), (1_000_192, 3907), (1_000_193, 3907), (1_000_193, 0)):
        asked = request_of(system("Be kind. " * 20), user(("word " * 200_100)[: chars - 180]))
        count = asyncio.run(TokenCounter().count("t", _QWEN, asked, window_tokens=window_tokens))
        yield f"{chars} in {window_tokens}: {count.sizes} {count.own.rendered}"
    values = _count(TokenCounter(), HEURISTIC, user([{"type": "odd", "values": ["x"] * 100_001}]))
    yield f"values: {values.tokens}"
    count_text = TokenCounter().text_counter("t", family_of("", "gpt-4o"))
    yield f"texts: {[count_text('a ' * 65_536 + more) for more in ('', '𓀀', 'word ' * 99_999)]}"


def _media() -> Iterator[str]:
    """What a part costs that is no text: at most 4,096, by 14 pixels a side, and by 28; at most 1,000 by its limit."""
    sizes = ((1, 1), (28, 28), (98, 98), (99, 98), (224, 224), (225, 224), (2000, 10), (9000, 9000))
    parts = [
        *((f"{width}x{height}", image(width, height)) for width, height in sizes),
        *((str(length), _inline(bytes(length))) for length in (0, 384, 390, 1500, 24_000, 25_000)),
        *(
            (f"JPEG {kind:x}", _inline(_JPEG % kind))
            for kind in b"\xbf\xc0\xc3\xc4\xc5\xc7\xc8\xc9\xcb\xcc\xcd\xcf\xd0"
        ),
        *((name, _inline(header)) for name, header in _HEADERS.items()),
        *((f"{kind} {chars}", _sound(kind, "A" * chars)) for kind in ("wav", "mp3") for chars in (4, 6_988_800)),
        *(("no sound", _sound(kind, data)) for kind, data in (("wav", None), (7, ["x"]))),
        ("web", {"type": "image_url", "image_url": {"url": "https://host/x.png"}}),
        ("odd", {"type": "image_url", "image_url": 3}),
    ]
    for limit, px in ((4096, 14), (1000, 28), (1001, 0)):
        shown = parts if px else parts[-2:]
        cells = (f"{name} {image_tokens(part, limit_tokens=limit, patch_px=px)}" for name, part in shown)
        yield from _rows(f"{px} px", cells, 8)


def _sound(kind: Any, data: Any) -> JsonDict:
    return {"type": "input_audio", "input_audio": {"format": kind, "data": data}}


def _inline(data: bytes) -> JsonDict:
    return {"type": "image_url", "image_url": {"url": f"data:image/x;base64,{base64.b64encode(data).decode()}"}}


def _requests() -> Iterator[str]:
    """What the families count: all, what of it is optional, and if a template was rendered, exact, the person last."""
    call = {"id": "call00001", "type": "function", "function": {"name": "look", "arguments": '{"at": "noon"}'}}
    odd = {**call, "function": {"name": "look", "arguments": '{"at": "noon'}}
    called = {"role": "assistant", "content": None, "tool_calls": [call]}
    text = "The 12 ships leave at 0730, and nobody knows why. "
    for name, raw, more in (
        ("x", [user("x")], {}),
        ("system", [system("Be kind."), user(text)], {}),
        ("two", [user(text), user(text)], {}),
        ("begun", [user(text), assistant(text)], {}),
        ("old thought", [user(text), {**assistant(text), "reasoning_content": text * 9}, user(text)], {}),
        ("new thought", [user(text), {**assistant(text), "reasoning_content": text * 9}], {}),
        ("call", [user(text), called, result("call00001", text)], {"tools": tools(2)}),
        ("no JSON", [user(text), {**called, "tool_calls": [odd]}, result("call00001", text)], {}),
        ("function", [user(text), {**assistant(text), "function_call": {"name": "f", "arguments": text}}], {}),
        ("name", [{**user(text), "name": "Theodora"}], {}),
        ("extras", [user(text)], {"extras": {"documents": [text, None, 7, {"key": True}]}}),
        ("script", [user("Корабль отплывает в полдень, 会議は明日です。")], {}),
        ("parts", [user([{"type": "odd", "note": text}, image(), text, {"type": "image_url", "text": text}])], {}),
        (
            "data",
            [user([{"type": "odd", "note": each} for each in ("a" * 2048, "a" * 2049, "data:x", "b c" * 900)])],
            {},
        ),
    ):
        owns = [_count(TokenCounter(), family_of("", each), *raw, **more).own for each in _NAMES]
        marks = [f"{'r' * own.rendered}{'e' * own.exact}{'a' * own.asks}" for own in owns]
        counts = (f"{own.tokens:.1f}-{own.optional_tokens:.1f}{mark}" for own, mark in zip(owns, marks, strict=True))
        yield f"{name}: {' '.join(counts)}"


def _grown() -> Iterator[str]:
    """What is made of two conversations that grow, after each number of a server's, and of their last answers?"""
    for name, tells, offered in (("qwen3-8b", "agent", tools(2)), ("glm-4", "chat", [])):
        counter, family, teller = TokenCounter(), family_of("", name), Teller(tells)
        said = [*itertools.islice(TELLS[tells](teller), 45)]
        # Mostly alike, now and then odd.
        for turn, share in enumerate((0.95, 0.97, 1.2, 0.96, 0.5, 0.5, 1.0, 0.94, 5.0)):
            asked = request_of(*said[: 5 * (turn + 1)], tools=offered)
            count = asyncio.run(counter.count("t", family, asked))
            tokens = int(share * count.tokens)
            if turn % 3 == 2:
                counter.take_protocols("t", count, asked, tokens)
            taken = turn % 3 < 2 and counter.learn("t", count, tokens, is_asked=turn % 3 == 1)
            yield f"{name} {tokens} {taken:d}: {_shown(count)}"
        count_text = counter.text_counter("t", family, text=count.text)
        yield f"{name}: {[count_text(teller.anything(lines)) for lines in range(9)]}"


_TABLES: dict[str, Callable[[], Iterator[str]]] = {
    "believed": _believed,
    "parts": _parts,
    "ratios": _ratios,
    "taught": _taught,
    "odd": _odd,
    "protocols": _protocols,
    "prices": _prices,
    "running": _running,
    "pieces": _pieces,
    "shares": _shares,
    "long": _long,
    "media": _media,
    "requests": _requests,
    "grown": _grown,
}


@pytest.mark.parametrize("name", _TABLES)
def test_what_stands_at_a_bound_is_as_recorded(name: str) -> None:
    """Each table asks one question, at and beside its bounds."""
    lines = list(_TABLES[name]())
    assert lines == recorded(_FILE, name, lines)
