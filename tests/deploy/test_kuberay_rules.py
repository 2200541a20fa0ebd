"""Rules of KubeRay's operator that no schema has: what it would refuse, or take otherwise."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.deploy.charts import CHART, PROFILES, cluster, groups, helm, pods, render
from tests.programs import ROOT

pytestmark = pytest.mark.deploy

profiles = pytest.mark.parametrize("profile", [None, *PROFILES])

MAX_CLUSTER_NAME = 53
RAY_RESOURCES = ("num-cpus", "num-gpus", "memory", "resources")
GATED = ("networkPolicy", "tlsOptions", "historyServerOptions")


@pytest.mark.parametrize("release", ["kv", "kvservice", "a" * 53, "x-" * 19 + "kvservice-main"])
def test_name_is_one_that_services_can_have(release: str) -> None:
    """Short, of a-z, 0-9 and -, beginning with a letter; nothing is cut so that it ends in -."""
    name = cluster(render(None, release=release))["metadata"]["name"]
    assert len(name) <= MAX_CLUSTER_NAME
    assert re.fullmatch(r"[a-z]([a-z0-9-]*[a-z0-9])?", name)


def test_a_release_that_begins_with_a_digit_is_refused() -> None:
    """Helm allows it, the operator does not; the message says what to do."""
    done = helm("template", "7up", str(CHART))
    assert done.returncode != 0
    assert "fullnameOverride" in done.stderr


@profiles
def test_replicas_are_bounded_by_themselves(profile: str | None) -> None:
    """Without autoscaling, all three numbers are there and agree."""
    spec = cluster(render(profile))["spec"]
    assert not spec.get("enableInTreeAutoscaling")
    for group in spec["workerGroupSpecs"]:
        assert group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]


@profiles
def test_resources_are_in_one_place(profile: str | None) -> None:
    """The operator refuses a group that has them in both; labels have a place of their own."""
    for group in groups(render(profile)).values():
        assert not set(RAY_RESOURCES) & group["rayStartParams"].keys()
        assert "labels" not in group["rayStartParams"]
        assert all(isinstance(value, str) for value in group["rayStartParams"].values())
        assert all(isinstance(value, str) for value in group["resources"].values())


@profiles
def test_each_group_has_what_its_actors_ask_for(profile: str | None) -> None:
    """One resource that places them, one of it in each pod, and no CPU for anybody else's."""
    wanted = {
        "head": {},
        "manager": {"kvmanager": "1"},
        "cpu": {"kvworker": "1"},
        "gpu": {"GPU": "1", "kvworker_gpu": "1"},
    }
    for name, group in groups(render(profile)).items():
        assert group["resources"] == {"CPU": "0", **wanted[name]}
    gpu = groups(render("gpu"))["gpu"]["template"]["spec"]["containers"][0]["resources"]
    assert gpu["limits"]["nvidia.com/gpu"] == gpu["requests"]["nvidia.com/gpu"] == 1


def version(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(".")))


@profiles
def test_token_needs_a_new_ray(profile: str | None) -> None:
    """The operator wants the version, for its probes and for the token."""
    spec = cluster(render(profile))["spec"]
    assert spec["authOptions"]["mode"] == "token"
    assert version(spec["rayVersion"]) >= (2, 53)


def ray_container(group: Any) -> Any:
    return group["template"]["spec"]["containers"][0]


@profiles
def test_ray_comes_first_and_has_its_own_command(profile: str | None) -> None:
    """The first container is Ray's; the operator writes its command, and its liveness probe."""
    for name, group in groups(render(profile)).items():
        container = ray_container(group)
        assert container["name"].startswith("ray-"), name
        assert not {"command", "args", "livenessProbe", "startupProbe"} & container.keys()


@profiles
def test_redis_is_stated_once(profile: str | None) -> None:
    """Where the operator looks, and nowhere else."""
    found = cluster(render(profile))
    spec = found["spec"]
    head = spec["headGroupSpec"]
    names = {entry["name"] for entry in ray_container(head)["env"]}
    assert not names & {"REDIS_PASSWORD", "REDIS_USERNAME", "RAY_REDIS_ADDRESS"}
    assert not {"redis-password", "redis-username"} & head["rayStartParams"].keys()
    assert "annotations" not in found["metadata"]
    assert ("gcsFaultToleranceOptions" in spec) is (profile == "ha")


@profiles
def test_nothing_asks_for_a_feature_gate(profile: str | None) -> None:
    """With one that is off, the operator refuses the whole cluster."""
    spec = cluster(render(profile))["spec"]
    assert not set(GATED) & spec.keys()
    assert spec.get("gcsFaultToleranceOptions", {}).get("backend", "redis") == "redis"
    assert not any("suspend" in group for group in spec["workerGroupSpecs"])


@profiles
def test_pods_restart_as_the_operator_likes(profile: str | None) -> None:
    """It has its own mind about that."""
    for name, spec in pods(render(profile)):
        if not name.endswith("-test"):
            assert "restartPolicy" not in spec, name


def test_the_version_is_that_of_the_image() -> None:
    """The image has the Ray of constraints.txt, and the operator must be told the same."""
    pinned = re.search(r"^ray==(.+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert pinned is not None
    assert cluster(render(None))["spec"]["rayVersion"] == pinned[1]
