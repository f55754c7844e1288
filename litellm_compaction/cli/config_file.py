"""A LiteLLM config file with its includes, read without LiteLLM.

Values stay as written; `os.environ/NAME` is resolved when a value is used.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from litellm_compaction.errors import ConfigError
from litellm_compaction.places import ENVIRONMENT_PREFIX
from litellm_compaction.proxy.client import mapping
from litellm_compaction.proxy.config_check import API_BASE_VARIABLE, SECTION, Finding, check_config, entries_of, problem


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigFile:
    """A config file with its includes merged in."""

    path: Path
    # It may hold keys, so it is never printed.
    data: Mapping[str, Any] = field(repr=False)

    def section(self, name: str) -> Mapping[str, Any]:
        return mapping(self.data.get(name))

    @property
    def settings(self) -> object:
        """`callback_settings.litellm_compaction`, valid or not."""
        return self.section("callback_settings").get(SECTION)

    @property
    def deployments(self) -> Sequence[Mapping[str, Any]]:
        return entries_of(self.data)

    @property
    def models_by_environment(self) -> Sequence[str]:
        """The models of the deployments whose address is `LM_STUDIO_API_BASE`, without their provider's prefix."""
        models = []
        for entry in self.deployments:
            params = mapping(entry.get("litellm_params"))
            provider, _, model = str(params.get("model", "")).partition("/")
            address = params.get("api_base") or (API_BASE_VARIABLE if provider == "lm_studio" else "")
            if str(address).removeprefix(ENVIRONMENT_PREFIX) == API_BASE_VARIABLE:
                models.append(model)
        return models

    def findings(self, environ: Mapping[str, str]) -> Iterator[Finding]:
        yield from check_config(self.data, environ)
        shadow = self.path.parent / f"{SECTION}.py"
        if shadow.is_file():
            yield problem(str(shadow), "LiteLLM loads this file instead of the installed package: rename it.")


def shipped_config() -> Path:
    """The config.yaml that comes with the package: in it when installed, beside it in a checkout."""
    package = Path(__file__).resolve().parents[1]
    installed = package / "config.yaml"
    return installed if installed.is_file() else package.parent / "config.yaml"


def read_config(path: Path) -> ConfigFile:
    """Reads a config file with its includes.

    Raises:
        ConfigError: it cannot be read, is not YAML, or is not a LiteLLM config.
    """
    path = path.expanduser().absolute()
    merged: dict[str, Any] = {}
    files = [path]
    # Grows by what each one includes.
    for file in files:
        more = _read(file)
        names = more.get("include")
        included = [(file.parent / str(name)).absolute() for name in (names if isinstance(names, list) else ())]
        files += [each for each in included if each not in files]
        # As LiteLLM does it: lists grow, everything else is replaced whole.
        for key, value in more.items():
            known = merged.get(key)
            merged[key] = known + value if isinstance(known, list) and isinstance(value, list) else value
    return ConfigFile(path=path, data=merged)


def _read(path: Path) -> dict[str, Any]:
    try:
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as exc:
        raise ConfigError(f"{path} cannot be read ({exc.strerror or exc})") from exc
    except (ValueError, yaml.YAMLError) as exc:
        mark = getattr(exc, "problem_mark", None)
        where = f" in line {mark.line + 1}" if mark is not None else ""
        what = getattr(exc, "problem", None) or "it is not UTF-8 text"
        raise ConfigError(f"{path} is not valid YAML{where}: {what}") from exc
    if not isinstance(document, dict):
        raise ConfigError(f"{path} is not a LiteLLM config: it must be a mapping with `model_list`")
    return document
