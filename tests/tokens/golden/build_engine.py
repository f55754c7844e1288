"""Counts golden requests with a real llama.cpp, for tests/tokens/test_golden.py.

    LLAMA_SERVER=/path/to/llama-server python tests/tokens/golden/build_engine.py [--models FOLDER]

The requests are those of benchmarks/lib/accuracy_requests.py, the models those of benchmarks/lib/engine_models.py: the
vocabularies and templates of this package, read and rendered by llama.cpp's own programs. FOLDER keeps the made models
for the next time. The numbers in the repository are of llama.cpp as vendored in llama-cpp-python 0.3.36.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))

from benchmarks.lib.accuracy_requests import JsonObject, kinds
from benchmarks.lib.engine_models import MODELS, write_model
from benchmarks.lib.llama_server import VARIABLE, LlamaServer, Refused, program, served

GOLDEN = Path(__file__).with_name("engine.json")
# Long requests say nothing that short ones do not, and take most of the time.
LEFT_OUT = frozenset({"long"})
# Counted with the vocabulary and the template of another one that is listed.
SAME = frozenset({"llama3.3", "mixtral", "mixtral-8x22b"})


def main() -> None:
    """Writes the golden file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path)
    chosen = parser.parse_args()
    binary = program()
    if binary is None:
        parser.error(f"name the llama-server of llama.cpp in the environment variable {VARIABLE}")
    asked = golden_requests()
    tokens: dict[str, dict[str, list[int | None]]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        for name, known in MODELS.items():
            if name in SAME:
                continue
            path = write_model((chosen.models or Path(scratch)) / f"{name}.gguf", known)
            with served(binary, path) as server:
                tokens[name] = {kind: [_tokens(server, each) for each in requests] for kind, requests in asked.items()}
            print(name, flush=True)
    lines = [f"  {json.dumps(name)}: {json.dumps(counts)}" for name, counts in tokens.items()]
    head = json.dumps({"made by": "build_engine.py", "requests": digest(asked)})[:-1]
    GOLDEN.write_text(f'{head},\n "tokens": {{\n' + ",\n".join(lines) + "\n}}\n", encoding="utf-8")


def golden_requests() -> dict[str, list[JsonObject]]:
    """The requests of each kind."""
    return {kind: requests for kind, requests in kinds().items() if kind not in LEFT_OUT}


def digest(asked: Mapping[str, Sequence[JsonObject]]) -> str:
    """Changes with any request."""
    return hashlib.sha256(json.dumps(asked).encode()).hexdigest()[:16]


def _tokens(server: LlamaServer, request: JsonObject) -> int | None:
    """What the engine counts; None where it refuses the request."""
    try:
        return server.prompt_tokens(request)
    except Refused:
        return None


if __name__ == "__main__":
    main()
