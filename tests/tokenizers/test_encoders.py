"""Short text counted word by word has the tokens that the whole machinery gives it."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import example, given, settings
from hypothesis import strategies as st

from litellm_compaction.tokenizers.encoders import TokenizersEncoder, encoder_for
from litellm_compaction.tokenizers.registry import read_pack, vocabulary

NAMES = ("llama2", "mistral-v3", "phi3", "gemma4")
PIECE = st.one_of(
    st.sampled_from(
        [
            " ",
            "  ",
            "▁",
            "\n",
            "\n\n",
            "\t",
            "\r\n",
            ">",
            "</",
            "> </",
            ">▁</",
            "a",
            "the",
            " the",
            "né",
            "中文",
            "👍🏽",
        ]
    ),
    st.text(st.characters(exclude_categories=("Cs",)), max_size=6),
)
TEXT = st.lists(PIECE, max_size=30).map("".join)


def encoder(name: str) -> TokenizersEncoder:
    found = vocabulary(name)._encoder
    assert isinstance(found, TokenizersEncoder)
    return found


def by_the_whole(name: str, texts: list[str]) -> list[int]:
    return TokenizersEncoder(encoder(name)._tokenizer).lengths(texts)


@settings(max_examples=settings().max_examples * 7, deadline=None)
@given(name=st.sampled_from(NAMES), texts=st.lists(TEXT, max_size=3))
@example(name="gemma4", texts=["<b> </b> <i> </i>\n> </"])
@example(name="llama2", texts=["", " ", "a" * 100 + " b"])
def test_words_take_what_the_text_takes(name: str, texts: list[str]) -> None:
    """Any text, also one in which a token reaches over a space, in each vocabulary that is counted by words."""
    assert encoder(name).lengths(texts) == by_the_whole(name, texts)


def test_long_texts_and_long_words_are_not_remembered() -> None:
    """A megabyte would hold the interpreter lock, and long words would fill the memory."""
    counter = encoder("llama2").words
    assert counter is not None
    assert counter.lengths(["a " * 20_000]) is None
    before = counter._length.cache_info().currsize
    assert counter.lengths(["z" * 65 + " once-upon"]) == by_the_whole("llama2", ["z" * 65 + " once-upon"])
    assert counter._length.cache_info().currsize == before
    assert counter.lengths(["once-upon-a-time"]) is not None
    assert counter._length.cache_info().currsize == before + 1


def test_lines_are_told_apart_where_the_vocabulary_does() -> None:
    """A token over a line end is never made where text is divided at line ends, word by word or not."""
    tokens = ("a", "b", "\n", "a\n", "▁", "▁a")
    data = replace(
        read_pack("llama2"), kind="bpe", pre="gemma4", tokens=tokens, scores=(), token_types=(), merges=("a \n", "▁ a")
    )
    made = encoder_for(data)
    assert isinstance(made, TokenizersEncoder)
    texts = ["a\nb", "a a\n\na", "\na \n"]
    assert made.words is not None
    assert made.words.lengths(texts) == TokenizersEncoder(made._tokenizer).lengths(texts) == [3, 5, 4]
