"""Refusals: their statuses, and the shapes of their bodies."""

from __future__ import annotations

import pytest

from tests.simulator.bench import KEY, BenchFactory, user


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({"model": KEY, "parallel": 4}, 400),
        ({"model": "nope"}, 404),
        ({"model": KEY, "context_length": "big"}, 400),
        ({"model": KEY, "context_length": 10**9}, 400),
        ({}, 400),
    ],
)
def test_impossible_loads_are_refused(bench: BenchFactory, body: dict[str, object], status: int) -> None:
    """Unknown keys, models, and windows are refused with an error body."""
    response = bench().client.post("/api/v1/models/load", json=body)
    assert (response.status_code, "error" in response.json()) == (status, True)


def test_nothing_loaded_and_no_jit_is_a_404(bench: BenchFactory) -> None:
    """Without JIT and without a loaded model the request is refused as LM Studio does."""
    response = bench(None, jit=False).chat(user("hi"))
    assert (response.status_code, response.json()["error"]["code"]) == (404, "model_not_found")


def test_error_shape_of_newer_servers(bench: BenchFactory) -> None:
    """Newer servers wrap template errors in an object."""
    response = bench(strict_template="gemma", error_shape="object").chat(user("q"), user("q"))
    assert response.json()["error"]["type"] == "invalid_request_error"
