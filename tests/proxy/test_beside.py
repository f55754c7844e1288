"""A request beside a conversation is told from its next turn by its form alone."""

from __future__ import annotations

import pytest

from litellm_compaction.proxy.exchange import Conversations
from tests.builders import JsonDict, assistant, chat, parsed, system, user

TALK = chat(6)
ANSWERED = [*TALK, assistant("It is done.")]
ASKED = user("Write a title of at most five words for this conversation.")
TITLES = system("You write titles.")


def _told(raw: list[JsonDict], tenant: str = "anna", *, is_bounded: bool = True) -> bool:
    """What a request is taken for, after a turn of a conversation and of another one."""
    conversations = Conversations()
    for talk in (TALK, [*TALK[:-1], user("Something else.")]):
        assert not conversations.is_beside("anna", parsed(talk), has_tools=False, is_bounded=False)
    return conversations.is_beside(tenant, parsed(raw), has_tools=False, is_bounded=is_bounded)


@pytest.mark.parametrize(
    "raw",
    [
        [*ANSWERED, ASKED],
        [*TALK, ASKED],
        [*ANSWERED[-4:], ASKED],
        [TITLES, *ANSWERED[-4:]],
        [TITLES, *ANSWERED[1:]],
        [ASKED, *ANSWERED[-4:]],
    ],
)
def test_one_short_message_over_a_copy_of_the_end_is_beside_it(raw: list[JsonDict]) -> None:
    """With a small bound that the conversation has not; of another tenant's conversation nothing is known."""
    assert _told(raw)
    assert not _told(raw, is_bounded=False)
    assert not _told(raw, "bert")


@pytest.mark.parametrize(
    "raw",
    [
        # Sent again, answered again, and another one.
        TALK,
        ANSWERED,
        [TITLES, *chat(4, words=9)],
        # One message alone may be anybody's, and not everything said besides is short.
        [TITLES, TALK[-1]],
        [*ANSWERED, user("word " * 1000)],
        [TITLES, *ANSWERED[1:], ASKED],
        [*ANSWERED, user("And then?"), assistant("Fine."), user("Thanks.")],
        # Of an older end.
        [TITLES, *TALK[1:-2]],
        [],
    ],
)
def test_in_doubt_it_is_an_ordinary_request(raw: list[JsonDict]) -> None:
    assert not _told(raw)


def _turns(conversations: Conversations, *requests: tuple[list[JsonDict], bool, bool]) -> list[bool]:
    return [
        conversations.is_beside("anna", parsed(raw), has_tools=has_tools, is_bounded=is_bounded)
        for raw, has_tools, is_bounded in requests
    ]


def test_one_without_the_conversations_tools_is_beside_it() -> None:
    """Unless it begins as the conversation does: a client may take the tools away for a turn."""
    over, going_on = [*ANSWERED[-4:], ASKED], [*ANSWERED, user("And then?")]
    assert _turns(Conversations(), (TALK, True, False), (over, False, False)) == [False, True]
    assert _turns(Conversations(), (TALK, True, False), (going_on, False, False)) == [False, False]


def test_a_conversation_whose_answers_are_short_goes_on() -> None:
    """Its own bound says nothing; nor does one that comes to stay."""
    later = [*ANSWERED, user("And then?")]
    assert _turns(Conversations(), (TALK, False, True), (later, False, True)) == [False, False]
    last = [*later, assistant("Fine."), user("Thanks.")]
    once = (TALK, False, False), (later, False, True), (last, False, True), ([*last, ASKED], False, True)
    assert _turns(Conversations(), *once) == [False, True, False, False]
