"""The deployment's files load and agree: what compose mounts, whom it names, and what the chart's pods run."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

from litellm_compaction import __version__

DEPLOY = Path(__file__).parents[1] / "deploy"


def test_compose_mounts_what_there_is() -> None:
    """Every file that a container gets lies in the folder, and Prometheus and the balancer name each proxy."""
    services = yaml.safe_load((DEPLOY / "compose.yaml").read_text(encoding="utf-8"))["services"]
    proxies = {name for name in services if name.startswith("proxy-")}
    mounted = [volume for service in services.values() for volume in service.get("volumes", ())]
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
