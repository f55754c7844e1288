"""README.md says what the code does: settings, options, files, commands."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import pytest
import yaml
from pydantic import BaseModel

from litellm_compaction.cli.app import parser
from litellm_compaction.cli.config_file import read_config
from litellm_compaction.cli.findings import config_findings
from litellm_compaction.config import PLACEHOLDERS, DeploymentSettings, Settings
from tests.cli.readme_table import table

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def between(name: str) -> str:
    """What stands between the markers `name:begin` and `name:end`."""
    found = re.search(rf"<!-- {name}:begin.*?-->\n(.*?)\n<!-- {name}:end -->", README, re.DOTALL)
    assert found is not None, name
    return found[1]


@pytest.mark.parametrize(("name", "settings"), [("settings", Settings), ("deployment", DeploymentSettings)])
def test_the_table_of_settings_is_the_codes(name: str, settings: type[BaseModel]) -> None:
    """Every key, default, unit and meaning; `python -m tests.cli.readme_table` prints the right one."""
    assert between(name) == table(settings)


def test_the_config_runs(tmp_path: Path) -> None:
    """The example in the README has nothing wrong."""
    found = re.search(r"```yaml\n(.*?)```", README, re.DOTALL)
    assert found is not None
    path = tmp_path / "config.yaml"
    path.write_text(found[1], encoding="utf-8")
    assert [finding for finding in config_findings(read_config(path), {}) if finding.level == "problem"] == []


def test_the_config_is_the_shipped_one() -> None:
    """Apart from comments."""
    found = re.search(r"```yaml\n(.*?)```", README, re.DOTALL)
    assert found is not None
    shown = yaml.safe_load(found[1])
    assert shown == yaml.safe_load((ROOT / "config.yaml").read_text(encoding="utf-8"))


def test_the_two_commands_are_one_line_each() -> None:
    """Both do all the set-up with Python and pip alone."""
    start, test = (
        line.removeprefix("python3 -m venv .venv && ").split(" && ")
        for line in re.findall(r"^python3 -m venv .*$", README, re.MULTILINE)
    )
    assert start == [".venv/bin/python tools/install.py", ".venv/bin/litellm-compaction up"]
    assert test == [".venv/bin/python tools/install.py --tests", ".venv/bin/python -m pytest -n 2 --dist loadfile"]


def test_ci_runs_the_tests_of_the_readme() -> None:
    """The same install and the same command, in a fresh environment."""
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert "tools/install.py --tests" in script
    assert '/bin/python" -m pytest -n 2 --dist loadfile' in script


def test_every_command_and_option_is_documented() -> None:
    """The table of the command line is complete and has nothing else."""
    [commands] = [action for action in parser()._actions if isinstance(action, argparse._SubParsersAction)]
    for name, command in commands.choices.items():
        [row] = [line for line in README.splitlines() if line.startswith(f"| `litellm-compaction {name}")]
        documented = set(re.findall(r"--[a-z-]+", row.split("` |")[0]))
        assert documented == options_of(command) - {"--help"}, name


def options_of(command: argparse.ArgumentParser) -> set[str]:
    """Those of its actions too."""
    known = {option for action in command._actions for option in action.option_strings if option.startswith("--")}
    nested = [action for action in command._actions if isinstance(action, argparse._SubParsersAction)]
    return known.union(*(options_of(each) for action in nested for each in action.choices.values()))


def test_linked_files_exist() -> None:
    """Relative links lead somewhere."""
    for target in re.findall(r"\]\((?!https?://|#)([^)#]+)", README):
        assert (ROOT / target).exists(), target


def test_the_recorded_demo_has_no_truncation() -> None:
    """What is shown was a run that went well."""
    assert " 0 truncations by the server" in between("demo")


def test_every_placeholder_of_a_prompt_is_documented() -> None:
    """With the strategies that have it, and where it is required."""
    for name in {name for each in PLACEHOLDERS.values() for names in each for name in names}:
        [row] = [line for line in README.splitlines() if line.startswith(f"| `{{{name}}}` |")]
        having = [strategy for strategy, each in PLACEHOLDERS.items() if name in (*each.required, *each.optional)]
        assert ("| all" in row) == (having == list(PLACEHOLDERS)), name
        assert all(f"`{strategy}`" in row for strategy in having) or "| all" in row, name
        assert ("(required)" in row) == any(name in each.required for each in PLACEHOLDERS.values()), name
