"""What security teams ask of a chart, on every pod of every profile."""

from __future__ import annotations

import copy
import json
import re
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.charts import CHART, PROFILES, TOOLS, containers, helm, of_kind, pods, render
from tests.deploy.test_chart import as_pods

pytestmark = pytest.mark.deploy

profiles = pytest.mark.parametrize("profile", [None, *PROFILES])

# checkov's rules that do not fit, and why.
NOT_OURS = {
    "CKV_K8S_15": "a tag is never moved; image.pullPolicy is there for those who move theirs",
    "CKV_K8S_43": "digests are for those who install: see image.digest",
    "CKV_K8S_21": "templates have no namespace: the release's is used",
    "CKV_K8S_8": "the liveness probe of a Ray container is the operator's",
    "CKV_K8S_9": "the keeper serves nobody who could be sent elsewhere",
    "CKV_K8S_35": "Ray takes its token from the environment, where the operator puts it",
    "CKV_K8S_17": "it means the host's process IDs; the pod's own containers share theirs",
}


def test_checkov_finds_nothing(tmp_path: Path) -> None:
    """On all pods of all profiles, those that the operator makes of the RayCluster too."""
    items = []
    for profile in (None, *PROFILES):
        objects = render(profile)
        for item in [*as_pods(objects), *of_kind(objects, "NetworkPolicy")]:
            item = copy.deepcopy(item)
            item["metadata"]["name"] += f"-{profile}"
            items.append(item)
    path = tmp_path / "pods.yaml"
    path.write_text(yaml.safe_dump_all(items))
    command = [str(TOOLS / "checkov"), "--file", str(path), "--framework", "kubernetes"]
    command += ["--output", "json", "--skip-download", "--quiet", "--compact"]
    command += ["--skip-check", ",".join(NOT_OURS)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout, done.stderr
    report = json.loads(done.stdout)
    failed = [
        f"{check['check_id']} {check['check_name']}: {check['resource']}"
        for check in report["results"]["failed_checks"]
    ]
    assert not failed, "\n".join(failed)
    assert report["summary"]["passed"] > 500


@profiles
def test_containers_may_do_nothing_but_run(profile: str | None) -> None:
    """Not root, no way to become root, no capabilities, a read-only root file system."""
    for name, spec in pods(render(profile)):
        pod = spec["securityContext"]
        assert pod["runAsNonRoot"] is True, name
        assert pod["runAsUser"] >= 10000, name
        assert pod["seccompProfile"] == {"type": "RuntimeDefault"}, name
        assert spec["automountServiceAccountToken"] is False, name
        assert not {"hostNetwork", "hostPID", "hostIPC"} & spec.keys(), name
        assert not any("hostPath" in volume for volume in spec["volumes"]), name
    for name, container in containers(render(profile)):
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "runAsNonRoot": True,
            "capabilities": {"drop": ["ALL"]},
        }, name


@profiles
def test_limits_are_set_and_kept_free(profile: str | None) -> None:
    """Requests are the limits, so that a worker is neither throttled nor evicted first."""
    for name, container in containers(render(profile)):
        resources = container["resources"]
        assert resources["requests"] == resources["limits"], name
        assert {"cpu", "memory"} <= resources["limits"].keys(), name


@profiles
def test_images_are_of_one_version(profile: str | None) -> None:
    """A tag that is not `latest`, or a digest."""
    for name, container in containers(render(profile)):
        assert re.search(r":[^/:]+$|@sha256:[0-9a-f]{64}$", container["image"]), name
        assert not container["image"].endswith(":latest"), name


@profiles
def test_secrets_are_only_referred_to(profile: str | None) -> None:
    """The chart makes no Secret, and nothing that sounds like one has a value."""
    objects = render(profile)
    assert not [item for item in objects if item["kind"] == "Secret"]
    for name, container in containers(objects):
        for entry in container.get("env", []):
            if re.search(r"(?i)password|secret|token(?!s?_?file)|_key", entry["name"]):
                assert "secretKeyRef" in entry["valueFrom"], f"{name}: {entry['name']}"
        command = " ".join(container.get("command", []))
        assert not re.search(r"(?i)(password|token|secret|key)=(?!/)", command), name
    for path, value in strings(list(objects)):
        assert "-----BEGIN" not in value, path


def strings(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Yield every string in an object, with where it is."""
    if isinstance(value, str):
        yield path, value
    elif isinstance(value, dict):
        for name, item in value.items():
            yield from strings(item, f"{path}.{name}")
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from strings(item, f"{path}[{index}]")


def test_digest_wins_over_the_tag() -> None:
    """For those who pin what they run."""
    digest = "sha256:" + "0a" * 32
    images = {
        container["image"] for _, container in containers(render(None, f"image.digest={digest}"))
    }
    assert images == {f"kvservice@{digest}"}


def test_all_rules_are_ones_that_checkov_has() -> None:
    """A rule that is left out by a wrong name would be left out of nothing."""
    done = subprocess.run(
        [str(TOOLS / "checkov"), "--list", "--framework", "kubernetes"],
        capture_output=True,
        text=True,
        check=False,
    )
    for rule in NOT_OURS:
        assert f"{rule} " in done.stdout, rule


def test_chart_is_packed_whole(tmp_path: Path) -> None:
    """With the rules and the dashboard, which are links into the repository, and without `ci`."""
    done = helm("package", str(CHART), "--destination", str(tmp_path))
    assert done.returncode == 0, done.stderr
    (package,) = tmp_path.glob("*.tgz")
    with tarfile.open(package) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
        rules = archive.extractfile("kvservice/files/rules.yml")
        assert rules is not None
        assert b"KVServiceManagerDown" in rules.read()
    assert "values.schema.json" in names
    assert not any(name.startswith("ci/") for name in names)
