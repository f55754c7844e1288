"""Which deployments are guarded, by whose window, and what retries, fallbacks and pruning models get."""

from __future__ import annotations

from typing import Any

import pytest

from tests.builders import ONE_ROUND, prose, talk, user
from tests.integration.bench import KEY, Bench, answers, is_question, is_summary_call
from tests.integration.plain_server import PlainServer
from tests.integration.routes import TOKEN, Servers
from tests.lmstudio_double import Fault, Model, Reply

# Where each simulated model would be cut; far above every window used here.
_LONG = 14_000


@pytest.fixture
def plain(servers: Servers) -> PlainServer:
    """A plain server that no other proxy knows, so that its probes can be counted."""
    return servers.plain


def _chat(routes: Bench, model: str, messages: Any, **body: Any) -> Any:
    answer = routes.proxy.chat(model, messages, **body)
    assert answer.status_code == 200, answer.text
    return answer


@pytest.mark.parametrize("group", ["lms", "openai-lms", "token", "v0"])
def test_lm_studio_is_guarded_however_it_is_reached(routes: Bench, group: str) -> None:
    """lm_studio/, an openai/ address that answers as LM Studio, one with a token, one with the older API: guarded."""
    watch = routes.watch(group)
    messages = talk(f"reached {group}", _LONG)
    answer = _chat(routes, group, messages)
    assert answer.headers["x-litellm-compaction"] == "compacted"
    assert answer.headers["x-litellm-compaction-window"] == "8192"
    assert watch.problems(messages) == []
    assert {record.status for record in routes.simulators[group].requests} == {200}


def test_token_is_sent_with_the_probes(routes: Bench) -> None:
    """The deployment's own key goes with every look at the server, and only to that server."""
    probes = [record for record in routes.simulators["token"].requests if record.method == "GET"]
    assert probes
    assert {record.headers.get("authorization") for record in probes} == {f"Bearer {TOKEN}"}
    others = [record for name in ("lms", "v0") for record in routes.simulators[name].requests]
    assert not any(TOKEN in str(record.headers) for record in others)


def test_each_request_fits_the_deployment_that_serves_it(routes: Bench) -> None:
    """In a group with two windows every request fits the window of the deployment that got it."""
    small, large = routes.watch("pair-4k"), routes.watch("pair-16k")
    for number in range(16):
        messages = talk(f"pair {number % 4}", 9000)
        answer = _chat(routes, "pair", messages)
        window = int(answer.headers["x-litellm-compaction-window"])
        served = small if answer.headers["x-litellm-model-id"] == "pair-small" else large
        assert window == (4096 if served is small else 16384)
        assert served.problems(messages) == []
        if served is large:
            assert served.sent() == messages
    assert small.chats
    assert large.chats


def test_mixed_group_sends_the_clients_own_list_to_the_unguarded_one(routes: Bench, plain: PlainServer) -> None:
    """Of a guarded and an unguarded deployment in one group, only the guarded one gets a compacted list."""
    watch = routes.watch("mixed-lms")
    messages = talk("mixed", ONE_ROUND)
    since = len(plain.requests)
    for _ in range(16):
        _chat(routes, "mixed", messages)
    assert watch.chats
    assert plain.posts(since)
    assert {str(request.json["messages"]) for request in plain.posts(since)} == {str(messages)}
    assert all("max_tokens" not in request.json for request in plain.posts(since))
    assert all(watch.problems(messages, index) == [] for index in range(len(watch.chats)))


@pytest.mark.parametrize("stream", [False, True])
def test_fallback_from_unguarded_to_guarded_is_compacted(routes: Bench, plain: PlainServer, stream: bool) -> None:
    """A guarded fallback gets a list that fits it, although the first choice got the client's own."""
    watch = routes.watch("pair-4k")
    messages = [*talk(f"fall {stream}", ONE_ROUND), {"role": "assistant", "content": "."}, user("FAIL 500 and go on")]
    since = len(plain.requests)
    answer = routes.proxy.post({"model": "to-guarded", "messages": messages, "stream": stream})
    assert answer.status_code == 200
    assert "Understood." in answer.text or stream
    assert [request.json["messages"] for request in plain.posts(since)] == [messages]
    assert watch.problems(messages) == []
    assert len(watch.chats) == 1


def test_fallback_from_guarded_to_unguarded_gets_the_originals(routes: Bench, plain: PlainServer) -> None:
    """An unguarded fallback gets the client's own list and limits, although the first choice got a compacted one."""
    watch = routes.watch("failing-lms", answers(reply=Reply(fault=Fault("500"))))
    messages = talk("back", _LONG)
    since = len(plain.requests)
    answer = _chat(routes, "failing-lms", messages)
    assert [name for name in answer.headers if "litellm-compaction" in name] == []
    assert len(watch.sent()) < len(messages)
    assert [request.json["messages"] for request in plain.posts(since)] == [messages]
    assert "max_tokens" not in plain.posts(since)[0].json


@pytest.mark.parametrize("stream", [False, True])
def test_window_fallback_gets_what_cannot_fit(routes: Bench, plain: PlainServer, stream: bool) -> None:
    """What does not fit a group with `context_window_fallbacks` goes there, uncompacted; what can fit stays."""
    watch = routes.watch("tight")
    giant = [*talk("tight", 800), {"role": "assistant", "content": "."}, user(prose("giant", 6000))]
    since = len(plain.requests)
    answer = routes.proxy.post({"model": "tight", "messages": giant, "stream": stream})
    assert answer.status_code == 200
    assert [request.json["messages"] for request in plain.posts(since)] == [giant]
    assert watch.chats == []
    _chat(routes, "tight", talk("tight but possible", ONE_ROUND))
    assert len(watch.chats) == 1


def test_wildcard_deployment_is_guarded_by_the_model_that_is_asked(routes: Bench) -> None:
    """Behind `lm_studio/*` each model has its own window, and its summaries are its own."""
    simulator = routes.simulators["wild"]
    simulator.models = [*simulator.models, other := Model("llama-3.1-8b", architecture="llama")]
    simulator.load(other.key, 4096)
    for key, window in ((KEY, 8192), (other.key, 4096)):
        watch = routes.watch("wild")
        messages = talk(f"wild {key}", 6200)
        answer = _chat(routes, f"lm_studio/{key}", messages)
        assert answer.headers["x-litellm-compaction-window"] == str(window)
        assert answer.headers["x-litellm-compaction"] == "compacted"
        assert watch.problems(messages) == []
        assert {record.instance_id for record in [*watch.summaries, *watch.chats]} == {key}


def test_no_model_behind_a_wildcard_is_not_let_through(routes: Bench) -> None:
    """Nobody says the window of a model without a name, so nothing is sent."""
    watch = routes.watch("wild")
    answer = routes.proxy.chat("lm_studio/", talk("nameless", _LONG))
    assert answer.status_code == 400
    assert watch.chats == []


def test_retry_sends_the_same_compaction(routes: Bench) -> None:
    """A retry after a 500 gets the same bytes, and no second summary is made."""
    watch = routes.watch("retried")
    failed: list[int] = []

    def once(call: Any) -> Reply | None:
        if is_summary_call(call.body) or is_question(call.body) or failed:
            return answers()(call)
        failed.append(call.index)
        return Reply(fault=Fault("500"))

    watch.simulator.script = once
    messages = talk("retry", ONE_ROUND)
    answer = routes.proxy.chat("retried", messages, num_retries=2)
    assert answer.status_code == 200
    assert answer.headers["x-litellm-compaction"] == "compacted"
    assert [record.status for record in watch.chats] == [500, 200]
    assert watch.sent(0) == watch.sent(1)
    assert watch.bodies[0]["max_tokens"] == watch.bodies[1]["max_tokens"]
    assert len(watch.summaries) == 1


def test_model_that_is_not_loaded_is_warmed_up_first(routes: Bench) -> None:
    """The window of a model that is not loaded is read after a one-token request has loaded it."""
    watch = routes.watch("cold")
    messages = talk("cold", ONE_ROUND)
    answer = _chat(routes, "cold", messages)
    assert answer.headers["x-litellm-compaction-window"] == "4096"
    warm_up = watch.chats[0]
    assert (warm_up.body or {})["max_tokens"] == 1
    assert warm_up.prompt_tokens < 20
    assert watch.problems(messages) == []
    assert len(watch.chats) == 2


@pytest.mark.parametrize(
    ("group", "pruner", "why"),
    [
        ("pruned-cold", "pruner-cold", "its context length is not known: .+ is not loaded in LM Studio"),
        ("pruned-silent", "plain", "its context length is not known: Context limit not available"),
    ],
)
def test_unusable_pruning_model_is_not_used(
    routes: Bench, plain: PlainServer, group: str, pruner: str, why: str
) -> None:
    """A pruning model that is not loaded, or of which nobody knows the window, is not used, and the log says why."""
    cold = routes.watch("pruner-cold")
    watch = routes.watch(group)
    since = len(plain.requests)
    _chat(routes, group, talk(group, ONE_ROUND))
    assert len(watch.summaries) == 1
    assert cold.chats == []
    assert cold.summaries == []
    assert plain.posts(since) == []
    assert not routes.simulators["pruner-cold"].instances
    assert routes.proxy.expect_logged(rf"WARNING.*pruning_model={pruner} is not used while {why}")


@pytest.mark.parametrize(("group", "pruner"), [("pruned-llama", "scribe"), ("pruned-written", "plain")])
def test_any_deployment_can_be_the_pruning_model(routes: Bench, servers: Servers, group: str, pruner: str) -> None:
    """A llama.cpp that nobody opted in, by its own window, and one whose window its operator wrote."""
    watch = routes.watch(group)
    server: PlainServer = getattr(servers, pruner)
    since = len(server.requests)
    _chat(routes, group, talk(group, ONE_ROUND))
    assert watch.summaries == []
    # A llama.cpp may be asked first how it counts, which writes no token.
    assert [request.json["max_tokens"] for request in server.posts(since) if "max_tokens" in request.json] != []
    assert len(watch.chats) == 1
