"""README.md and docs/ say what the code does: settings, options, files, commands; their links lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import click
import pytest
import yaml
from pydantic import BaseModel

from litellm_compaction.cli.app import program
from litellm_compaction.cli.config_file import read_config
from litellm_compaction.config import DeploymentSettings, Settings
from litellm_compaction.proxy.observers import _METRICS
from tests import clients_table
from tests.settings_table import table

_CONTEXT = click.Context(program)
ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "SECURITY.md", ROOT / "benchmarks" / "README.md", *sorted(DOCS.rglob("*.md"))]
PACKAGE = ROOT / "litellm_compaction"


def page(name: str) -> str:
    """The text of a page, by its path in the repository."""
    return (ROOT / name).read_text(encoding="utf-8")


def between(name: str, text: str) -> str:
    """What stands in a page between the markers `name:begin` and `name:end`."""
    found = re.search(rf"<!-- {name}:begin.*?-->\n(.*?)\n<!-- {name}:end -->", text, re.DOTALL)
    assert found is not None, name
    return found[1]


@pytest.mark.parametrize(("name", "settings"), [("settings", Settings), ("deployment", DeploymentSettings)])
def test_the_table_of_settings_is_the_codes(name: str, settings: type[BaseModel]) -> None:
    """Every key, default, unit and meaning; `python -m tests.settings_table` prints the right one."""
    assert between(name, page("docs/settings.md")) == table(settings)


def test_the_clients_are_those_of_connect() -> None:
    """Their prompts and windows; `python -m tests.clients_table` prints the right table."""
    assert between("clients", page("docs/clients.md")) == clients_table.table()


@pytest.mark.parametrize("name", ["README.md", "docs/start.md"])
def test_the_config_runs_and_is_the_shipped_one(name: str, tmp_path: Path) -> None:
    """The first example has nothing wrong; apart from comments it is config.yaml."""
    path = tmp_path / "config.yaml"
    shown = re.findall(r"```yaml\n(.*?)```", page(name), re.DOTALL)[0]
    path.write_text(shown, encoding="utf-8")
    assert [finding for finding in read_config(path).findings({}) if finding.level == "problem"] == []
    assert yaml.safe_load(shown) == yaml.safe_load((ROOT / "config.yaml").read_text(encoding="utf-8"))


def test_every_command_and_option_is_documented() -> None:
    """The table of the command line is complete and has nothing else."""
    for name in program.list_commands(_CONTEXT):
        command = program.get_command(_CONTEXT, name)
        [row] = [
            line for line in page("docs/start.md").splitlines() if line.startswith(f"| `litellm-compaction {name}")
        ]
        documented = set(re.findall(r"--[a-z-]+", row.split("` |")[0]))
        options = [option for each in command.params for option in each.opts]
        assert documented == {option for option in options if option.startswith("--")}, name


@pytest.mark.parametrize("path", PAGES[:3], ids=lambda path: path.name)
def test_linked_files_exist(path: Path) -> None:
    links = re.findall(r"\]\((?!https?://|#)([^)\s#]+)", path.read_text(encoding="utf-8"))
    assert [link for link in links if not (path.parent / link).is_file()] == []


def test_the_metrics_are_those_that_are_counted() -> None:
    """The table of metrics has each name once, and nothing else."""
    table = page("docs/metrics-and-logs.md").partition("| metric | labels |")[2].partition("\n\n")[0]
    named = re.findall(r"`(?:litellm_compaction|…)_([a-z_]+)`", table)
    assert sorted(named) == sorted(_METRICS)


@pytest.mark.parametrize("path", [*PAGES, ROOT / "NOTICE"], ids=lambda path: path.relative_to(ROOT).as_posix())
def test_paths_in_code_exist(path: Path) -> None:
    """A file or folder that a page names in code is there, from the repository's root or the package's."""
    text = path.read_text(encoding="utf-8")
    code = re.findall(r"^```\w*\n(.*?)^```|`([^`\n]+)`", text, re.DOTALL | re.MULTILINE)
    named = re.findall(r"(?<![\w/.:~@-])(?:[\w.-]+/)+[\w.-]*", "\n".join(map("".join, code)))
    folders = {each.name for place in (ROOT, PACKAGE) for each in place.iterdir() if each.is_dir()}
    mine = {name for name in named if name.split("/")[0] in folders and "FOLDER" not in name}
    assert sorted(name for name in mine if not any((place / name).exists() for place in (ROOT, PACKAGE))) == []


def test_every_line_that_warns_has_a_remedy() -> None:
    """Each event of the log, and each name with which a warning begins, stands in the page of troubles."""
    remedies = page("docs/troubleshooting.md")
    sources = "\n".join(path.read_text("utf-8") for path in PACKAGE.rglob("*.py"))
    names = set(re.findall(r"logger\.(?:warning|error)\(\s*f?\"([a-z]+(?:_[a-z]+)*)[ :]", sources))
    table = page("docs/metrics-and-logs.md").partition("| event | meaning |")[2].partition("\n\n")[0]
    for row in filter(None, table.splitlines()):
        names.update(re.findall(r"`([a-z_]+)`", row.split("|")[1]))
    names.discard("reason")
    assert sorted(name for name in names if name not in sources) == []
    assert len(names) > 35
    assert sorted(name for name in names if f"`{name}`" not in remedies) == []
