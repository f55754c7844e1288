"""A record that reaches into an answer: what is left of the message, whatever the answer is made of."""

from __future__ import annotations

from hypothesis import assume, given

from litellm_compaction.core.compaction import begins, behind, part_covered_by
from litellm_compaction.core.continuation.text import open_think
from litellm_compaction.core.messages import normal_text, parse_message
from tests.builders import texts


@given(texts(), texts())
def test_nothing_is_lost_at_the_cut(head: str, rest: str) -> None:
    """Beginning and rest are the whole normal text, also where white space, notices or thoughts open the answer."""
    assume(rest.strip() and not open_think(head) and "⚙️" not in head + rest)
    message = parse_message({"role": "assistant", "content": head + rest, "tool_calls": []})
    covered_part = part_covered_by(head)
    whole = normal_text(message)
    if covered_part is None:
        assert whole == normal_text(parse_message({"role": "assistant", "content": rest}))
        return
    assert begins(message, covered_part)
    assert whole.removesuffix(behind(message, covered_part).text).strip() == whole[: covered_part.chars].strip()
    assert behind(message, covered_part).text == whole[covered_part.chars :]
    assert behind(message, covered_part).raw["tool_calls"] == []


@given(texts().filter(str.strip), texts().filter(str.strip))
def test_another_beginning_is_not_taken(head: str, rest: str) -> None:
    """One changed character, or nothing behind it, and the record is not for this answer; nor for a user's words."""
    covered_part = part_covered_by(head)
    assume(covered_part is not None)
    assert covered_part is not None
    assert not begins(parse_message({"role": "assistant", "content": f"x{head}{rest}"}), covered_part)
    assert not begins(parse_message({"role": "assistant", "content": head.strip()}), covered_part)
    assert not begins(parse_message({"role": "user", "content": head + rest}), covered_part)


def test_thoughts_that_go_on_are_not_begun() -> None:
    """Inside a reasoning block nothing has been said yet that a later turn would show."""
    assert part_covered_by("<think>\nFour, or five") is None
    assert part_covered_by("<think>\nFour.\n</think>\n\n") is None
