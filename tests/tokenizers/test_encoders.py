"""Short text counted word by word has the tokens that the whole machinery gives it."""

from __future__ import annotations

from hypothesis import example, given, settings
from hypothesis import strategies as st

from litellm_compaction.tokenizers.encoders import TokenizersEncoder
from litellm_compaction.tokenizers.registry import vocabulary

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
