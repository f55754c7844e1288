"""A client request while it is under way belongs to LiteLLM's object; one beside a conversation is told by its form."""

from __future__ import annotations

from copy import deepcopy
from typing import Any, cast

import pytest

from litellm_compaction.config import Settings
from litellm_compaction.proxy.exchange import Exchanges, note_of, opened, serve
from tests.builders import JsonDict, assistant, chat, parsed, system, user
from tests.proxy.scripted import exchange_of


class Logging:
    """LiteLLM's logging object of a request."""

    def __init__(self) -> None:
        self.model_call_details: dict[str, Any] = {}

    @property
    def body(self) -> dict[str, Any]:
        """Of a hook."""
        return {"litellm_logging_obj": self}


async def test_a_task_finds_the_request_that_it_serves() -> None:
    """Until that ends; also if LiteLLM asks with a logging object of its own, or a copy."""
    mine, other, inner = Logging(), Logging(), Logging()
    first, second = exchange_of(), exchange_of()
    serve(mine.body)
    assert note_of({}).exchange is None
    for again in (exchange_of(), first):
        # Another callback has changed its messages: it was read anew.
        opened(mine.body, again)
        assert note_of({}).exchange is note_of(mine.body).exchange is note_of(deepcopy(mine.body)).exchange is again
    serve(other.body)
    assert note_of({}).exchange is None
    opened(inner.body, second)
    assert note_of({}).exchange is second
    note_of(other.body).close()
    assert note_of({}).exchange is None
    serve(mine.body)
    assert note_of({}).exchange is first
    note_of(mine.body).close()
    assert note_of({}).exchange is None


class _Room:
    """Gives back when it is forgotten, as a reservation does."""

    def __init__(self, name: str, released: list[str]) -> None:
        self._name, self._released = name, released

    def release(self) -> None:
        if self._name not in self._released:
            self._released.append(self._name)

    __del__ = release


async def test_a_request_that_litellm_forgets_gives_its_room_back() -> None:
    """Its end was never told: others would wait for it until the proxy ends."""
    released: list[str] = []
    first, second, third = Logging(), Logging(), Logging()
    for name, owner in (("first", first), ("second", second), ("third", third), ("fourth", third)):
        call = exchange_of()
        call.room = cast("Any", _Room(name, released))
        opened(owner.body, call)
        del call
    assert released == ["third"]  # another request of the same object
    del owner, first
    assert released == ["third", "first"]
    note_of(second.body).close()
    del second
    assert released == ["third", "first", "second"]


def test_an_answer_is_not_carried_by_hooks_that_did_not_see_its_deployment() -> None:
    """They failed open: nothing would be known to go on with, and the client gets the server's own answer."""
    call = exchange_of()
    call.is_chat = True
    call.room, call.prepared = cast("Any", _Room("room", [])), cast("Any", object())
    assert not call.is_hooked
    call.deployment = cast("Any", object())
    assert call.is_hooked


TALK = chat(6)
ANSWERED = [*TALK, assistant("It is done.")]
ASKED = user("Write a title of at most five words for this conversation.")
TITLES = system("You write titles.")


def _told(raw: list[JsonDict], tenant: str = "anna", *, is_bounded: bool = True) -> bool:
    """What a request is taken for, after a turn of a conversation and of another one."""
    conversations = Exchanges()
    for talk in (TALK, [*TALK[:-1], user("Something else.")]):
        assert not conversations.is_beside("anna", parsed(talk), has_tools=False, is_bounded=False)
    return conversations.is_beside(tenant, parsed(raw), has_tools=False, is_bounded=is_bounded)


@pytest.mark.parametrize(
    ("is_beside", "raw"),
    [
        (True, [*ANSWERED, ASKED]),
        (True, [*TALK, ASKED]),
        (True, [*ANSWERED[-4:], ASKED]),
        (True, [TITLES, *ANSWERED[-4:]]),
        (True, [TITLES, *ANSWERED[-2:]]),
        (True, [TITLES, *ANSWERED[1:]]),
        (True, [ASKED, *ANSWERED[-4:]]),
        # In doubt it is an ordinary one: sent again, answered again, and another one.
        (False, TALK),
        (False, ANSWERED),
        (False, [TITLES, *chat(4, words=9)]),
        # One message alone may be anybody's, and not everything said besides is short.
        (False, [TITLES, TALK[-1]]),
        (False, [*ANSWERED, user("word " * 1000)]),
        (False, [TITLES, *ANSWERED[1:], ASKED]),
        (False, [*ANSWERED, user("And then?"), assistant("Fine."), user("Thanks.")]),
        # Of an older end.
        (False, [TITLES, *TALK[1:-2]]),
    ],
)
def test_one_short_message_over_a_copy_of_the_end_is_beside_it(is_beside: bool, raw: list[JsonDict]) -> None:
    """With a small bound that the conversation has not; of another tenant's conversation nothing is known."""
    assert _told(raw) is is_beside
    assert not _told(raw, is_bounded=False)
    assert not _told(raw, "bert")


def _turns(conversations: Exchanges, *requests: tuple[list[JsonDict], bool, bool]) -> list[bool]:
    return [
        conversations.is_beside("anna", parsed(raw), has_tools=has_tools, is_bounded=is_bounded)
        for raw, has_tools, is_bounded in requests
    ]


def test_one_without_the_conversations_tools_is_beside_it() -> None:
    """Unless it begins as the conversation does: a client may take the tools away for a turn."""
    over, going_on = [*ANSWERED[-4:], ASKED], [*ANSWERED, user("And then?")]
    assert _turns(Exchanges(), (TALK, True, False), (over, False, False)) == [False, True]
    assert _turns(Exchanges(), (TALK, True, False), (going_on, False, False)) == [False, False]


def test_a_conversation_whose_answers_are_short_goes_on() -> None:
    """Its own bound says nothing; nor does one that comes to stay."""
    later = [*ANSWERED, user("And then?")]
    assert _turns(Exchanges(), (TALK, False, True), (later, False, True)) == [False, False]
    last = [*later, assistant("Fine."), user("Thanks.")]
    once = (TALK, False, False), (later, False, True), (last, False, True), ([*last, ASKED], False, True)
    assert _turns(Exchanges(), *once) == [False, True, False, False]


@pytest.mark.parametrize(
    ("tokens", "chars", "at", "is_beside"),
    [(512, 4000, 0, True), (1, 4000, -33, True), (512, 4000, -32, False), (513, 4000, 0, False), (512, 4001, 0, False)],
)
async def test_what_tells_one_beside_has_bounds(tokens: int, chars: int, at: int, is_beside: bool) -> None:
    """No title is longer, and no instruction that asks for one; a copy is known by its last 32 messages."""
    exchanges, talk = Exchanges(), chat(20)
    changed = [{**each, "content": "?"} if index == at % len(talk) else each for index, each in enumerate(talk)]
    later = [*(changed if at else talk), assistant("It is done."), user("w" * chars)]
    for body, found in (({"messages": talk}, False), ({"messages": later, "max_tokens": tokens}, is_beside)):
        exchange = await exchanges.of(body, "served", Settings())
        assert exchange is not None
        assert exchange.is_beside is exchange.is_client_summary is found
