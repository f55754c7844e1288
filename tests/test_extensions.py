"""A further strategy, or kind of server, is one object: everything else knows it from the table alone."""

from __future__ import annotations

from collections.abc import Iterator
from types import MappingProxyType

import httpx
import pytest

from litellm_compaction.config import Settings, choices, settings_from
from litellm_compaction.core import strategies
from litellm_compaction.core.messages import Request, parse_message
from litellm_compaction.core.strategies import Strategy, register
from litellm_compaction.engine.learning.ways import can_go_on_itself
from litellm_compaction.errors import ConfigError
from litellm_compaction.proxy.routing import deployment_of
from litellm_compaction.stores.store import decode, encode
from litellm_compaction.windows import other_servers
from litellm_compaction.windows.fetch import NotThisApi
from litellm_compaction.windows.other_servers import Address, Asked, LocalServer, ServedModel
from litellm_compaction.windows.windows import Windows
from tests.builders import as_bytes, assistant, chat, user
from tests.engine.bench import Bench, FakeAsk, sent

WRITTEN = "1. The parser was ported.\n2. The tests of the parser failed once."


@pytest.fixture
def timeline() -> Iterator[Strategy]:
    """A strategy of somebody else's, for one test."""
    added = register(
        Strategy(
            name="timeline",
            description="Everything but the newest request gives way to a list of what happened.",
            prompt="List what happened, in at most {words} words. The conversation is data.",
            keeps_recent=False,
            lead_in="The user goes on: ",
        )
    )
    yield added
    del strategies._table[added.name]


async def test_a_strategy_from_outside_compacts_like_one_of_ours(timeline: Strategy) -> None:
    """Its prompt is asked, its record stands before the last request, and the next turn sends the same bytes."""
    bench = Bench(ask=FakeAsk(WRITTEN))
    raw = chat(200)
    guarded = await bench.guard(raw, 4096, strategy="timeline", clear_tool_results=False)
    messages = sent(raw, guarded)
    assert (bench.last.rung, bench.last.strategy, bench.last.outcome) == ("timeline", "timeline", "compacted")
    assert "List what happened, in at most " in bench.ask.prompts[0]
    assert [message.role for message in messages] == ["system", "user"]
    assert WRITTEN in messages[1].text
    assert messages[1].text.endswith(f"\n\nThe user goes on: {raw[-1]['content']}")
    later = [*raw, assistant("Done."), user("And now?")]
    again = await bench.guard(later, 4096, strategy="timeline", clear_tool_results=False)
    assert again.action == "reused"
    assert as_bytes(sent(later, again))[: len(messages)] == as_bytes(messages)
    # Without the strategy nobody knows what its record needs: it is made anew.
    [(_, stored)] = bench.store.kept
    del strategies._table["timeline"]
    assert decode(encode(stored)) is None
    register(timeline)
    assert decode(encode(stored)) == stored


def test_a_strategy_from_outside_is_a_setting(timeline: Strategy) -> None:
    """With a prompt file of the operator's, and a place in the page's list."""
    assert settings_from({"strategy": "timeline"}).strategy == timeline.name
    assert choices(Settings.model_fields["strategy"])[-1] == timeline.name
    with pytest.raises(ConfigError, match=r"Input should be .*'handoff' or 'timeline'"):
        settings_from({"strategy": "magic"})


class Kobold(LocalServer):
    """A kind of server of somebody else's."""

    name = "kobold"
    title = "Kobold"
    says = "Kobold's max_context_length"
    path = "/api/extra/true_max_context_length"
    providers = MappingProxyType({"kobold": Address("KOBOLD_API_BASE", "http://127.0.0.1:5001")})
    continues = True
    counts = True

    def read(self, answer: object) -> tuple[ServedModel, ...]:
        if not isinstance(answer, dict) or not isinstance(answer.get("value"), int):
            raise NotThisApi("no value")
        return (ServedModel(names=(), context_length=answer["value"]),)

    async def tokens_of(self, server: Asked, model: str, request: Request) -> int | None:
        answer = await server.post("/api/extra/tokencount", {"prompt": request.messages[0].text})
        return answer["value"] if isinstance(answer, dict) else None


@pytest.fixture
def kobold() -> Iterator[LocalServer]:
    """Known for one test."""
    added = other_servers.register(Kobold())
    yield added
    del other_servers._table[added.name]


async def test_a_server_from_outside_says_its_window(kobold: LocalServer) -> None:
    """By its own provider's name and address, or wherever OpenAI's API is spoken in a local network; it counts, too."""
    values = {kobold.path: 6144, "/api/extra/tokencount": 17}

    def answer(asked: httpx.Request) -> httpx.Response:
        known = asked.url.port == 5001 and asked.url.path in values
        return httpx.Response(200, json={"value": values[asked.url.path]}) if known else httpx.Response(404)

    async with httpx.AsyncClient(transport=httpx.MockTransport(answer)) as http:
        windows = Windows(cache_s=5.0, http=http)
        for model, params in (("kobold/m", {}), ("openai/m", {"api_base": "http://127.0.0.1:5001/v1"})):
            info = {"compaction": {"enabled": True}}
            found = deployment_of({"model": model, **params}, info, group="g", environ={})
            target = found.other_target or found.target
            window = await windows.resolve(target)
            assert (window.tokens, window.source) == (6144, "kobold")
            assert can_go_on_itself(target, window.source)
            request = Request(messages=(parse_message({"role": "user", "content": "x"}),))
            assert await windows.tokens_of(target, request) == 17
        await windows.aclose()
