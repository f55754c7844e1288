"""The deployment's files fit together: compose, balancer, Prometheus and the dashboard."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, get_args

import yaml
from litellm.types.integrations.prometheus import DEFINED_PROMETHEUS_METRICS

from litellm_compaction.cli.config_file import read_config
from litellm_compaction.config import settings_from
from litellm_compaction.proxy.metrics import _KINDS

DEPLOY = Path(__file__).parents[1] / "deploy"
COMPOSE: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text(encoding="utf-8"))
DASHBOARD: dict[str, Any] = json.loads((DEPLOY / "grafana" / "dashboard.json").read_text(encoding="utf-8"))
PROXIES = [name for name, service in COMPOSE["services"].items() if service.get("image") == "litellm-compaction"]
ENVIRON = {
    "LITELLM_MASTER_KEY": "sk-of-a-test-0123456789abcdef",
    "PROXY_MASTER_KEY": "sk-of-a-test-0123456789abcdef",
    "LM_STUDIO_API_BASE": "http://127.0.0.1:1/v1",
    "REDIS_HOST": "redis",
    "REDIS_PORT": "6379",
    "REDIS_PASSWORD": "p",
}


def test_only_the_balancer_is_open() -> None:
    """Proxies, Redis and Prometheus are reached inside the network alone; metrics not through the balancer."""
    opened = {name: service["ports"] for name, service in COMPOSE["services"].items() if "ports" in service}
    assert opened == {"balancer": ["4000:4000"], "grafana": ["127.0.0.1:3000:3000"]}
    nginx = (DEPLOY / "nginx.conf").read_text(encoding="utf-8")
    assert re.search(r"location /metrics \{\s*return 404;", nginx)
    assert re.findall(r"^ +server (\S+):4000 resolve;", nginx, re.MULTILINE) == PROXIES == ["proxy-1", "proxy-2"]
    assert nginx.count("{") == nginx.count("}")
    # It finds a proxy that was made anew, and waits for both at the start.
    assert re.search(r"^ +resolver 127\.0\.0\.11 ", nginx, re.MULTILINE)
    assert re.search(r"^ +zone proxies ", nginx, re.MULTILINE)
    waits = COMPOSE["services"]["balancer"]["depends_on"]
    assert waits == {name: {"condition": "service_healthy"} for name in PROXIES}
    assert "proxy_buffering off;" in nginx


def test_prometheus_asks_all_proxies() -> None:
    """And Grafana asks it, under the name that the dashboard has for it."""
    [job] = yaml.safe_load((DEPLOY / "prometheus.yml").read_text(encoding="utf-8"))["scrape_configs"]
    assert job["static_configs"] == [{"targets": [f"{name}:4000" for name in PROXIES]}]
    [source] = yaml.safe_load((DEPLOY / "grafana" / "datasource.yaml").read_text(encoding="utf-8"))["datasources"]
    assert source["url"].partition("://")[2].partition(":")[0] in COMPOSE["services"]
    assert {panel["datasource"]["uid"] for panel in DASHBOARD["panels"]} == {source["uid"]}
    [provider] = yaml.safe_load((DEPLOY / "grafana" / "dashboards.yaml").read_text(encoding="utf-8"))["providers"]
    mounted = [volume.split(":")[1] for volume in COMPOSE["services"]["grafana"]["volumes"]]
    assert f"{provider['options']['path']}/dashboard.json" in mounted


def metrics_of(expression: str) -> set[str]:
    """The metrics that an expression asks for."""
    outside = re.sub(r'\{[^}]*\}|\[[^\]]*\]|by \([^)]*\)|"[^"]*"', " ", expression)
    known = {"sum", "rate", "increase", "histogram_quantile", "or", "vector", "label_values", "model", "le"}
    return set(re.findall(r"[a-z_]{2,}", outside)) - known


def test_the_dashboard_asks_for_what_there_is() -> None:
    """Every metric that this package has stands in it, and none that nobody has; each panel has its own place."""
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
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in DASHBOARD["panels"]]
    assert len(set(places)) == len(places)
    assert all(panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24 for panel in DASHBOARD["panels"])


def test_the_proxies_configuration_is_whole() -> None:
    """Doctor finds nothing in it with compose's variables, and the store is the proxy's own Redis."""
    file = read_config(DEPLOY / "config.yaml")
    assert list(file.findings(ENVIRON)) == []
    assert settings_from(file.settings).with_store(ENVIRON).store == "redis"
    environment = COMPOSE["services"]["proxy-1"]["environment"]
    assert set(environment) == set(ENVIRON) - {"PROXY_MASTER_KEY"}
    assert environment["REDIS_HOST"] in COMPOSE["services"]
