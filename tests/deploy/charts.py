"""The chart, rendered by the real Helm."""

from __future__ import annotations

import functools
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import yaml

from tests.programs import ROOT

CHART: Final = ROOT / "deploy" / "helm" / "kvservice"
TOOLS: Final = ROOT / ".venv-deploy" / "bin"
PROFILES: Final = tuple(
    path.name.removesuffix("-values.yaml") for path in sorted(CHART.glob("ci/*-values.yaml"))
)
RELEASE: Final = "kv"
NAMESPACE: Final = "prod"


def helm(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Helm, and return how it has ended."""
    return subprocess.run(
        [str(TOOLS / "helm"), *arguments], capture_output=True, text=True, check=False, timeout=60
    )


def values_file(profile: str) -> Path:
    """Return the values of a profile."""
    return CHART / "ci" / f"{profile}-values.yaml"


@functools.cache
def render(profile: str | None, *settings: str, release: str = RELEASE) -> tuple[Any, ...]:
    """Return all objects of the chart.

    Args:
        profile: None: the defaults, with what they refuse to decide.
        settings: As for `helm --set`.
    """
    arguments = ["template", release, str(CHART), "--namespace", NAMESPACE]
    if profile is not None:
        arguments += ["--values", str(values_file(profile))]
    else:
        arguments += ["--set", "security.insecure=true"]
    for setting in settings:
        arguments += ["--set", setting]
    done = helm(*arguments)
    assert done.returncode == 0, done.stderr
    return tuple(item for item in yaml.safe_load_all(done.stdout) if item is not None)


def of_kind(objects: tuple[Any, ...], kind: str) -> list[Any]:
    """Return the objects of a kind."""
    return [item for item in objects if item["kind"] == kind]


def cluster(objects: tuple[Any, ...]) -> Any:
    """Return the RayCluster."""
    (found,) = of_kind(objects, "RayCluster")
    return found


def groups(objects: tuple[Any, ...]) -> dict[str, Any]:
    """Return the groups of the RayCluster by name, the head's too."""
    spec = cluster(objects)["spec"]
    return {"head": spec["headGroupSpec"]} | {
        group["groupName"]: group for group in spec["workerGroupSpecs"]
    }


def pods(objects: tuple[Any, ...]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the names and specs of all pods: of the RayCluster's groups, and plain ones."""
    for name, group in groups(objects).items():
        yield name, group["template"]["spec"]
    for pod in of_kind(objects, "Pod"):
        yield pod["metadata"]["name"], pod["spec"]


def containers(objects: tuple[Any, ...]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield all containers with the names of their pods."""
    for name, spec in pods(objects):
        for container in [*spec.get("initContainers", []), *spec["containers"]]:
            yield f"{name}/{container['name']}", container
