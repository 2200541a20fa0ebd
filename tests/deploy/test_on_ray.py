"""What the chart renders, run for real: Ray nodes as KubeRay starts them, and the chart's commands.

One release for all tests, each of which leaves it with a manager and two workers.
"""

from __future__ import annotations

import json
import signal
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
    pytest.mark.timeout(300),
    needs("ip", "unshare", "nsenter", "setpriv"),
]

SETTINGS = (
    "workers.cpu.replicas=2",
    "workers.cpu.memoryPercent=2",  # of this machine: there is no limit on a pod here
    "workers.drainSeconds=30",
    "workers.cpu.resources.cpu=2",
)
MANAGER, PODS = "kv-kvservice-manager.prod.svc", "kv-kvservice"
TOKEN = "f" * 64

ATTEND = """
import json, sys
import numpy as np
from kvservice_client import connect

with connect(sys.argv[1]) as client:
    session = client.attach(sys.argv[2]) if len(sys.argv) > 2 else client.open(num_rows=1, spread=2, ttl_s=600)
    start = max(session.lengths(0), default=0) if len(sys.argv) > 2 else 0
    k = np.ones((1, 2, 40, 8), np.float32)
    v = np.broadcast_to(np.arange(start, start + 40, dtype=np.float32)[:, None], k.shape).copy()
    out = session.attend(0, k, k, v)
    np.testing.assert_allclose(out[0, 0, :, 0], np.arange(start, start + 40) / 2, atol=1e-4)
    workers = {stats.worker_id: sum(pool.used_pages for pool in stats.pools) for stats in client.page_stats()}
    session.detach()
    print(json.dumps({"session": session.id, "lengths": list(session.lengths(0)), "pages": workers}))
"""  # noqa: E501


class Release:
    """A release of the chart: its pods as they are now."""

    def __init__(self, network: Network, folder: Path) -> None:
        self.network = network
        self.objects = render(None, *SETTINGS)
        self.groups = groups(self.objects)
        (scale,) = of_kind(self.objects, "ConfigMap")
        self.scale_file = folder / "scale" / "scale.json"
        self.scale_file.parent.mkdir()
        self.scale_file.write_text(scale["data"]["scale.json"])
        self.test_pod = dict(pods(self.objects))[f"{PODS}-test"]
        self.head = self._pod("head")
        self.head.run_container("ray-head", ray_start(self.groups["head"], head=None), self._ray())
        network.name_hosts({f"{PODS}-head-svc": self.head.address})
        self.client = network.pod("client", self.test_pod)
        self.workers: list[Pod] = []
        self.manager: Pod

    def _pod(self, group: str, **volumes: Path) -> Pod:
        return self.network.pod(group, self.groups[group]["template"]["spec"], volumes)

    def _ray(self) -> dict[str, str]:
        """Return what KubeRay gives to Ray containers."""
        return {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": TOKEN,
            "RAY_gcs_rpc_server_reconnect_timeout_s": "600",
        }

    def start_manager(self) -> None:
        """Have a pod of the group `manager`, with a new address, and its Service lead there."""
        self.manager = self._pod("manager", scale=self.scale_file.parent)
        command = ray_start(self.groups["manager"], head=f"{PODS}-head-svc")
        self.manager.run_container("ray-manager", command, self._ray())
        self.manager.run_container("keeper")
        self.network.name_hosts({MANAGER: self.manager.address})

    def start_worker(self) -> Pod:
        """Have another pod of the group `cpu`."""
        pod = self._pod("cpu")
        command = ray_start(self.groups["cpu"], head=f"{PODS}-head-svc")
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
        done = self.ask("kvservice", "workers", "--json", f"--address={MANAGER}:50051")
        assert done.returncode == 0, done.stderr
        return {
            worker["workerId"]: worker["address"]
            for worker in json.loads(done.stdout)["workers"]
            if worker["state"] == "WORKER_STATE_ALIVE"
        }

    def attend(self, session: str = "") -> Any:
        """Go on with a session, or with a new one on two workers; return where it stands."""
        arguments = [f"{MANAGER}:50051", *([session] if session else [])]
        done = self.ask(sys.executable, "-c", ATTEND, *arguments)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)


PROBE = """
import sys, grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

with grpc.insecure_channel(sys.argv[1]) as channel:
    request = health_pb2.HealthCheckRequest(service=sys.argv[2])
    answer = health_pb2_grpc.HealthStub(channel).Check(request, timeout=3)
    sys.exit(answer.status != health_pb2.HealthCheckResponse.SERVING)
"""


def until(condition: Callable[[], bool], timeout_s: float = 90.0) -> None:
    assert wait_until(condition, clock=SystemClock(), timeout_s=timeout_s)


@pytest.fixture(scope="module")
def release(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Release]:
    """A head, a manager that is ready before there is any worker, then two workers."""
    folder = tmp_path_factory.mktemp("release")
    with Network(folder / "network", {f"{PODS}/auth_token": TOKEN}) as network:
        found = Release(network, folder)
        try:
            found.start_manager()
            until(lambda: found.is_ready(found.manager))
            assert not found.passes(), "there is no worker yet"
            for _ in range(2):
                found.start_worker()
            until(found.passes)
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
    assert "2 of 2 workers are alive" in release.manager.containers["keeper"].log()


def test_session_lies_on_both_workers(release: Release) -> None:
    """Through the manager's name, then to each worker's own address."""
    pages = release.attend()["pages"]
    assert sorted(pages) == ["kv-worker-0", "kv-worker-1"]
    assert all(pages.values())


def test_metrics_and_lanes_are_where_the_chart_says(release: Release) -> None:
    """At the container ports by their names: what the PodMonitor scrapes, what clients dial."""
    for pod in (release.manager, *release.workers):
        ports = {port["name"]: port["containerPort"] for port in pod.spec["containers"][0]["ports"]}
        url = f"http://{pod.address}:{ports['kv-metrics']}/metrics"
        read = "import sys, urllib.request as r; print(r.urlopen(sys.argv[1], timeout=5).read())"
        assert "kvservice_build_info" in release.ask(sys.executable, "-c", read, url).stdout
        if "kv-lane" in ports:
            dial = (
                "import socket, sys; socket.create_connection((sys.argv[1], int(sys.argv[2])), 5)"
            )
            lane = str(ports["kv-lane"])
            assert release.ask(sys.executable, "-c", dial, pod.address, lane).returncode == 0


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
    until(release.passes)
    assert release.attend(session)["lengths"] == [80]


def test_a_lost_worker_comes_back_in_another_pod(release: Release) -> None:
    """KubeRay makes another pod, and Ray starts the worker there, under its old name."""
    before = release.addresses()
    lost = release.workers.pop()
    lost.kill()
    new = release.start_worker()
    until(release.passes)
    until(lambda: f"{new.address}:50061" in release.addresses().values())
    assert release.addresses().keys() == before.keys()


def test_scales_up_and_down_while_it_runs(release: Release) -> None:
    """A changed ConfigMap and another pod make another worker. A pod that is deleted drains first:
    it serves its session to the end, and is not replaced."""
    release.scale_file.write_text('{"workers": 3, "gpuWorkers": 0}')
    release.start_worker()
    until(lambda: len(release.addresses()) == 3)

    release.scale_file.write_text('{"workers": 2, "gpuWorkers": 0}')
    leaving = release.workers.pop(0)
    (drained,) = leaving.delete()
    assert drained.returncode == 0, drained.stderr
    until(lambda: f"{leaving.address}:50061" not in release.addresses().values())
    keeper = release.manager.containers["keeper"]
    until(lambda: keeper.log().rstrip().endswith("2 of 2 workers are alive"))
    until(release.passes)
    assert len(release.attend()["pages"]) == 2


def test_a_drained_worker_does_not_come_back_to_its_pod(release: Release) -> None:
    """While the pod that it was to leave is still there. In the next one it does."""
    before = release.addresses()
    leaving = release.workers.pop(0)
    container = leaving.container("ray-worker")
    env = leaving.containers["ray-worker"].env
    command = container["lifecycle"]["preStop"]["exec"]["command"]
    assert leaving.exec(command, env).returncode == 0
    keeper = release.manager.containers["keeper"]
    until(lambda: keeper.log().rstrip().endswith("1 of 2 workers are alive"))
    said = len(keeper.log())
    release.start_worker()
    leaving.kill()
    until(release.passes)
    assert release.addresses().keys() == before.keys()
    assert f"{leaving.address}:50061" not in release.addresses().values()
    # Not in between, either: the only other worker has been alive all along.
    until(lambda: keeper.log().rstrip().endswith("2 of 2 workers are alive"))
    assert keeper.log()[said:].count("are alive") == 1
