"""A record that reaches into an answer: what is left of the message, whatever the answer is made of."""

from __future__ import annotations

from hypothesis import assume, given

from litellm_compaction.core.compaction import begins, begun_by, behind
from litellm_compaction.core.continuation.text import open_think
from litellm_compaction.core.messages import normal_text, parse_message
from tests.builders import texts


@given(texts(), texts())
def test_nothing_is_lost_at_the_cut(head: str, rest: str) -> None:
    """Beginning and rest are the whole normal text, also where white space, notices or thoughts open the answer."""
    assume(rest.strip() and not open_think(head) and "⚙️" not in head + rest)
    message = parse_message({"role": "assistant", "content": head + rest, "tool_calls": []})
    begun = begun_by(head)
    whole = normal_text(message)
    if begun is None:
        assert whole == normal_text(parse_message({"role": "assistant", "content": rest}))
        return
    assert begins(message, begun)
    assert whole.removesuffix(behind(message, begun).text).strip() == whole[: begun.chars].strip()
    assert behind(message, begun).text == whole[begun.chars :]
    assert behind(message, begun).raw["tool_calls"] == []


@given(texts().filter(str.strip), texts().filter(str.strip))
def test_another_beginning_is_not_taken(head: str, rest: str) -> None:
    """One changed character, or nothing behind it, and the record is not for this answer; nor for a user's words."""
    begun = begun_by(head)
    assume(begun is not None)
    assert begun is not None
    assert not begins(parse_message({"role": "assistant", "content": f"x{head}{rest}"}), begun)
    assert not begins(parse_message({"role": "assistant", "content": head.strip()}), begun)
    assert not begins(parse_message({"role": "user", "content": head + rest}), begun)


def test_thoughts_that_go_on_are_not_begun() -> None:
    """Inside a reasoning block nothing has been said yet that a later turn would show."""
    assert begun_by("<think>\nFour, or five") is None
    assert begun_by("<think>\nFour.\n</think>\n\n") is None
