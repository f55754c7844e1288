"""Which file on this machine belongs to a model that LM Studio lists: the right one, or none."""

from __future__ import annotations

from pathlib import Path

import pytest

from litellm_compaction.tokenizers.model_files import (
    ModelFiles,
)
from litellm_compaction.windows.lmstudio import WantedModel

COMMUNITY = "lmstudio-community"


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / ".lmstudio" / "models").mkdir(parents=True)
    return tmp_path / ".lmstudio"


def put(home: Path, *paths: str) -> None:
    """Empty files in the models folder."""
    for path in paths:
        file = home / "models" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(b"")


def find(home: Path, key: str, **more: str) -> str | None:
    """What is found, as a path inside the models folder."""
    found = ModelFiles(home=home).find(WantedModel(key=key, **more))  # type: ignore[arg-type]
    return str(found.relative_to(home / "models")) if found is not None else None


GEMMA = f"{COMMUNITY}/gemma-3-4b-it-GGUF/gemma-3-4b-it-Q4_K_M.gguf"


@pytest.mark.parametrize(
    ("key", "path"),
    [
        ("gemma-3-4b-it", GEMMA),
        ("google/gemma-3-4b-it", GEMMA),
        ("gemma-3-4b-it@q4_k_m", GEMMA),
        ("lmstudio-community/gemma-3-4b-it-gguf", GEMMA),
        (GEMMA, GEMMA),
        (GEMMA.lower(), GEMMA),
        ("qwen2.5-7b-instruct-1m", "Qwen/Qwen2.5-7B-Instruct-1M-GGUF/qwen2.5-7b-instruct-1m-q8_0.gguf"),
        ("gpt-oss-120b", f"{COMMUNITY}/gpt-oss-120b-GGUF/gpt-oss-120b-MXFP4-00001-of-00002.gguf"),
        ("seed-oss-36b", "unsloth/Seed-OSS-36B-GGUF/UD-Q8_K_XL/Seed-OSS-36B-UD-Q8_K_XL-00001-of-00002.gguf"),
        ("devstral-small-2507-mlx", "mlx-community/Devstral-Small-2507-MLX-4bit/tokenizer.json"),
        ("gemma-3-4b", None),
        ("gemma-3-12b-it", None),
        ("absent", None),
        ("", None),
    ],
)
def test_a_model_is_found_by_its_key(home: Path, key: str, path: str | None) -> None:
    """In every form in which LM Studio writes keys; another size or variant of a family never is the model."""
    put(
        home,
        GEMMA,
        f"{COMMUNITY}/gemma-3-4b-it-GGUF/mmproj-model-f16.gguf",
        "Qwen/Qwen2.5-7B-Instruct-1M-GGUF/qwen2.5-7b-instruct-1m-q8_0.gguf",
        f"{COMMUNITY}/gpt-oss-120b-GGUF/gpt-oss-120b-MXFP4-00001-of-00002.gguf",
        f"{COMMUNITY}/gpt-oss-120b-GGUF/gpt-oss-120b-MXFP4-00002-of-00002.gguf",
        "unsloth/Seed-OSS-36B-GGUF/UD-Q8_K_XL/Seed-OSS-36B-UD-Q8_K_XL-00001-of-00002.gguf",
        "mlx-community/Devstral-Small-2507-MLX-4bit/tokenizer.json",
        "mlx-community/Devstral-Small-2507-MLX-4bit/config.json",
        "mlx-community/Devstral-Small-2507-MLX-4bit/model-00001-of-00003.safetensors",
    )
    assert find(home, key) == path


def test_links_out_of_the_folder_are_not_followed(home: Path, tmp_path: Path) -> None:
    """Links inside it are; nothing elsewhere on the machine can be reached by naming it."""
    outside = tmp_path / "outside" / "Secret-GGUF"
    outside.mkdir(parents=True)
    (outside / "Secret-Q8_0.gguf").write_bytes(b"")
    put(home, "p/Tiny-GGUF/Tiny-Q8_0.gguf")
    models = home / "models"
    (models / "q").symlink_to(tmp_path / "outside")
    (models / "p" / "Secret-GGUF").symlink_to(outside)
    (models / "p" / "Tiny-GGUF" / "Secret-Q8_0.gguf").symlink_to(outside / "Secret-Q8_0.gguf")
    (models / "p" / "loop").symlink_to(models / "p" / "loop")
    (models / "p" / "Same-GGUF").symlink_to(models / "p" / "Tiny-GGUF")
    assert find(home, "secret") is None
    assert find(home, "p/secret-gguf") is None
    assert find(home, "p/Same-GGUF") == "p/Same-GGUF/Tiny-Q8_0.gguf"
