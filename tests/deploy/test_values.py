"""Values that cannot be are refused by the schema, before anything is rendered."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.deploy.charts import CHART, cluster, groups, helm, render

pytestmark = pytest.mark.deploy

BAD = [
    ("workers.cpu.replicas=-1", "minimum"),
    ("workers.cpu.replicas=0", "workers"),  # and no GPU worker either
    ("workers.cpu.replicas=many", "integer"),
    ("workers.gpu.replicas=1.5", "integer"),
    ("workers.cpu.memoryPercent=0", "minimum"),
    ("workers.cpu.memoryPercent=96", "maximum"),
    ("workers.gpu.memoryPercent=-20", "minimum"),
    ("workers.cpu.resources.memory=-8Gi", "pattern"),
    ("workers.cpu.resources.memory=0", "string"),
    ("workers.cpu.resources.memory=8GB", "pattern"),
    ("workers.cpu.resources.cpu=lots", "pattern"),
    ("workers.cpu.resources.cpu=0", "exclusiveMinimum"),
    ("workers.drainSeconds=-1", "minimum"),
    ("workers.port=80", "minimum"),
    ("manager.port=70000", "maximum"),
    ("manager.service.type=ExternalName", "one of"),
    ("image.tag=latest", "not"),
    ("image.digest=sha256:12", "pattern"),
    ("image.repository=", "minLength"),
    ("rayVersion=2", "pattern"),
    ("listenHost=127.0.0.1", "one of"),
    ("gcsFaultTolerance.enabled=true", "redisAddress"),
    ("gcsFaultTolerance.redisAddress=redis", "pattern"),
    ("ray.objectStoreMemory=1", "minimum"),
    ("podMonitor.interval=often", "pattern"),
    ("fullnameOverride=7up", "pattern"),
    ("nonsense=1", "nonsense"),
    ("workers.cpu.replica=1", "replica"),
    ("networkPolicy.enabled=perhaps", "boolean"),
    ("extraEnv[0].name=REDIS_PASSWORD,extraEnv[0].value=x", "not"),
]


@pytest.mark.parametrize(("setting", "word"), BAD)
def test_bad_values_are_refused(setting: str, word: str) -> None:
    """With the path of the value and the rule in the message."""
    done = helm("template", "kv", str(CHART), "--set", f"security.insecure=true,{setting}")
    assert done.returncode != 0
    assert done.stdout == ""
    assert "schema" in done.stderr
    path = re.sub(r"\[(\d+)\]", r".\1", setting.partition("=")[0]).split(".")
    assert word.lower() in done.stderr.lower() or path[-1] in done.stderr


def test_every_value_is_in_the_schema_and_the_other_way_round() -> None:
    """No default is unchecked, and nothing can be set that the file does not show."""
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    schema = json.loads((CHART / "values.schema.json").read_text())
    schema["properties"].pop("global")  # Helm's own

    def compare(value: Any, schema: Any, path: str) -> None:
        if "properties" in schema:
            assert schema["additionalProperties"] is False, path
            optional = {"ephemeral-storage"}
            assert value.keys() == schema["properties"].keys() - optional, path
            for name in value:
                compare(value[name], schema["properties"][name], f"{path}.{name}")

    compare(values, schema, "")


def test_documentation_names_every_value() -> None:
    """The table in deploy/README.md has the values, and no others."""
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    text = (CHART.parents[1] / "README.md").read_text()
    named = set(re.findall(r"^\| `([A-Za-z.]+)` \|", text, re.MULTILINE))

    def exists(name: str) -> bool:
        value: Any = values
        for part in name.split("."):
            if not isinstance(value, dict) or part not in value:
                return False
            value = value[part]
        return True

    assert named
    assert not [name for name in named if not exists(name)]
    missing = [name for name in values if not any(row.split(".")[0] == name for row in named)]
    assert not missing


@pytest.mark.parametrize(
    ("chosen", "word"),
    [
        ("", "security.tokens.secretName"),
        ("security.tokens.secretName=t", "security.tls.secretName"),
        ("security.insecure=true,security.tls.mutual=true", "security.tls.secretName"),
        ("security.tokens.secretName=t,security.tls.secretName=c", "security.sharedKey"),
        (
            "security.tokens.secretName=t,security.tls.secretName=c,security.sharedKey.secretName=k",
            "security.operatorToken",
        ),
        (
            "security.tokens.secretName=t,security.tls.secretName=c,security.sharedKey.secretName=k,"
            "security.operatorToken.secretName=o,podMonitor.enabled=true",
            "security.metricsToken",
        ),
    ],
)
def test_doors_are_not_left_open_by_accident(chosen: str, word: str) -> None:
    """What the servers would refuse, the chart refuses before; the message says what to set."""
    done = helm("template", "kv", str(CHART), "--set", chosen)
    assert done.returncode != 0
    assert word in done.stderr


@settings(max_examples=15)
@given(
    cpu=st.integers(0, 50),
    gpu=st.integers(0, 50),
    memory=st.sampled_from(["512Mi", "8Gi", "1Ti"]),
    drain=st.integers(0, 86400),
)
def test_any_size_renders_as_asked(cpu: int, gpu: int, memory: str, drain: int) -> None:
    """Groups are there if they have replicas, and the ConfigMap says what the groups say."""
    chosen = (
        f"workers.cpu.replicas={cpu}",
        f"workers.gpu.replicas={gpu}",
        f"workers.cpu.resources.memory={memory}",
        f"workers.drainSeconds={drain}",
    )
    if cpu + gpu == 0:
        assert helm("template", "kv", str(CHART), "--set", "security.insecure=true").returncode == 0
        arguments = [part for setting in chosen for part in ("--set", setting)]
        assert helm("template", "kv", str(CHART), *arguments).returncode != 0
        return
    objects = render(None, *chosen)
    found = groups(objects)
    for name, replicas in (("cpu", cpu), ("gpu", gpu)):
        assert (name in found) is (replicas > 0)
        if replicas:
            assert found[name]["replicas"] == replicas
    (scale,) = [item for item in objects if "scale.json" in item.get("data", {})]
    assert json.loads(scale["data"]["scale.json"]) == {"workers": cpu, "gpuWorkers": gpu}
    assert cluster(objects)


def test_unknown_profile_values_are_refused(tmp_path: Path) -> None:
    """Also from a file."""
    path = tmp_path / "values.yaml"
    path.write_text("workers:\n  cpu:\n    arenaBytes: -5\n")
    done = helm("template", "kv", str(CHART), "--values", str(path))
    assert done.returncode != 0
    assert "arenaBytes" in done.stderr
