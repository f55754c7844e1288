"""What a LiteLLM config file says that concerns this package, read without LiteLLM.

Called by `up` and `doctor`. Values stay as written; `os.environ/NAME` is resolved where a value is used.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import yaml

from litellm_compaction.errors import ConfigError

API_BASE_VARIABLE = "LM_STUDIO_API_BASE"
ENVIRONMENT_PREFIX = "os.environ/"
_MAX_INCLUDES = 20

Section: TypeAlias = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigFile:
    """A config file with its includes merged in.

    Attributes:
        data: the YAML document; may hold keys, so it is never printed.
    """

    path: Path
    data: Section = field(repr=False)

    def section(self, *names: str) -> Section:
        """The mapping under `names`; empty where there is none."""
        found: object = self.data
        for name in names:
            found = found.get(name) if isinstance(found, Mapping) else None
        return found if isinstance(found, Mapping) else {}

    @property
    def settings(self) -> object:
        """What stands under `callback_settings.litellm_compaction`, valid or not."""
        return self.section("callback_settings").get("litellm_compaction")

    @property
    def deployments(self) -> tuple[Section, ...]:
        """The entries of `model_list` that are mappings."""
        entries = self.data.get("model_list")
        return tuple(entry for entry in entries if isinstance(entry, Mapping)) if isinstance(entries, list) else ()

    @property
    def follows_environment(self) -> bool:
        """Whether `LM_STUDIO_API_BASE` decides where some deployment is."""
        return any(_follows_environment(entry) for entry in self.deployments)

    def variables(self) -> tuple[tuple[str, str], ...]:
        """Every `os.environ/NAME` value: (place in the file, NAME)."""
        return tuple(_variables(self.data, ""))


def shipped_config() -> Path:
    """The config.yaml that comes with the package.

    Raises:
        ConfigError: it is missing: the installation is damaged.
    """
    package = Path(__file__).resolve().parents[1]
    # In the package when installed, beside it in a checkout.
    for path in (package / "config.yaml", package.parent / "config.yaml"):
        if path.is_file():
            return path
    raise ConfigError(f"The shipped config.yaml is missing from {package}. Reinstall litellm-compaction.")


def read_config(path: Path) -> ConfigFile:
    """The config file at `path`.

    Raises:
        ConfigError: it cannot be read, is not YAML, or is not a LiteLLM config.
    """
    path = path.expanduser().absolute()
    data = _read(path)
    pending = list(_includes(data, path))
    merged: dict[str, Any] = dict(data)
    seen = {path}
    while pending:
        included = pending.pop(0)
        if included in seen:
            continue
        seen.add(included)
        if len(seen) > _MAX_INCLUDES:
            raise ConfigError(f"{path} includes more than {_MAX_INCLUDES} files")
        more = _read(included)
        pending += _includes(more, included)
        _merge(merged, more)
    return ConfigFile(path=path, data=merged)


def _read(path: Path) -> dict[str, Any]:
    try:
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as exc:
        raise ConfigError(f"{path} cannot be read ({exc.strerror or exc})") from exc
    except UnicodeDecodeError as exc:
        raise ConfigError(f"{path} is not UTF-8 text") from exc
    except yaml.YAMLError as exc:
        mark = getattr(exc, "problem_mark", None)
        where = f" in line {mark.line + 1}" if mark is not None else ""
        raise ConfigError(
            f"{path} is not valid YAML{where}: {getattr(exc, 'problem', None) or 'syntax error'}"
        ) from exc
    if not isinstance(document, dict):
        raise ConfigError(f"{path} is not a LiteLLM config: it must be a mapping with `model_list`")
    return document


def _includes(data: Section, declared_in: Path) -> Iterator[Path]:
    names = data.get("include")
    for name in names if isinstance(names, list) else ():
        if isinstance(name, str):
            yield (declared_in.parent / name).absolute()


def _merge(merged: dict[str, Any], more: Section) -> None:
    # As LiteLLM does it (config_includes.py, 1.106.2): lists grow, everything else is replaced whole.
    for key, value in more.items():
        known = merged.get(key)
        if isinstance(known, list) and isinstance(value, list):
            merged[key] = known + value
        elif key != "include":
            merged[key] = value


def _follows_environment(entry: Section) -> bool:
    params = entry.get("litellm_params")
    if not isinstance(params, Mapping):
        return False
    api_base = params.get("api_base")
    if api_base is None:
        return str(params.get("model", "")).startswith("lm_studio/")
    return isinstance(api_base, str) and api_base == f"{ENVIRONMENT_PREFIX}{API_BASE_VARIABLE}"


def _variables(value: object, place: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, str) and value.startswith(ENVIRONMENT_PREFIX):
        yield place, value.removeprefix(ENVIRONMENT_PREFIX)
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _variables(inner, f"{place}.{key}" if place else str(key))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from _variables(inner, f"{place}[{index}]")
