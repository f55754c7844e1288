"""Which models the simulator lists, loads, and addresses."""

from __future__ import annotations

from tests.lmstudio_double import Model
from tests.simulator.bench import KEY, BenchFactory

OTHER = Model("google/gemma-4-12b", publisher="google", architecture="gemma4", type="vlm")


def test_v1_list_tells_the_loaded_window(bench: BenchFactory) -> None:
    """The native list carries the loaded window per instance and the architectural maximum apart from it."""
    first, second = bench(6000, models=[Model(KEY), OTHER]).get("/api/v1/models")["models"]
    assert first["loaded_instances"][0]["id"] == KEY
    assert first["loaded_instances"][0]["config"]["context_length"] == 6000
    assert first["max_context_length"] == 131_072
    assert (first["type"], second["type"]) == ("llm", "llm")
    assert second["loaded_instances"] == []
    assert second["capabilities"]["vision"] is True
