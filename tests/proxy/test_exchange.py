"""A client request while it is under way: it belongs to LiteLLM's object, and ends with it."""

from __future__ import annotations

from typing import Any, cast

from litellm_compaction.engine import Attempts
from litellm_compaction.errors import BadWish
from litellm_compaction.proxy.exchange import ClientRequest, Exchange, Exchanges
from tests.builders import chat
from tests.engine.bench import Bench


class Logging:
    """LiteLLM's logging object of a request."""

    def __init__(self) -> None:
        self.model_call_details: dict[str, Any] = {}

    @property
    def body(self) -> dict[str, Any]:
        """Of a hook."""
        return {"litellm_logging_obj": self}


def made(group: str = "served") -> Exchange:
    request = Bench.request(chat(1))
    return Exchange(ClientRequest(received=request, original=request, group=group), Attempts(summary_calls_left=1))


async def test_a_refusal_is_told_to_its_own_request() -> None:
    """In the task that serves it, until it ends; also if LiteLLM asks with a logging object of its own."""
    calls, mine, other, inner = Exchanges(), Logging(), Logging(), Logging()
    calls.serve(mine.body)
    assert calls.refusal() is None
    calls.open(mine.body, made()).refused(BadWish("mine"))
    assert str(calls.refusal()) == "mine"
    calls.serve(other.body)
    assert calls.refusal() is None
    calls.open(inner.body, made()).refused(BadWish("other"))
    assert str(calls.refusal()) == "other"
    calls.close(other.body)
    assert calls.refusal() is None
    calls.serve(mine.body)
    assert str(calls.refusal()) == "mine"
    calls.close(mine.body)
    assert calls.refusal() is None


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
    calls = Exchanges()
    first, second, third = Logging(), Logging(), Logging()
    for name, owner in (("first", first), ("second", second), ("third", third), ("fourth", third)):
        call = made()
        call.room = cast("Any", _Room(name, released))
        calls.open(owner.body, call)
        del call
    assert released == ["third"]  # another request of the same object
    del owner, first
    assert released == ["third", "first"]
    calls.close(second.body)
    del second
    assert released == ["third", "first", "second"]
