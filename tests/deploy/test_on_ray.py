"""What the chart renders, run for real: Ray nodes as KubeRay starts them, and the chart's commands.

One release of the profile `tls` for all tests, each of which leaves it with a manager and two
workers. Certificates, key and tokens are made as deploy/README.md says.
"""

from __future__ import annotations

import copy
import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvservice.clock import SystemClock
from kvservice.cluster.processes import wait_until
from tests.deploy.charts import groups, of_kind, pods, render
from tests.deploy.pods import Network, Pod, ray_start
from tests.programs import needs

pytestmark = [
    pytest.mark.deploy,
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.timeout(480),
    needs("ip", "unshare", "nsenter", "setpriv"),
]

SETTINGS = (
    "workers.cpu.replicas=2",
    "workers.cpu.memoryPercent=2",  # of this machine: there is no limit on a pod here
    "workers.drainSeconds=30",
    "workers.cpu.resources.cpu=2",
)
PODS = "kv-kvservice"
HEAD, MANAGER = f"{PODS}-head-svc.prod.svc", f"{PODS}-manager.prod.svc"
SERVER_NAME = "kv-kvservice.prod.svc"
TOKEN = "f" * 64  # Ray's own
METRICS_TOKEN = "e" * 64


CLIENT = """
import json, sys
import numpy as np
from kvservice_client import Tls, connect

address, ca, name, token, *sessions = sys.argv[1:]
tls = Tls(ca_file=ca, server_name=name)
with connect(address, token=open(token).read().strip(), tls=tls) as client:
    if sessions:
        session = client.attach(sessions[0])
        start = max(session.lengths(0))
    else:
        session = client.open(num_rows=1, spread=2, ttl_s=600)
        start = 0
    k = np.ones((1, 2, 40, 8), np.float32)
    v = np.broadcast_to(np.arange(start, start + 40, dtype=np.float32)[:, None], k.shape).copy()
    out = session.attend(0, k, k, v)
    np.testing.assert_allclose(out[0, 0, :, 0], np.arange(start, start + 40) / 2, atol=1e-4)
    (info,) = [info for info in client.list_sessions() if info.session_id == session.id]
    workers = [extent.worker_id for extent in info.extents]
    session.detach()
    print(json.dumps({"session": session.id, "length": start + 40, "workers": workers}))
"""


def make_secrets(folder: Path) -> dict[str, Path]:
    """Return the folders of the Secrets that the profile names, filled by our own commands."""
    made = folder / "made"
    made.mkdir()

    def run(*arguments: str) -> str:
        command = [sys.executable, "-m", "kvservice", *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    run("certs", str(made), "--host", SERVER_NAME)
    tokens = made / "tokens"
    operator = run("token", "operations", "--role", "operator", "--file", str(tokens))
    tenant = run("token", "tenant-a", "--file", str(tokens))
    (made / "quotas").write_text("[default]\nsessions = 100\n")
    contents = {
        "kvservice-tls": {
            "tls.crt": (made / "server.pem").read_text(),
            "tls.key": (made / "server.key").read_text(),
            "ca.crt": (made / "ca.pem").read_text(),
        },
        "kvservice-key": {"key": (made / "capability.key").read_text()},
        "kvservice-tokens": {"tokens": tokens.read_text()},
        "kvservice-operator": {"token": operator},
        "kvservice-metrics": {"token": METRICS_TOKEN},
        "kvservice-quotas": {"quotas.toml": (made / "quotas").read_text()},
        "tenant": {"token": tenant},
    }
    for name, files in contents.items():
        (folder / name).mkdir()
        for key, text in files.items():
            (folder / name / key).write_text(text)
            (folder / name / key).chmod(0o440)  # the chart's defaultMode
    return {name: folder / name for name in contents}


class Release:
    """A release of the chart: its pods as they are now."""

    def __init__(self, network: Network) -> None:
        self.network = network
        self.objects = render("tls", *SETTINGS)
        self.groups = groups(self.objects)
        (scale,) = of_kind(self.objects, "ConfigMap")
        self.scale_file = network.mounted[scale["metadata"]["name"]] / "scale.json"
        self.scale_file.write_text(scale["data"]["scale.json"])
        self.test_pod = dict(pods(self.objects))[f"{PODS}-test"]
        self.head = self._pod("head")
        self.head.run_container("ray-head", ray_start(self.groups["head"], head=None), self._ray())
        network.name_hosts({HEAD: self.head.address})
        # As KubeRay's init container does before the others start.
        health = ["ray", "health-check", "--address", f"{HEAD}:6379"]
        env = self.head.containers["ray-head"].env
        until(lambda: self.head.exec(health, env).returncode == 0)
        self.client = network.pod("client", with_tenant(self.test_pod))
        self.workers: list[Pod] = []
        self.manager: Pod

    def _pod(self, group: str) -> Pod:
        return self.network.pod(group, self.groups[group]["template"]["spec"])

    def _ray(self) -> dict[str, str]:
        """Return what KubeRay gives to Ray containers."""
        return {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": TOKEN,
            "RAY_gcs_rpc_server_reconnect_timeout_s": "600",
            "RAY_raylet_start_wait_time_s": "120",  # ours: this machine may be busy
        }

    def start_manager(self) -> None:
        """Have a pod of the group `manager`, with a new address, and its Service lead there."""
        self.manager = self._pod("manager")
        command = ray_start(self.groups["manager"], head=HEAD)
        self.manager.run_container("ray-manager", command, self._ray())
        self.manager.run_container("keeper")
        self.network.name_hosts({MANAGER: self.manager.address})

    def start_worker(self) -> Pod:
        """Have another pod of the group `cpu`."""
        pod = self._pod("cpu")
        command = ray_start(self.groups["cpu"], head=HEAD)
        pod.run_container("ray-worker", command, self._ray())
        self.workers.append(pod)
        return pod

    def ask(self, *command: str) -> Any:
        """Run a command as a client of the service; return its exit code and what it says."""
        env = self.client.environment(self.test_pod["containers"][0])
        return self.client.exec(command, env)

    def is_ready(self, pod: Pod) -> bool:
        """Return whether the kubelet would call the pod ready, asking from another node."""
        (probe,) = [
            container["readinessProbe"]["grpc"]
            for container in pod.spec["containers"]
            if "readinessProbe" in container
        ]
        done = self.ask(
            sys.executable, "-c", PROBE, f"{pod.address}:{probe['port']}", probe["service"]
        )
        return bool(done.returncode == 0)

    def passes(self) -> bool:
        """Return whether `helm test` would succeed."""
        (container,) = self.test_pod["containers"]
        return bool(self.ask(*container["command"]).returncode == 0)

    def addresses(self) -> dict[str, str]:
        """Return the addresses of the workers that are alive, by their names."""
        (container,) = self.test_pod["containers"]
        calling = [each for each in container["command"][2:] if "expect" not in each]
        done = self.ask("kvservice", "workers", "--json", *calling)
        assert done.returncode == 0, done.stderr
        return {
            worker["workerId"]: worker["address"]
            for worker in json.loads(done.stdout)["workers"]
            if worker["state"] == "WORKER_STATE_ALIVE"
        }

    def told(self) -> str:
        """Return what status, keeper and nodes say, for somebody who wonders."""
        (container,) = self.test_pod["containers"]
        status = self.ask(*container["command"])
        logs = [
            f"--- {pod.name}/{each.name}\n{each.log()[-1500:]}"
            for pod in (self.manager, *self.workers)
            for each in pod.containers.values()
        ]
        return "\n".join([status.stdout + status.stderr, *logs])

    def attend(self, *session: str) -> Any:
        """Go on with a session as its tenant, or with a new one on two workers."""
        files = ("/etc/kvservice/tls/ca.crt", SERVER_NAME, "/etc/kvservice/tenant/token")
        done = self.ask(sys.executable, "-c", CLIENT, f"{MANAGER}:50051", *files, *session)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)


def with_tenant(spec: Any) -> Any:
    """Return the spec of the test's pod with a tenant's token mounted as well."""
    spec = copy.deepcopy(spec)
    spec["volumes"].append({"name": "tenant", "secret": {"secretName": "tenant"}})
    mount = {"name": "tenant", "mountPath": "/etc/kvservice/tenant"}
    spec["containers"][0]["volumeMounts"].append(mount)
    return spec


SCRAPE = """
import http.client, socket, ssl, sys

address, port, ca, name, token = sys.argv[1:]
context = ssl.create_default_context(cafile=ca)
connection = http.client.HTTPSConnection(name)
plain = socket.create_connection((address, int(port)), 5)
connection.sock = context.wrap_socket(plain, server_hostname=name)
connection.request("GET", "/metrics", headers={"Authorization": f"Bearer {token}"})
print(connection.getresponse().read().decode())
"""

PROBE = """
import sys, grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

with grpc.insecure_channel(sys.argv[1]) as channel:
    request = health_pb2.HealthCheckRequest(service=sys.argv[2])
    answer = health_pb2_grpc.HealthStub(channel).Check(request, timeout=3)
    sys.exit(answer.status != health_pb2.HealthCheckResponse.SERVING)
"""


def until(
    condition: Callable[[], bool], release: Release | None = None, timeout_s: float = 200.0
) -> None:
    """Wait for a condition. If it does not come, say how the release stands."""
    if wait_until(condition, clock=SystemClock(), timeout_s=timeout_s):
        return
    raise AssertionError("not in time" if release is None else f"not in time: {release.told()}")


@pytest.fixture(scope="module")
def release(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Release]:
    """A head, a manager that is ready before there is any worker, then two workers."""
    folder = tmp_path_factory.mktemp("release")
    mounted = {**make_secrets(folder), f"{PODS}-scale": folder / "scale"}
    mounted[f"{PODS}-scale"].mkdir()
    with Network(folder / "network", {f"{PODS}/auth_token": TOKEN}, mounted) as network:
        found = Release(network)
        try:
            found.start_manager()
            until(lambda: found.is_ready(found.manager))
            assert not found.passes(), "there is no worker yet"
            for _ in range(2):
                found.start_worker()
            until(found.passes, found)
            yield found
        except BaseException:
            for pod in (found.head, found.manager, *found.workers):
                for container in pod.containers.values():
                    print(f"--- {pod.name}/{container.name}\n{container.log()[-4000:]}")
            raise


def test_actors_are_where_they_belong(release: Release) -> None:
    """Each worker in a pod of its own, at the ports that the Services name; all pods are ready."""
    assert set(release.addresses().values()) == {f"{pod.address}:50061" for pod in release.workers}
    until(lambda: all(release.is_ready(pod) for pod in (release.manager, *release.workers)))
    until(lambda: "2 of 2 workers are alive" in release.manager.containers["keeper"].log())


def test_session_lies_on_both_workers(release: Release) -> None:
    """Through the manager's name, then to each worker's own address, as a tenant by its token."""
    assert sorted(set(release.attend()["workers"])) == ["kv-worker-0", "kv-worker-1"]


def test_nobody_gets_in_without_a_token(release: Release) -> None:
    """Neither with TLS alone, nor in plaintext; the probes' port says health and nothing else."""
    ca, name = "/etc/kvservice/tls/ca.crt", SERVER_NAME
    for options in (["--tls-ca", ca, "--tls-server-name", name], []):
        done = release.ask("kvservice", "workers", "--address", f"{MANAGER}:50051", *options)
        assert done.returncode == 1
        assert done.stdout == ""
    health = f"{release.manager.address}:50052"
    assert release.ask("kvservice", "workers", "--address", health).returncode == 1


def test_ports_are_what_the_chart_says(release: Release) -> None:
    """Metrics where and how the PodMonitor scrapes, for its token; no lane beside TLS, being
    plaintext."""
    dial = "import socket, sys; socket.create_connection((sys.argv[1], int(sys.argv[2])), 5)"
    (monitor,) = of_kind(release.objects, "PodMonitor")
    endpoint = monitor["spec"]["podMetricsEndpoints"][0]
    assert endpoint["scheme"] == "https"
    trusted = f"/etc/kvservice/tls/{endpoint['tlsConfig']['ca']['secret']['key']}"
    expected = endpoint["tlsConfig"]["serverName"]
    for pod in (release.manager, *release.workers):
        ports = {port["name"]: port["containerPort"] for port in pod.spec["containers"][0]["ports"]}
        where = (pod.address, str(ports[endpoint["port"]]))
        for token, is_shown in ((METRICS_TOKEN, True), ("x" * 64, False)):
            said = release.ask(sys.executable, "-c", SCRAPE, *where, trusted, expected, token)
            assert ("kvservice_build_info" in said.stdout) is is_shown
        for name, is_open in {"kv-grpc": True, "kv-health": True, "kv-lane": False}.items():
            if name in ports:
                done = release.ask(sys.executable, "-c", dial, pod.address, str(ports[name]))
                assert (done.returncode == 0) is is_open, f"{pod.name} {name}"


def test_keeper_may_come_and_go(release: Release) -> None:
    """It ends at once when told to, and ends nothing; another one finds all as it was."""

    before = release.addresses()
    keeper = release.manager.containers["keeper"]
    keeper.signal(signal.SIGTERM)
    assert keeper.wait(30) == 0
    assert release.passes()
    said = len(keeper.log())
    keeper.start(release.manager.container("keeper")["command"])
    until(lambda: "2 of 2 workers are alive" in keeper.log()[said:])
    assert release.addresses() == before


def test_manager_moves_to_another_pod(release: Release) -> None:
    """Its Service's name leads to the new address; workers register there, sessions go on."""
    session = release.attend()["session"]
    release.manager.kill()
    release.start_manager()
    until(lambda: release.is_ready(release.manager))
    until(release.passes, release)
    assert release.attend(session)["length"] == 80


def test_a_lost_worker_comes_back_in_another_pod(release: Release) -> None:
    """KubeRay makes another pod, and Ray starts the worker there, under its old name."""
    before = release.addresses()
    lost = release.workers.pop()
    lost.kill()
    new = release.start_worker()
    until(release.passes, release)
    until(lambda: f"{new.address}:50061" in release.addresses().values(), release)
    assert release.addresses().keys() == before.keys()


def test_scales_up_and_down_while_it_runs(release: Release) -> None:
    """A changed ConfigMap and another pod make another worker. A pod that is deleted drains first:
    it serves its session to the end, and is not replaced."""
    release.scale_file.write_text('{"workers": 3, "gpuWorkers": 0}')
    release.start_worker()
    until(lambda: len(release.addresses()) == 3, release)

    release.scale_file.write_text('{"workers": 2, "gpuWorkers": 0}')
    leaving = release.workers.pop(0)
    (drained,) = leaving.delete()
    assert drained.returncode == 0, drained.stderr
    until(lambda: f"{leaving.address}:50061" not in release.addresses().values(), release)
    keeper = release.manager.containers["keeper"]
    until(lambda: keeper.log().rstrip().endswith("2 of 2 workers are alive"), release)
    until(release.passes, release)
    assert len(set(release.attend()["workers"])) == 2


def test_a_drained_worker_does_not_come_back_to_its_pod(release: Release) -> None:
    """While the pod that it was to leave is still there. In the next one it does."""
    leaving = release.workers.pop(0)
    container = leaving.container("ray-worker")
    env = leaving.containers["ray-worker"].env
    command = container["lifecycle"]["preStop"]["exec"]["command"]
    assert leaving.exec(command, env).returncode == 0
    keeper = release.manager.containers["keeper"]
    until(lambda: keeper.log().rstrip().endswith("1 of 2 workers are alive"), release)
    said = len(keeper.log())
    release.start_worker()
    leaving.kill()
    until(release.passes, release)
    assert set(release.addresses().values()) == {f"{pod.address}:50061" for pod in release.workers}
    # Not in between, either: the only other worker has been alive all along.
    until(lambda: keeper.log().rstrip().endswith("2 of 2 workers are alive"), release)
    assert keeper.log()[said:].count("are alive") == 1
