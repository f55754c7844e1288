"""Which file on this machine belongs to a model that LM Studio lists: the right one, or none."""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st

from litellm_compaction.tokenizers import model_files
from litellm_compaction.tokenizers.model_files import (
    ModelFiles,
    holds_vocabulary,
    lmstudio_home,
    models_folder,
    plain_name,
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


def test_any_quantization_will_do(home: Path) -> None:
    """All quantizations of a repository have the same vocabulary."""
    put(home, *(f"p/Tiny-GGUF/Tiny-{mark}.gguf" for mark in ("Q8_0", "Q4_K_M", "BF16")))
    assert find(home, "tiny", quantization="Q8_0") == "p/Tiny-GGUF/Tiny-BF16.gguf"
    assert find(home, "tiny", variant="tiny@q2_k") == "p/Tiny-GGUF/Tiny-BF16.gguf"


def test_between_equal_names_the_publisher_decides_or_nobody(home: Path) -> None:
    """A fine-tune of the same name may have another vocabulary."""
    put(home, "first/Tiny-GGUF/Tiny-Q8_0.gguf", "second/Tiny-GGUF/Tiny-Q8_0.gguf")
    assert find(home, "tiny") is None
    assert find(home, "tiny", publisher="third") is None
    assert find(home, "tiny", publisher="Second") == "second/Tiny-GGUF/Tiny-Q8_0.gguf"
    assert find(home, "first/tiny") == "first/Tiny-GGUF/Tiny-Q8_0.gguf"


def test_the_format_tells_copies_apart(home: Path) -> None:
    """The same model may lie there for llama.cpp and for MLX."""
    put(home, "p/Tiny-GGUF/Tiny-Q8_0.gguf", "p/Tiny-MLX-4bit/tokenizer.json", "p/Tiny-MLX-4bit/model.safetensors")
    assert find(home, "tiny", publisher="p") is None
    assert find(home, "tiny", file_format="gguf") == "p/Tiny-GGUF/Tiny-Q8_0.gguf"
    assert find(home, "tiny", file_format="mlx") == "p/Tiny-MLX-4bit/tokenizer.json"


def test_a_folder_of_several_models_is_not_one_model(home: Path) -> None:
    """A repository's name says nothing of files that have names of their own."""
    put(home, "me/mixed/Llama-3.2-1B-Q8_0.gguf", "me/mixed/Qwen3-0.6B-Q8_0.gguf")
    assert find(home, "mixed") is None
    assert find(home, "me/mixed") is None
    assert find(home, "qwen3-0.6b") is None
    assert find(home, "qwen3-0.6b", quantization="Q8_0") == "me/mixed/Qwen3-0.6B-Q8_0.gguf"
    assert find(home, "qwen3-0.6b@q8_0") == "me/mixed/Qwen3-0.6B-Q8_0.gguf"


def test_a_tokenizer_json_needs_safetensors_beside_it(home: Path) -> None:
    """Without weights it may be anything."""
    put(home, "p/Tiny-MLX/tokenizer.json")
    assert find(home, "tiny") is None


def write_index(home: Path, *rows: object) -> None:
    index = home / ".internal" / "model-index-cache.json"
    index.parent.mkdir(exist_ok=True)
    index.write_text(json.dumps({"models": rows}))


def test_the_index_of_lm_studio_decides(home: Path) -> None:
    """It knows which download a virtual model stands for, and which of two equal names is meant."""
    put(home, "a/Tiny-GGUF/Tiny-Q8_0.gguf", "b/Tiny-GGUF/Tiny-Q8_0.gguf", "c/Tiny-MLX/tokenizer.json")
    put(home, "c/Tiny-MLX/model.safetensors")
    write_index(
        home,
        {"indexedModelIdentifier": "a/Tiny-GGUF/Tiny-Q8_0.gguf", "defaultIdentifier": "tiny"},
        {"indexedModelIdentifier": "c/Tiny-MLX", "defaultIdentifier": "tiny-mlx"},
        {
            "indexedModelIdentifier": "maker/small@b/Tiny-GGUF/Tiny-Q8_0.gguf",
            "defaultIdentifier": "maker/small@q8_0",
            "virtual": {
                "baseChain": ["maker/small", "b/Tiny-GGUF/Tiny-Q8_0.gguf"],
                "concreteModelIndexedModelIdentifier": "b/Tiny-GGUF/Tiny-Q8_0.gguf",
            },
        },
    )
    assert find(home, "tiny") == "a/Tiny-GGUF/Tiny-Q8_0.gguf"
    assert find(home, "tiny-mlx") == "c/Tiny-MLX/tokenizer.json"
    assert find(home, "maker/small") == "b/Tiny-GGUF/Tiny-Q8_0.gguf"
    assert find(home, "maker/small", variant="maker/small@q8_0") == "b/Tiny-GGUF/Tiny-Q8_0.gguf"


@pytest.mark.parametrize(
    "row",
    [
        3,
        {"defaultIdentifier": "tiny"},
        {"defaultIdentifier": ["tiny"], "indexedModelIdentifier": 3, "virtual": []},
        {"defaultIdentifier": "tiny", "indexedModelIdentifier": "../../outside.gguf"},
        {"defaultIdentifier": "tiny", "indexedModelIdentifier": "a/Gone-GGUF/Gone.gguf"},
        {"defaultIdentifier": "tiny", "virtual": {"baseChain": [[]], "concreteModelIndexedModelIdentifier": {}}},
    ],
)
def test_an_odd_index_says_nothing(home: Path, row: object) -> None:
    """LM Studio does not document it, so names decide where it cannot be understood."""
    put(home, "a/Tiny-GGUF/Tiny-Q8_0.gguf")
    write_index(home, row)
    assert find(home, "tiny") == "a/Tiny-GGUF/Tiny-Q8_0.gguf"


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


def test_changes_are_seen(home: Path) -> None:
    """A download that arrives is found, one that was deleted is not."""
    files = ModelFiles(home=home)
    tiny = WantedModel(key="tiny")
    assert files.find(tiny) is None
    put(home, "p/Tiny-GGUF/Tiny-Q8_0.gguf")
    found = files.find(tiny)
    assert found == home / "models" / "p/Tiny-GGUF/Tiny-Q8_0.gguf"
    found.unlink()
    assert files.find(tiny) is None


def test_a_huge_folder_is_read_in_part(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The setting may point at a whole disk."""
    put(home, *(f"p/Tiny{index}-GGUF/Tiny{index}-Q8_0.gguf" for index in range(30)))
    monkeypatch.setattr(model_files, "_MAX_ENTRIES", 10)
    files = ModelFiles(home=home)
    found = [files.find(WantedModel(key=f"tiny{index}")) for index in range(30)]
    assert sum(file is not None for file in found) == 10


def test_the_folder_is_where_lm_studio_says(tmp_path: Path) -> None:
    """Its pointer, its older place, its settings; an argument beats them."""
    assert lmstudio_home(tmp_path) == tmp_path / ".lmstudio"
    (tmp_path / ".cache" / "lm-studio" / "models").mkdir(parents=True)
    assert lmstudio_home(tmp_path) == tmp_path / ".cache" / "lm-studio"
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (tmp_path / ".lmstudio-home-pointer").write_text(f"{elsewhere}\n")
    assert lmstudio_home(tmp_path) == elsewhere
    assert models_folder(elsewhere) == elsewhere / "models"
    (elsewhere / "settings.json").write_text(json.dumps({"downloadsFolder": str(tmp_path / "disk")}))
    assert models_folder(elsewhere) == tmp_path / "disk"
    for odd in ("relative", "", 3, "/a\0b"):
        (elsewhere / "settings.json").write_text(json.dumps({"downloadsFolder": odd}))
        assert models_folder(elsewhere) == elsewhere / "models"
    put(elsewhere, "p/Tiny-GGUF/Tiny-Q8_0.gguf")
    assert ModelFiles(elsewhere / "models", home=tmp_path / "none").find(WantedModel(key="tiny")) is not None


def test_a_user_without_a_home_has_no_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in containers that run under a number."""

    def no_home() -> Path:
        raise RuntimeError("no home")

    monkeypatch.setattr(Path, "home", no_home)
    assert ModelFiles().find(WantedModel(key="tiny")) is None


def test_without_lm_studio_nothing_is_found(tmp_path: Path) -> None:
    """The proxy often runs on another machine."""
    assert ModelFiles(home=tmp_path / "absent").find(WantedModel(key="tiny")) is None
    assert ModelFiles(Path("a\0b"), home=tmp_path).find(WantedModel(key="tiny")) is None
    (tmp_path / "models").write_bytes(b"a file")
    assert ModelFiles(home=tmp_path).find(WantedModel(key="tiny")) is None


@pytest.mark.parametrize(
    ("name", "quantization", "plain"),
    [
        ("Qwen3-8B-Q4_K_M.gguf", "Q4_K_M", "qwen3-8b"),
        ("Qwen3-8B-Q4_K_M.gguf", "", "qwen3-8b-q4_k_m"),
        ("Seed-OSS-36B-UD-Q8_K_XL-00001-of-00002.gguf", "Q8_K_XL", "seed-oss-36b"),
        ("Model.i1-IQ2_XXS.gguf", "IQ2_XXS", "model"),
        ("gpt-oss-20b-MXFP4.gguf", "MXFP4", "gpt-oss-20b"),
        ("Qwen3.6-27B-MLX-8bit", "8bit", "qwen3.6-27b"),
        ("gemma-4-26B-A4B-it-QAT-GGUF", "Q4_0", "gemma-4-26b-a4b-it-qat"),
        ("Mistral-7B-Instruct-v0.3.fp16.gguf", "fp16", "mistral-7b-instruct-v0.3"),
        ("nomic-embed-text-v1.5", "", "nomic-embed-text-v1.5"),
    ],
)
def test_names_lose_format_and_quantization_only(name: str, quantization: str, plain: str) -> None:
    """Sizes, versions and variants stay."""
    assert plain_name(name, quantization) == plain


@pytest.mark.parametrize(
    ("name", "holds"),
    [
        ("a.gguf", True),
        ("a-00001-of-00003.gguf", True),
        ("a-00002-of-00003.gguf", False),
        ("mmproj-a-f16.gguf", False),
        ("a.mmproj-f16.gguf", False),
        ("mtp-a.gguf", False),
        ("a.safetensors", False),
    ],
)
def test_only_files_with_a_vocabulary_are_candidates(name: str, holds: bool) -> None:
    """Later parts and companions carry none."""
    assert holds_vocabulary(name) is holds


@given(
    paths=st.lists(
        st.sampled_from(
            [
                f"{publisher}/{name}/{file}"
                for publisher in "ab"
                for name in ("Tiny-GGUF", "tiny", "Tiny-1B", "tiny-q8_0")
                for file in ("Tiny-Q8_0.gguf", "tiny.gguf", "Other.gguf")
            ]
        ),
        max_size=6,
        unique=True,
    ),
    key=st.one_of(st.text(max_size=20), st.sampled_from(["tiny", "a/tiny", "tiny@q8_0", "b/Tiny-GGUF/tiny.gguf"])),
    publisher=st.sampled_from(["", "a", "b"]),
)
def test_what_is_chosen_is_one_of_the_files(paths: list[str], key: str, publisher: str) -> None:
    """For any key, the same one each time; two publishers of a model leave a doubt unless one is named."""
    with TemporaryDirectory() as folder:
        home = Path(folder)
        put(home, *paths)
        found = find(home, key, publisher=publisher)
        assert find(home, key, publisher=publisher) == found
        assert found is None or found in paths
