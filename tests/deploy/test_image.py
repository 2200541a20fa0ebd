"""The image file and the compose file: as linted, as built, and as run."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvservice import __version__
from kvservice.clock import SystemClock
from kvservice.cluster.processes import wait_until
from tests.deploy.charts import TOOLS, render
from tests.deploy.pods import Network
from tests.programs import ROOT, needs

pytestmark = pytest.mark.deploy

DOCKERFILE = ROOT / "deploy" / "Dockerfile"
COMPOSE = ROOT / "deploy" / "compose.yaml"


def test_hadolint_finds_nothing() -> None:
    """What it is told to ignore is said in the file, with why."""
    done = subprocess.run(
        [str(TOOLS / "hadolint"), "--failure-threshold", "info", str(DOCKERFILE)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout


def test_everything_that_is_copied_is_let_through() -> None:
    """.dockerignore keeps the rest of the repository out of the image's reach."""
    kept = {
        line.removeprefix("!")
        for line in (ROOT / ".dockerignore").read_text().splitlines()
        if line.startswith("!")
    }
    copied = set()
    for line in re.findall(r"^COPY (?!--from)(.+)$", DOCKERFILE.read_text(), re.MULTILINE):
        copied.update(line.split()[:-1])
    assert copied == kept
    assert all((ROOT / path).exists() for path in copied)


def test_versions_agree() -> None:
    """The chart's, the compose file's and the package's."""
    chart = yaml.safe_load((ROOT / "deploy/helm/kvservice/Chart.yaml").read_text())
    assert chart["appVersion"] == __version__
    values = yaml.safe_load((ROOT / "deploy/helm/kvservice/values.yaml").read_text())
    assert values["image"]["tag"] == f"{__version__}-cpu"
    assert values["gpuImage"]["tag"] == f"{__version__}-gpu"
    images = {service["image"] for service in services().values()}
    assert images == {f"{values['image']['repository']}:{__version__}-cpu"}


def services() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(COMPOSE.read_text())["services"]
    return found


def test_compose_services_are_confined() -> None:
    """As the pods are: no capabilities, a read-only root, a limit that the budget is a share of."""
    for name, service in services().items():
        assert service["read_only"] is True, name
        assert service["cap_drop"] == ["ALL"], name
        assert "no-new-privileges:true" in service["security_opt"], name
        assert service["mem_limit"], name
        assert "privileged" not in service, name
        assert not any("0.0.0.0" in argument for argument in service["command"]), name


@pytest.mark.slow
@needs("ip", "unshare", "nsenter", "setpriv")
def test_compose_commands_make_a_service(tmp_path: Path) -> None:
    """All in one network, as the file says; the health check passes when all workers are there."""
    mounts = [
        {"name": "tmp", "mountPath": "/tmp"},
        {"name": "home", "mountPath": "/home/kvservice"},
    ]
    spec = {
        "containers": [
            {"name": name, "command": service["command"], "volumeMounts": mounts, "env": []}
            for name, service in services().items()
        ]
    }
    with Network(tmp_path / "network") as network:
        pod = network.pod("laptop", spec)
        for name in services():
            pod.run_container(name)
        (check,) = [s["healthcheck"]["test"] for s in services().values() if "healthcheck" in s]
        assert check[0] == "CMD"
        env = pod.environment(spec["containers"][0])
        assert wait_until(
            lambda: pod.exec(check[1:], env).returncode == 0, clock=SystemClock(), timeout_s=60
        ), [pod.containers[name].log() for name in services()]
        done = pod.exec(["kvservice", "workers", "--address=127.0.0.1:50051"], env)
        assert "worker-0" in done.stdout
        assert "worker-1" in done.stdout


# The image for real, without an engine: a base system, buildah, and chroot.

PYTHON_IMAGE = "localhost/python:3"


class Builder:
    """buildah with a store of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "storage.conf").write_text(
            '[storage]\ndriver = "overlay"\n'
            f'runroot = "{folder}/run"\ngraphroot = "{folder}/graph"\n'
        )
        self.env = os.environ | {
            "BUILDAH_ISOLATION": "chroot",
            "CONTAINERS_STORAGE_CONF": str(folder / "storage.conf"),
        }

    def __call__(self, *arguments: str, timeout_s: float = 3000.0) -> str:
        done = subprocess.run(
            ["buildah", *arguments],
            env=self.env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            timeout=timeout_s,
        )
        assert done.returncode == 0, done.stdout[-8000:]
        return done.stdout.strip()

    def run(self, container: str, *command: str) -> str:
        """Run a command as the image's own user, with nothing of this machine mounted."""
        return self("run", container, "--", *command, timeout_s=600)


def pip_settings(folder: Path) -> list[str]:
    """Return volumes that give a build the package sources that pip has on this machine."""
    listed = subprocess.run(
        ["python3", "-m", "pip", "config", "list"], capture_output=True, text=True, check=True
    ).stdout
    settings: dict[str, str] = {}
    for line in listed.splitlines():
        name, _, value = line.partition("=")
        settings[name.rpartition(".")[2]] = value.strip("'")
    kept = {
        name: settings[name]
        for name in ("index-url", "extra-index-url", "find-links", "cert")
        if name in settings
    }
    (folder / "pip.conf").write_text(
        "[global]\n" + "".join(f"{name} = {value}\n" for name, value in kept.items())
    )
    volumes = [f"{folder}/pip.conf:/etc/pip.conf:ro", "/etc/ssl/certs:/etc/ssl/certs:ro"]
    for word in " ".join(kept.values()).split():
        path = Path(word.removeprefix("file://"))
        if path.is_dir():
            volumes.append(f"{path}:{path}:ro")
    return [argument for volume in volumes for argument in ("--volume", volume)]


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Builder, str]]:
    """The image, built from the Dockerfile on a Debian of this machine's mirror."""
    for program in ("buildah", "debootstrap"):
        assert shutil.which(program), f"install {program}: apt-get install buildah debootstrap crun"
    folder = Path(os.environ.get("KVSERVICE_IMAGE_DIR", tmp_path_factory.mktemp("image")))
    builder = Builder(folder)
    sources = Path("/etc/apt/sources.list.d/debian.sources")
    mirror = re.search(r"^URIs: *(\S+)", sources.read_text(), re.MULTILINE)
    assert mirror is not None
    rootfs = folder / "rootfs"
    if not (rootfs / "usr/bin/python3").exists():
        packages = "ca-certificates,python3,python3-venv,python3-dev"
        command = ["debootstrap", "--variant=minbase", f"--include={packages}", "bookworm"]
        subprocess.run([*command, str(rootfs), mirror[1]], check=True, stdout=subprocess.DEVNULL)
    base = builder("from", "scratch")
    builder("copy", "-q", base, str(rootfs), "/")
    builder("commit", "-q", base, PYTHON_IMAGE)
    builder(
        *("bud", "--layers", "--build-arg", f"BASE={PYTHON_IMAGE}", "--build-arg", "DEVICE=cpu"),
        *("--build-arg", "REVISION=test", *pip_settings(folder)),
        *("--file", str(DOCKERFILE), "--tag", "localhost/kvservice:test", str(ROOT)),
    )
    container = builder("from", "localhost/kvservice:test")
    try:
        yield builder, container
    finally:
        builder("rm", "--all")
        if "KVSERVICE_IMAGE_DIR" not in os.environ:
            builder("rmi", "--all", "--force")
            shutil.rmtree(folder)


@pytest.mark.image
@pytest.mark.timeout(3600)
def test_image_serves(image: tuple[Builder, str]) -> None:
    """As its own user, it knows Ray and the service, and a worker in it serves a session."""
    builder, container = image
    assert builder.run(container, "id", "-u").endswith("10001")
    assert "ray, version" in builder.run(container, "ray", "--version")
    assert re.search(r"kvservice \d", builder.run(container, "kvservice", "--version"))
    assert "native" in builder.run(
        container,
        "python",
        "-c",
        "import kvservice_workers._native as n, ray.dashboard.optional_deps; print(n.__name__)",
    )
    out = builder.run(container, "bash", "-c", SERVE)
    assert "attended on a worker" in out, out


SERVE = """
set -eu
cd "$HOME"
kvservice manager --port 0 --json >manager.json & manager=$!
until [ -s manager.json ]; do sleep 0.2; done
address=$(python -c 'import json; print(json.load(open("manager.json"))["address"])')
kvservice worker --port 0 --memory 16MiB --manager "$address" --json >worker.json & worker=$!
until kvservice status --address "$address" >/dev/null; do sleep 0.2; done
python - "$address" <<'END'
import sys
import numpy as np
from kvservice_client import connect

with connect(sys.argv[1]) as client, client.open(num_rows=1) as session:
    k = np.ones((1, 2, 40, 8), np.float32)
    v = np.broadcast_to(np.arange(40, dtype=np.float32)[:, None], k.shape).copy()
    out = session.attend(0, k, k, v)
    np.testing.assert_allclose(out[0, 0, :, 0], np.arange(40) / 2, atol=1e-5)
    print("attended on a worker")
END
kill "$worker" "$manager"
wait "$worker" && wait "$manager"
"""


@pytest.mark.image
@pytest.mark.timeout(600)
def test_image_has_nothing_that_it_does_not_need(image: tuple[Builder, str]) -> None:
    """No compiler, no tests, no package index; nothing of it can be changed by its user."""
    builder, container = image
    look = (
        "command -v gcc g++ make; find / -xdev -writable -not -path '/proc/*' -type f 2>/dev/null"
    )
    found = [
        line
        for line in builder.run(container, "bash", "-c", f"{look}; true").splitlines()
        if not line.startswith(("/home/kvservice/", "/dev/", "/tmp/"))
    ]
    assert found == []


def test_chart_runs_this_user() -> None:
    """The user of the pods is the one that the image was made for."""
    (uid,) = set(re.findall(r"^USER (\d+):", DOCKERFILE.read_text(), re.MULTILINE))
    (cluster,) = [item for item in render(None) if item["kind"] == "RayCluster"]
    spec = cluster["spec"]["headGroupSpec"]["template"]["spec"]
    assert spec["securityContext"]["runAsUser"] == int(uid)
