"""The chart renders for every profile, and what it renders is what the schemas say."""

from __future__ import annotations

import copy
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from tests.deploy.charts import (
    CHART,
    PROFILES,
    TOOLS,
    cluster,
    containers,
    groups,
    helm,
    of_kind,
    render,
    values_file,
)
from tests.programs import ROOT

pytestmark = pytest.mark.deploy

SCHEMA = ROOT.parent / "shared" / "data" / "raycluster-v1.schema.json"
KUBERNETES = "1.37"
INSECURE = "security.insecure=true"
OPERATOR_KINDS = ("PodMonitor", "PrometheusRule")
profiles = pytest.mark.parametrize("profile", [None, *PROFILES])


def as_pods(objects: tuple[Any, ...]) -> Iterator[dict[str, Any]]:
    """Yield the pod template of each group as a Pod: no schema of Kubernetes looks into them."""
    for name, group in groups(objects).items():
        template = copy.deepcopy(group["template"])
        template["metadata"]["name"] = f"group-{name}"
        # As the operator adds it.
        template["metadata"]["labels"]["ray.io/cluster"] = cluster(objects)["metadata"]["name"]
        yield {"apiVersion": "v1", "kind": "Pod", **template}


def write(path: Path, objects: list[Any]) -> Path:
    path.write_text(yaml.safe_dump_all(objects))
    return path


def validate(path: Path) -> str:
    """Run kubernetes-validate, which must pass; return what it says."""
    command = [str(TOOLS / "kubernetes-validate"), "-k", KUBERNETES, "--strict", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_there_is_a_profile_for_each_purpose() -> None:
    """Each is an example to start from."""
    assert {"cpu", "gpu", "ha", "tls"} <= set(PROFILES)


@profiles
def test_lints(profile: str | None) -> None:
    """Without a warning."""
    values = ["--values", str(values_file(profile))] if profile else ["--set", INSECURE]
    done = helm("lint", "--strict", str(CHART), *values)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "[WARNING]" not in done.stdout


@profiles
def test_kubernetes_accepts_it(profile: str | None, tmp_path: Path) -> None:
    """Its own objects, and the pods of the RayCluster, by Kubernetes' schemas; unknown fields are
    refused."""
    objects = render(profile)
    known = [item for item in objects if item["kind"] not in ("RayCluster", *OPERATOR_KINDS)]
    assert validate(write(tmp_path / "objects.yaml", known)).count("passed") == len(known)
    pods = list(as_pods(objects))
    assert validate(write(tmp_path / "pods.yaml", pods)).count("passed") == len(pods)


def test_the_schemas_refuse_what_is_wrong(tmp_path: Path) -> None:
    """A misspelt field of a pod and of a Service: the checks above can fail."""
    objects = render(None)
    pod = next(as_pods(objects))
    pod["spec"]["containers"][0]["volumeMount"] = []
    service = copy.deepcopy(of_kind(objects, "Service")[0])
    service["spec"]["port"] = 1
    for item in (pod, service):
        with pytest.raises(AssertionError):
            validate(write(tmp_path / "wrong.yaml", [item]))


def strict(schema: Any) -> Any:
    """Return the CRD's schema as JSON schema that refuses unknown fields."""
    if isinstance(schema, list):
        return [strict(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    if schema.get("x-kubernetes-int-or-string"):
        return {"anyOf": [{"type": "integer"}, {"type": "string"}]}
    found = {name: strict(value) for name, value in schema.items() if name != "properties"}
    if "properties" in schema:
        found["properties"] = {name: strict(value) for name, value in schema["properties"].items()}
        if not schema.get("x-kubernetes-preserve-unknown-fields"):
            found.setdefault("additionalProperties", False)
    if schema.get("nullable"):
        found["type"] = [schema["type"], "null"]
    return found


@pytest.mark.skipif(not SCHEMA.exists(), reason="../shared is absent")
@profiles
def test_kuberay_accepts_it(profile: str | None) -> None:
    """By the schema of its CRD, with unknown fields refused."""
    schema = strict(json.loads(SCHEMA.read_text()))
    schema["properties"]["metadata"] = {"type": "object"}
    validator = jsonschema.Draft7Validator(schema)
    found = copy.deepcopy(cluster(render(profile)))
    for template in [groups((found,))[name]["template"] for name in groups((found,))]:
        template["metadata"].pop("labels")  # the CRD says of metadata only that it is an object
        template["metadata"].pop("annotations", None)
    errors = [f"{list(error.path)}: {error.message}" for error in validator.iter_errors(found)]
    assert not errors, "\n".join(errors)
    found["spec"]["workerGroupSpecs"][0]["groupNam"] = found["spec"]["workerGroupSpecs"][0].pop(
        "groupName"
    )
    assert len(list(validator.iter_errors(found))) == 2, "a misspelt field is missed"


@profiles
def test_prometheus_operator_accepts_it(profile: str | None, tmp_path: Path) -> None:
    """By the operator's models, with unknown fields refused."""
    objects = [item for item in render(profile) if item["kind"] in OPERATOR_KINDS]
    if profile in ("cpu", "ha"):
        assert len(objects) == len(OPERATOR_KINDS)
    path = tmp_path / "objects.json"
    path.write_text(json.dumps(objects))
    done = subprocess.run(
        [str(TOOLS / "python"), "-W", "ignore", "-c", OPERATOR, str(path)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_prometheus_is_given_the_token_that_the_servers_read() -> None:
    """Of one Secret: mounted where `--metrics-token` says, and named by the PodMonitor."""
    objects = render("tls")
    [monitor] = of_kind(objects, "PodMonitor")
    [ours, *_] = monitor["spec"]["podMetricsEndpoints"]
    secret = ours["authorization"]["credentials"]
    [cluster] = of_kind(objects, "RayCluster")
    text = json.dumps(cluster)
    assert f"--metrics-token=/etc/kvservice/metrics/{secret['key']}" in text
    assert (
        text.count(f'"secretName": "{secret["name"]}"') >= 2
    )  # in the manager's pod, and workers'
    [insecure] = of_kind(render("cpu"), "PodMonitor")
    assert "authorization" not in json.dumps(insecure)


def test_prometheus_trusts_what_the_servers_show() -> None:
    """HTTPS by the CA and the name of the servers' own Secret, without a certificate of its own,
    also where callers over gRPC need one; plaintext where there are no certificates."""
    for settings in ((), ("security.tls.mutual=true",), ("security.tls.serverName=kv.example",)):
        objects = render("tls", *settings)
        [monitor] = of_kind(objects, "PodMonitor")
        ours, rays = monitor["spec"]["podMetricsEndpoints"]
        assert ours["scheme"] == "https"
        text = json.dumps(cluster(objects))
        ca, name = ours["tlsConfig"]["ca"]["secret"], ours["tlsConfig"]["serverName"]
        assert f"--tls-ca=/etc/kvservice/tls/{ca['key']}" in text
        assert f'"secretName": "{ca["name"]}"' in text
        assert f"--tls-server-name={name}" in text
        assert ours["tlsConfig"].keys() == {"ca", "serverName"}
        assert "scheme" not in rays
    [insecure] = of_kind(render("cpu"), "PodMonitor")
    assert "tls" not in json.dumps(insecure)


def test_notes_say_how_to_see_the_page() -> None:
    """The scheme is that of the servers."""
    for profile, url in (("tls", "https://localhost:9464/"), ("cpu", "http://localhost:9464/")):
        values = ("--values", str(values_file(profile)))
        done = helm("install", "kv", str(CHART), "--dry-run=client", "-n", "prod", *values)
        assert done.returncode == 0, done.stderr
        assert url in done.stdout.partition("NOTES:")[2]


# With the models of the Prometheus operator. They ignore unknown fields, so what is read is
# written again and compared.
OPERATOR = """
import json, sys
from cloudcoil.models.prometheus_operator import v1

def missing(given, known, path=""):
    if isinstance(given, dict):
        for name, value in given.items():
            if not isinstance(known, dict) or name not in known:
                yield f"{path}.{name}"
            else:
                yield from missing(value, known[name], f"{path}.{name}")
    elif isinstance(given, list):
        for index, pair in enumerate(zip(given, known)):
            yield from missing(*pair, f"{path}[{index}]")

for given in json.load(open(sys.argv[1])):
    model = getattr(v1, given["kind"]).model_validate(given)
    known = json.loads(model.model_dump_json(by_alias=True, exclude_none=True))
    unknown = list(missing(given["spec"], known["spec"]))
    assert not unknown, unknown
"""


def test_alerts_and_dashboard_are_those_of_the_repository() -> None:
    """The same rules that are tested elsewhere, with a runbook that an operator can open."""
    prefix = "https://example.org/kvservice/"
    objects = render("cpu", f"prometheusRule.runbookPrefix={prefix}")
    (rule,) = of_kind(objects, "PrometheusRule")
    own = yaml.safe_load((ROOT / "deploy/prometheus/rules.yml").read_text())
    urls = []
    for group in (*own["groups"], *rule["spec"]["groups"]):
        for alert in group["rules"]:
            url = alert.get("annotations", {}).pop("runbook_url", None)
            urls += [url] if url else []
    assert rule["spec"] == own
    half = len(urls) // 2
    assert half
    assert urls[half:] == [prefix + url for url in urls[:half]]
    boards = [item for item in of_kind(objects, "ConfigMap") if "kvservice.json" in item["data"]]
    board = json.loads(boards[0]["data"]["kvservice.json"])
    assert board == json.loads((ROOT / "deploy/grafana/kvservice.json").read_text())
    assert boards[0]["metadata"]["labels"]["grafana_dashboard"] == "1"


@profiles
def test_names_fit_together(profile: str | None) -> None:
    """Services and monitors name container ports that exist; selectors find the pods."""
    objects = render(profile)
    by_component: dict[str, set[str]] = {}
    for group in groups(objects).values():
        labels = group["template"]["metadata"]["labels"]
        ports = {
            port["name"]
            for container in group["template"]["spec"]["containers"]
            for port in container.get("ports", [])
        }
        by_component.setdefault(labels["app.kubernetes.io/component"], set()).update(ports)
    for service in of_kind(objects, "Service"):
        selector = service["spec"]["selector"]
        assert selector["ray.io/cluster"] == cluster(objects)["metadata"]["name"]
        ports = by_component[selector["app.kubernetes.io/component"]]
        assert {port["targetPort"] for port in service["spec"]["ports"]} <= ports
    for policy in of_kind(objects, "NetworkPolicy"):
        component = policy["spec"]["podSelector"]["matchLabels"].get("app.kubernetes.io/component")
        if component:
            named = {
                port["port"] for rule in policy["spec"]["ingress"] for port in rule.get("ports", [])
            }
            assert named <= by_component[component]
    for monitor in of_kind(objects, "PodMonitor"):
        for endpoint in monitor["spec"]["podMetricsEndpoints"]:
            assert any(endpoint["port"] in ports for ports in by_component.values())


@profiles
def test_disruption_budget_lets_one_worker_go(profile: str | None) -> None:
    """As a number: a RayCluster has no scale that a percentage could be of."""
    objects = render(profile)
    total = sum(
        group["replicas"] for name, group in groups(objects).items() if name in ("cpu", "gpu")
    )
    (budget,) = of_kind(objects, "PodDisruptionBudget")
    assert budget["spec"]["minAvailable"] == total - 1
    assert "maxUnavailable" not in budget["spec"]
    assert not of_kind(render(None, "workers.cpu.replicas=1"), "PodDisruptionBudget")


@profiles
def test_pods_outlive_their_drain(profile: str | None) -> None:
    """The grace period covers the drain, and then what Ray takes to leave."""
    for name, group in groups(render(profile)).items():
        if name in ("cpu", "gpu"):
            spec = group["template"]["spec"]
            (command,) = [
                container["lifecycle"]["preStop"]["exec"]["command"][-1]
                for container in spec["containers"]
                if "lifecycle" in container
            ]
            seconds = int(command.split("--timeout=")[1].split()[0])
            assert spec["terminationGracePeriodSeconds"] >= seconds + 45


@profiles
def test_probes_ask_the_plain_port(profile: str | None) -> None:
    """By gRPC, for the service by its name, at a container port that nothing else uses."""
    probes = {}
    for name, container in containers(render(profile)):
        if probe := container.get("readinessProbe"):
            ports = {port["name"]: port["containerPort"] for port in container["ports"]}
            assert probe["grpc"]["port"] == ports["kv-health"]
            assert len(set(ports.values())) == len(ports)
            probes[name.partition("/")[0]] = probe["grpc"]["service"].rpartition(".")[2]
    assert probes.pop("manager") == "PageManagerService"
    assert probes
    assert set(probes.values()) == {"PageWorkerService"}
