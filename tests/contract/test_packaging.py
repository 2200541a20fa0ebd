"""What a user gets: three packages in one wheel, and a client that is light to import."""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Iterator
from email.parser import Parser
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.programs import needs

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {"kvservice", "kvservice_client", "kvservice_workers"}
HEAVY = (
    "accelerate", "gguf", "grpc_health", "grpc_reflection", "jax", "jaxlib", "prometheus_client",
    "ray", "rich", "safetensors", "torch", "transformers",
)  # fmt: skip

# Refuses to find the modules that are named, as where they are not installed.
REFUSE = f"""
import importlib.abc, sys

class Refuse(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {HEAVY!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Refuse())
"""


def python(code: str) -> subprocess.CompletedProcess[str]:
    """Run code in an interpreter of its own, in which nothing heavy can be imported."""
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", REFUSE + code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def build(folder: Path, target: str, environment: dict[str, str] | None = None) -> str:
    """Build one target offline and return what was printed."""
    done = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", target, "-d", str(folder)],
        cwd=ROOT,
        env={**os.environ, **(environment or {})},
        check=True,
        capture_output=True,
        text=True,
    )
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[zipfile.ZipFile]:
    """Yield the built wheel."""
    folder = tmp_path_factory.mktemp("wheel")
    build(folder, "wheel")
    (path,) = folder.glob("*.whl")
    with zipfile.ZipFile(path) as archive:
        yield archive


def test_wheel_has_the_three_packages_and_nothing_else(wheel: zipfile.ZipFile) -> None:
    """No test, no folder of the repository ends up in everybody's site-packages."""
    tops = {name.partition("/")[0] for name in wheel.namelist()}
    assert {top for top in tops if not top.endswith(".dist-info")} == PACKAGES


def test_wheel_has_every_module(wheel: zipfile.ZipFile) -> None:
    """Every Python file of the three packages is in the wheel, type marker included."""
    names = set(wheel.namelist())
    for package, root in (
        ("kvservice", ROOT),
        ("kvservice_client", ROOT / "client"),
        ("kvservice_workers", ROOT / "workers"),
    ):
        for path in (root / package).rglob("*.py*"):
            if path.suffix in (".py", ".pyi"):
                assert str(path.relative_to(root)) in names
        assert f"{package}/py.typed" in names


@needs("g++")
def test_wheel_has_the_native_kernel(wheel: zipfile.ZipFile) -> None:
    """Where there is a compiler, the extension is built and the wheel is named for its platform."""
    (extension,) = (name for name in wheel.namelist() if name.endswith(".so"))
    assert extension.startswith("kvservice_workers/_native.")
    assert wheel.filename is not None
    assert not wheel.filename.endswith("-any.whl")
    assert not any(name.endswith((".cpp", ".h", ".inc")) for name in wheel.namelist())


def test_wheel_is_built_without_a_compiler(tmp_path: Path) -> None:
    """Where there is none, the package is complete but for the extension, and says so."""
    said = build(tmp_path, "wheel", {"CXX": "no-such-compiler"})
    (path,) = tmp_path.glob("*-none-any.whl")
    assert not any(name.endswith(".so") for name in zipfile.ZipFile(path).namelist())
    assert "without the native kernel" in said


def test_wheel_requires_only_the_thin_client(wheel: zipfile.ZipFile) -> None:
    """Without an extra nothing heavy is installed, and no extra has what has no place there."""
    (name,) = (n for n in wheel.namelist() if n.endswith(".dist-info/METADATA"))
    metadata = Parser().parsestr(wheel.read(name).decode())
    required = metadata.get_all("Requires-Dist") or []
    plain = {re.split("[<>=~!; ]", line)[0] for line in required if "extra ==" not in line}
    assert plain == {
        "grpcio", "grpcio-status", "googleapis-common-protos", "protobuf", "numpy",
    }  # fmt: skip
    assert set(metadata.get_all("Provides-Extra") or []) == {
        *("hf", "server", "jax", "tracing", "demo", "dev")
    }
    assert not any("smollm" in line or line.startswith("gguf") for line in required)
    assert metadata["License-Expression"] == "Apache-2.0"


def test_wheel_has_the_command(wheel: zipfile.ZipFile) -> None:
    """`kvservice` is installed as a command."""
    (name,) = (n for n in wheel.namelist() if n.endswith(".dist-info/entry_points.txt"))
    assert "kvservice = kvservice.cli:main" in wheel.read(name).decode()


def test_source_distribution_has_what_a_build_needs(tmp_path: Path) -> None:
    """The sources of the packages, extension and protocol are in it; no environment is."""
    build(tmp_path, "sdist")
    (path,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert "proto/kvservice/v1/worker.proto" in names
    assert "client/kvservice_client/__init__.py" in names
    assert "workers/kvservice_workers/__init__.py" in names
    assert {"hatch_build.py", "workers/kvservice_workers/attention/native/module.cpp"} <= names
    assert not any(name.startswith(".venv") for name in names)


def test_constraints_pin_what_we_require() -> None:
    """constraints.txt has one exact version, within the published range, of each requirement."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = [Requirement(line) for line in lines if line and not line.startswith("#")]
    versions = {canonicalize_name(pin.name): str(pin.specifier) for pin in pins}
    assert len(versions) == len(pins)
    assert all(version.startswith("==") and "+" not in version for version in versions.values())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    ours = [*project["dependencies"], *itertools.chain(*project["optional-dependencies"].values())]
    for required in map(Requirement, ours):
        if required.name != "kvservice":
            version = versions[canonicalize_name(required.name)].removeprefix("==")
            assert required.specifier.contains(version), required


def test_client_imports_without_anything_heavy() -> None:
    """`import kvservice_client` needs none of the extras."""
    done = python("import kvservice_client; print(kvservice_client.connect.__name__)")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "connect\n"


def test_missing_extra_is_named() -> None:
    """What needs torch or transformers says which extra brings it, when it is first used."""
    done = python("from kvservice_client import RemoteCache")
    assert done.returncode != 0
    assert "kvservice[hf]" in done.stderr


def test_command_starts_without_anything_heavy() -> None:
    """With the client alone, the command explains itself."""
    done = python("from kvservice.cli import main; main(['--version'])")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("kvservice ")


def test_refused_modules_are_refused() -> None:
    """The import blocker of these tests works."""
    done = python("import torch")
    assert "No module named 'torch'" in done.stderr
