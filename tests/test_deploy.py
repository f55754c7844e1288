"""The deployment's files load, and know the metrics, the settings and the version that there are."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, get_args

import yaml
from litellm.types.integrations.prometheus import DEFINED_PROMETHEUS_METRICS

from litellm_compaction import __version__
from litellm_compaction.cli.config_file import read_config
from litellm_compaction.config import settings_from
from litellm_compaction.proxy.metrics import _KINDS

DEPLOY = Path(__file__).parents[1] / "deploy"
COMPOSE: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text(encoding="utf-8"))
DASHBOARD: dict[str, Any] = json.loads((DEPLOY / "grafana" / "dashboard.json").read_text(encoding="utf-8"))
ENVIRON = {
    "LITELLM_MASTER_KEY": "sk-of-a-test-0123456789abcdef",
    "PROXY_MASTER_KEY": "sk-of-a-test-0123456789abcdef",
    "LM_STUDIO_API_BASE": "http://127.0.0.1:1/v1",
    "REDIS_HOST": "redis",
    "REDIS_PORT": "6379",
    "REDIS_PASSWORD": "p",
}


def metrics_of(expression: str) -> set[str]:
    """The metrics that an expression asks for."""
    outside = re.sub(r'\{[^}]*\}|\[[^\]]*\]|by \([^)]*\)|"[^"]*"', " ", expression)
    known = {"sum", "rate", "increase", "histogram_quantile", "or", "vector", "label_values", "model", "le"}
    return set(re.findall(r"[a-z_]{2,}", outside)) - known


def test_the_dashboard_asks_for_what_there_is() -> None:
    """Every metric that this package has stands in it, and none that nobody has."""
    queries = [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]
    queries += [variable["query"]["query"] for variable in DASHBOARD["templating"]["list"]]
    asked = set().union(*map(metrics_of, queries))
    own: dict[str, str] = {}
    for name, kind in _KINDS.items():
        suffixes = ("_bucket", "_sum", "_count") if kind.buckets else ("",)
        own |= {f"litellm_compaction_{name}{suffix}": name for suffix in suffixes}
    litellms = {f"{name}{suffix}" for name in get_args(DEFINED_PROMETHEUS_METRICS) for suffix in ("_total", "_bucket")}
    assert asked <= own.keys() | litellms | {"up"}
    assert {own[name] for name in asked if name in own} == set(_KINDS)


def test_the_proxies_configuration_is_whole() -> None:
    """Doctor finds nothing in it with compose's variables, and the store is the proxy's own Redis."""
    file = read_config(DEPLOY / "config.yaml")
    assert list(file.findings(ENVIRON)) == []
    assert settings_from(file.settings).with_store(ENVIRON).store == "redis"
    environment = COMPOSE["services"]["proxy-1"]["environment"]
    assert set(environment) == set(ENVIRON) - {"PROXY_MASTER_KEY"}
    assert environment["REDIS_HOST"] in COMPOSE["services"]


def test_compose_mounts_what_there_is() -> None:
    """Every file that a container gets lies in the folder, and Prometheus and the balancer name each proxy."""
    proxies = {name for name in COMPOSE["services"] if name.startswith("proxy-")}
    mounted = [volume for service in COMPOSE["services"].values() for volume in service.get("volumes", ())]
    for path in (volume.partition(":")[0] for volume in mounted if volume.startswith(".")):
        assert (DEPLOY / path).is_file(), path
    [job] = yaml.safe_load((DEPLOY / "prometheus.yml").read_text(encoding="utf-8"))["scrape_configs"]
    assert set(job["static_configs"][0]["targets"]) == {f"{name}:4000" for name in proxies}
    assert set(re.findall(r"server (proxy-\d)", (DEPLOY / "nginx.conf").read_text(encoding="utf-8"))) == proxies


def test_the_pods_run_what_compose_runs() -> None:
    """The chart's values have the same configuration, but for the key's name, and this version's image."""
    values = yaml.safe_load((DEPLOY / "helm-values.yaml").read_text(encoding="utf-8"))
    expected = yaml.safe_load((DEPLOY / "config.yaml").read_text(encoding="utf-8"))
    assert values["proxy_config"]["general_settings"].pop("master_key") == "os.environ/PROXY_MASTER_KEY"
    assert values["proxy_config"] == expected
    assert values["image"]["tag"] == __version__
