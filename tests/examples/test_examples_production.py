"""The deployment files of examples/production, each checked by the tool that reads it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.waiting import PROCESS

from nsq_fast.config import WorkerConfig
from nsq_fast.worker.settings import Settings, SettingsReader, Subscription

ROOT = Path(__file__).parent.parent.parent
FOLDER = ROOT / "examples" / "production"
MARGIN = 10
"""Seconds beyond drain_timeout that docs/production.md tells to wait before a worker is killed."""


def documents(name: str) -> list[Any]:
    return list(yaml.safe_load_all((FOLDER / name).read_text()))


def settings_of(text: str, tmp_path: Path) -> Settings:
    (tmp_path / "worker.toml").write_text(text)
    return SettingsReader().read(str(tmp_path / "worker.toml"), {}, ())


@pytest.fixture
def deployment() -> Any:
    (found,) = (each for each in documents("kubernetes.yaml") if each["kind"] == "Deployment")
    return found


@pytest.mark.slow
def test_the_program_and_its_file_pass_the_check() -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "NSQ_FAST_CONFIG": str(FOLDER / "worker.toml")}
    command = [sys.executable, "-m", "nsq_fast", "run", "app", "--check"]
    checked = subprocess.run(
        command, cwd=FOLDER, env=environment, capture_output=True, text=True, timeout=PROCESS, check=False
    )
    assert (checked.returncode, checked.stdout) == (0, "orders/billing: asyncio\n"), checked.stderr


def test_the_special_part_of_the_file_is_that_of_the_subscription() -> None:
    settings = SettingsReader().read(str(FOLDER / "worker.toml"), {}, ())
    assert settings.options_of(Subscription("orders", "billing", print))["concurrency"] == 16


def test_kubernetes_takes_the_manifests() -> None:
    validator = pytest.importorskip("kubernetes_validate")
    for each in documents("kubernetes.yaml"):
        validator.validate(each, "1.30", strict=True)


def test_the_pod_asks_what_the_worker_answers(deployment: Any, tmp_path: Path) -> None:
    config_map = documents("kubernetes.yaml")[0]
    worker = settings_of(config_map["data"]["worker.toml"], tmp_path).worker
    pod = deployment["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert worker.http == f":{container['ports'][0]['containerPort']}"
    probes = [container[name]["httpGet"]["path"] for name in ("livenessProbe", "readinessProbe")]
    assert probes == ["/healthz", "/readyz"]
    assert pod["terminationGracePeriodSeconds"] >= worker.drain_timeout + MARGIN
    names = {each["name"].removeprefix("NSQ_FAST_").lower() for each in container["env"]}
    assert names <= WorkerConfig.names() | {"config"}


def test_keda_scales_the_deployment_by_its_channel(deployment: Any) -> None:
    (scaled,) = documents("keda.yaml")
    assert scaled["spec"]["scaleTargetRef"]["name"] == deployment["metadata"]["name"]
    (trigger,) = scaled["spec"]["triggers"]
    # keda.sh/docs/2.19/scalers/nsq: all values are strings
    known = {"nsqLookupdHTTPAddresses", "topic", "channel", "depthThreshold", "activationDepthThreshold"}
    assert trigger["type"] == "nsq"
    assert set(trigger["metadata"]) == known
    assert all(isinstance(value, str) for value in trigger["metadata"].values())
    assert '@subscribe("{topic}", "{channel}"'.format(**trigger["metadata"]) in (FOLDER / "app.py").read_text()


def test_docker_compose_takes_its_file() -> None:
    command = compose()
    if command is None:
        pytest.skip("neither docker compose nor docker-compose is installed")
    checked = subprocess.run(
        [*command, "-f", str(FOLDER / "compose.yaml"), "config", "--quiet"],
        capture_output=True, text=True, timeout=PROCESS, check=False,
    )  # fmt: skip
    assert checked.returncode == 0, checked.stderr


def compose() -> list[str] | None:
    """The command, in one of its two forms; it needs no daemon to check a file."""
    for command in (["docker", "compose"], ["docker-compose"]):
        if shutil.which(command[0]):
            asked = subprocess.run([*command, "version"], capture_output=True, timeout=PROCESS, check=False)
            if asked.returncode == 0:
                return command
    return None


def test_the_containers_have_time_to_drain() -> None:
    worker = SettingsReader().read(str(FOLDER / "worker.toml"), {}, ()).worker
    (services,) = documents("compose.yaml")
    assert int(services["services"]["worker"]["stop_grace_period"].removesuffix("s")) >= worker.drain_timeout + MARGIN
    unit = (FOLDER / "nsq-fast-worker.service").read_text()
    found = re.search(r"^TimeoutStopSec=(\d+)$", unit, re.M)
    assert found
    assert int(found[1]) >= worker.drain_timeout + MARGIN


def test_the_image_has_what_it_copies_and_opens_the_port() -> None:
    text = (FOLDER / "Dockerfile").read_text()
    copied = re.search(r"^COPY (.*) \./$", text, re.M)
    assert copied
    assert [name for name in copied[1].split() if not (FOLDER / name).is_file()] == []
    worker = SettingsReader().read(str(FOLDER / "worker.toml"), {}, ()).worker
    port = (worker.http or "").removeprefix(":")
    assert f"EXPOSE {port}\n" in text
    assert f":{port}/healthz" in text


def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed")
    unit = (FOLDER / "nsq-fast-worker.service").read_text()
    assert "ExecStart=/opt/worker/venv/bin/nsq-fast run app " in unit
    path = tmp_path / "nsq-fast-worker.service"
    path.write_text(unit.replace("/opt/worker/venv/bin/nsq-fast", sys.executable))  # it wants a program that is there
    checked = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(path)],
        capture_output=True,
        text=True,
        timeout=PROCESS,
        check=False,
    )
    assert checked.returncode == 0, checked.stderr
    assert path.name not in checked.stderr
