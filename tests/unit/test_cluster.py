"""What starts and ends the service, as far as it needs no Ray: records, needs, ports, heads."""

from __future__ import annotations

import json
import socket
from dataclasses import replace
from pathlib import Path

import pytest

from kvservice.cluster.head import make_scratch, plan_head
from kvservice.cluster.keeping import scaled
from kvservice.cluster.manager_actor import worker_plans
from kvservice.cluster.placement import Needs, manager_needs, shortage, worker_needs
from kvservice.cluster.ports import check_listening, check_port_free, free_ports
from kvservice.cluster.processes import TAG_VARIABLE, ProcessKey
from kvservice.cluster.state import Actor, Kind, RunState, ServiceOptions, StateStore
from kvservice.core.errors import Conflict, InvalidRequest, Unavailable

STATE = RunState(
    name="default",
    kind=Kind.LOCAL,
    options=ServiceOptions(num_workers=2, port=0, host="127.0.0.1"),
    ray_address="127.0.0.2:6379",
    tag="a-tag",
    manager_address="127.0.0.1:50051",
    head=ProcessKey(7, 8, "boot"),
    scratch="/tmp/kv-x",
    actors=(Actor("kv-manager", "ab"), Actor("kv-worker-0", "cd")),
)


class TestStateStore:
    def test_finds_what_was_saved(self, tmp_path: Path) -> None:
        """Records survive; a later one replaces an earlier one; cleared ones are gone."""
        store = StateStore(tmp_path / "run", "default")
        assert store.find() is None
        for state in (STATE, replace(STATE, head=None, kind=Kind.JOINED, actors=())):
            store.save(state)
            assert StateStore(tmp_path / "run", "default").find() == state
        store.clear()
        store.clear()
        assert store.find() is None

    def test_is_private(self, tmp_path: Path) -> None:
        """Directory and record can be read by nobody else."""
        store = StateStore(tmp_path / "run", "default")
        store.save(STATE)
        assert store.directory.stat().st_mode & 0o777 == 0o700
        assert (store.directory / "state.json").stat().st_mode & 0o777 == 0o600

    def test_refuses_a_directory_that_others_can_enter(self, tmp_path: Path) -> None:
        """Somebody else could have put a record there that makes us end other processes."""
        store = StateStore(tmp_path, "default")
        store.directory.mkdir(mode=0o755)
        with pytest.raises(Conflict, match="0700"):
            store.save(STATE)

    def test_names_do_not_meet(self, tmp_path: Path) -> None:
        """Each name has its own record."""
        StateStore(tmp_path, "one").save(STATE)
        assert StateStore(tmp_path, "two").find() is None

    @pytest.mark.parametrize("name", ["", "..", "a/b", "a b", "-" * 3, "é"])
    def test_refuses_names_that_are_no_names(self, tmp_path: Path, name: str) -> None:
        """A name is a directory, and must stay one below ours."""
        with pytest.raises(InvalidRequest, match="letters"):
            StateStore(tmp_path, name)

    @pytest.mark.parametrize(
        "text",
        ["", "[]", "{}", '{"format": 2}', '{"format": 1}', json.dumps({"format": 1, "x": 1})],
    )
    def test_says_that_a_record_is_unreadable(self, tmp_path: Path, text: str) -> None:
        """What cannot be read is neither taken for nothing nor removed."""
        store = StateStore(tmp_path, "default")
        store.save(STATE)
        path = store.directory / "state.json"
        path.write_text(text)
        with pytest.raises(Conflict, match=r"state\.json"):
            store.find()
        assert path.read_text() == text

    def test_lock_is_one_command_s(self, tmp_path: Path) -> None:
        """Two commands at once on one name: the second is told so, and may try again later."""
        store = StateStore(tmp_path, "default")
        with store.lock():
            with pytest.raises(Conflict, match="at work"), StateStore(tmp_path, "default").lock():
                pass
            with StateStore(tmp_path, "other").lock():
                pass
        with store.lock():
            pass


class TestServiceOptions:
    @pytest.mark.parametrize(
        ("field", "value"),
        [
            ("num_workers", 0),
            ("memory_bytes", 1000),
            ("memory_percent", 96),
            ("gpu_memory_percent", -5),
            ("num_gpu_workers", -1),
            ("worker_health_port", 65537),
            ("device", "tpu"),
            ("port", -1),
            ("port", 65536),
            ("metrics_port", 70000),
        ],
    )
    def test_refuses_what_cannot_be(self, field: str, value: object) -> None:
        """Each option is checked before anything starts, and the message has the value."""
        with pytest.raises(InvalidRequest, match=str(value)):
            ServiceOptions(**{field: value})  # type: ignore[arg-type]


def group(**options: object) -> dict[str, object]:
    """Return options and their group on `device`, as `worker_needs` takes them."""
    stated = ServiceOptions(**options)  # type: ignore[arg-type]
    return {"options": stated, "group": stated.groups[0]}


class TestPlacement:
    def test_workers_go_where_the_cluster_says(self) -> None:
        """With the resource `kvworker` each worker takes one; elsewhere each takes a CPU."""
        three = group(num_workers=3)
        assert worker_needs({"kvworker": 2, "CPU": 8}, **three, is_local=False) == Needs(  # type: ignore[arg-type]
            resources={"kvworker": 1}
        )
        assert worker_needs({"CPU": 8}, **three, is_local=False) == Needs(num_cpus=1)  # type: ignore[arg-type]

    def test_gpus_are_shared_on_one_machine_only(self) -> None:
        """Two workers share a laptop's GPU; in a cluster each needs its own."""
        two = group(num_workers=2, device="cuda")
        local = worker_needs({"kvworker": 2, "GPU": 1}, **two, is_local=True)  # type: ignore[arg-type]
        assert local == Needs(num_gpus=0.5, resources={"kvworker": 1})
        assert worker_needs({"GPU": 4}, **two, is_local=True).num_gpus == 1  # type: ignore[arg-type]
        assert worker_needs({"GPU": 1}, **two, is_local=False).num_gpus == 1  # type: ignore[arg-type]
        assert worker_needs({}, **two, is_local=True).num_gpus == 1  # type: ignore[arg-type]

    def test_nodes_that_are_still_to_come_are_asked_for_by_resource(self) -> None:
        """Whichever node joins first, each actor ends up where it belongs."""
        options = ServiceOptions(num_workers=2, num_gpu_workers=1, by_resource=True)
        on_cpu, on_gpu = (
            worker_needs({"CPU": 8}, options, each, is_local=False) for each in options.groups
        )
        assert on_cpu == Needs(resources={"kvworker": 1})
        assert on_gpu == Needs(num_gpus=1, resources={"kvworker_gpu": 1})
        assert manager_needs({}, by_resource=True).resources == {"kvmanager": 1}

    def test_manager_stays_on_one_node(self) -> None:
        """It takes `kvmanager` where that exists, else something only the head node has."""
        assert manager_needs({"kvmanager": 1}).resources == {"kvmanager": 1}
        assert manager_needs({"CPU": 1}).resources == {"node:__internal_head__": 0.001}

    def test_shortage_has_the_numbers(self) -> None:
        """What is needed, what the cluster has, and what of it is free."""
        needs = Needs(num_cpus=1, resources={"kvworker": 1})
        text = shortage(needs, 2, {"CPU": 4, "kvworker": 3}, {"CPU": 0.5})
        assert "each of the 2" in text
        assert "1 CPU (the cluster has 4, free 0.5)" in text
        assert "1 kvworker (the cluster has 3, free 0)" in text


class TestPlans:
    def test_missing_workers_get_the_lowest_free_numbers(self) -> None:
        """Those that are there keep their names, whichever they are."""
        options = ServiceOptions(num_workers=3, num_gpu_workers=1, worker_port=50061)
        present = ["kv-worker-1", "kv-worker-7", "kv-manager"]
        plans = worker_plans(options, "10.0.0.1:50051", present, is_local=False)
        assert [(plan.worker_id, plan.device) for plan in plans] == [
            ("kv-worker-0", "cpu"),
            ("kv-worker-1", "cpu"),
            ("kv-worker-7", "cpu"),
            ("kv-gpu-worker-0", "cuda"),
        ]
        assert {plan.port for plan in plans} == {50061}
        assert {plan.manager_address for plan in plans} == {"10.0.0.1:50051"}

    def test_more_than_asked_for_are_kept(self) -> None:
        """Who is to go is decided by what still serves, not by a number."""
        options = ServiceOptions(num_workers=1)
        present = ["kv-worker-0", "kv-worker-2"]
        plans = worker_plans(options, "10.0.0.1:50051", present, is_local=False)
        assert [plan.worker_id for plan in plans] == present

    def test_ports_differ_on_one_machine(self) -> None:
        """Over all groups, and for each kind of port; 0 and none stay what they are."""
        options = ServiceOptions(
            num_workers=2, num_gpu_workers=1, worker_port=100, worker_health_port=200
        )
        plans = worker_plans(options, "127.0.0.1:1", [], is_local=True)
        assert [plan.port for plan in plans] == [100, 101, 102]
        assert [plan.health_port for plan in plans] == [200, 201, 202]
        assert {plan.metrics_port for plan in plans} == {0}
        assert worker_plans(ServiceOptions(), "h:1", [], is_local=True)[0].health_port is None

    def test_a_stated_manager_address_is_what_workers_get(self) -> None:
        """A name stays right when the manager moves to another node."""
        options = ServiceOptions(manager_address="kv-manager:50051")
        (plan,) = worker_plans(options, "10.0.0.1:50051", [], is_local=False)
        assert plan.manager_address == "kv-manager:50051"


class TestScaleFile:
    def test_states_the_numbers_of_workers(self, tmp_path: Path) -> None:
        """They replace those of the options, which stay as they are otherwise."""
        options = ServiceOptions(num_workers=1, port=4)
        path = tmp_path / "scale.json"
        path.write_text('{"workers": 5, "gpuWorkers": 2}')
        assert scaled(options, path) == replace(options, num_workers=5, num_gpu_workers=2)
        assert scaled(options, None) == options

    @pytest.mark.parametrize(
        "text",
        [
            *("", "3", "[]", "{}", '{"workers": 1}', '{"workers": 0, "gpuWorkers": 0}'),
            *('{"workers": -1, "gpuWorkers": 2}', '{"workers": true, "gpuWorkers": 0}'),
            *('{"workers": "2", "gpuWorkers": 0}', '{"workers": 1.5, "gpuWorkers": 0}'),
        ],
    )
    def test_refuses_anything_else(self, text: str, tmp_path: Path) -> None:
        """Nothing is scaled by a guess."""
        path = tmp_path / "scale.json"
        path.write_text(text)
        with pytest.raises(InvalidRequest):
            scaled(ServiceOptions(), path)

    def test_refuses_a_file_that_is_not_there(self, tmp_path: Path) -> None:
        """A mount that has not come yet is not a scale of nothing."""
        with pytest.raises(InvalidRequest, match=r"scale\.json"):
            scaled(ServiceOptions(), tmp_path / "scale.json")


class TestPorts:
    def test_free_ports_differ_and_can_be_used(self) -> None:
        """As many as asked for, each good for a server."""
        ports = free_ports("127.0.0.1", 5)
        assert len(set(ports)) == 5
        for port in ports:
            check_port_free("127.0.0.1", port, "--port")

    def test_a_used_port_is_noticed(self) -> None:
        """The message names port, host and the option to change."""
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
            with pytest.raises(Conflict, match=f"{port} of 127.0.0.1 is in use.*--port"):
                check_port_free("127.0.0.1", port, "--port")

    def test_a_host_that_is_not_ours_is_noticed(self) -> None:
        """It cannot be listened at, whatever the port."""
        with pytest.raises(InvalidRequest, match=r"192\.0\.2\.1"):
            check_port_free("192.0.2.1", 5000, "--port")

    def test_a_cluster_that_is_not_there_is_noticed_at_once(self) -> None:
        """Ray alone would wait for most of a minute."""
        port = free_ports("127.0.0.1", 1)[0]
        with pytest.raises(Unavailable, match=f"127.0.0.1:{port}"):
            check_listening(f"127.0.0.1:{port}")
        with socket.create_server(("127.0.0.1", 0)) as server:
            check_listening(f"127.0.0.1:{server.getsockname()[1]}")
        check_listening("auto")

    @pytest.mark.parametrize("address", ["", "remote", "6379", ":6379", "host:port"])
    def test_a_malformed_address_is_refused(self, address: str) -> None:
        """The message says what would be right."""
        with pytest.raises(InvalidRequest, match="local, auto or HOST:PORT"):
            check_listening(address)


class TestHead:
    def test_is_private_and_itself(self, tmp_path: Path) -> None:
        """A token only we can read, a home of its own, and nothing of another Ray's settings."""
        plan = plan_head(
            tmp_path,
            tag="a-tag",
            num_workers=2,
            environment={"PATH": "/bin", "HOME": "/root", "RAY_ADDRESS": "elsewhere:1"},
        )
        assert plan.environment["PATH"] == "/bin"
        assert plan.environment["HOME"].startswith(str(tmp_path))
        assert plan.environment[TAG_VARIABLE] == "a-tag"
        assert plan.environment["RAY_AUTH_MODE"] == "token"
        assert "RAY_ADDRESS" not in plan.environment
        token = Path(plan.environment["RAY_AUTH_TOKEN_PATH"])
        assert token.stat().st_mode & 0o777 == 0o600
        assert len(token.read_text()) == 64
        assert token.read_text() not in " ".join(plan.command)

    def test_two_heads_do_not_meet(self, tmp_path: Path) -> None:
        """Each has ports, files and a token of its own."""
        plans = []
        for name in ("one", "two"):
            (tmp_path / name).mkdir()
            plans.append(plan_head(tmp_path / name, tag=name, num_workers=1, environment={}))
        assert plans[0].address != plans[1].address
        assert (
            plans[0].environment["RAY_AUTH_TOKEN_PATH"]
            != plans[1].environment["RAY_AUTH_TOKEN_PATH"]
        )

    def test_threads_are_shared_out_unless_stated(self, tmp_path: Path) -> None:
        """Ray would give each worker one thread; what the user says is left alone."""
        many = plan_head(tmp_path, tag="t", num_workers=10_000, environment={})
        assert many.environment["OMP_NUM_THREADS"] == "1"
        stated = plan_head(tmp_path, tag="t", num_workers=1, environment={"OMP_NUM_THREADS": "3"})
        assert stated.environment["OMP_NUM_THREADS"] == "3"

    def test_scratch_leaves_room_for_socket_paths(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A Unix socket's path has at most 107 bytes, whatever the temporary folder is."""
        monkeypatch.setattr("tempfile.tempdir", "/tmp/" + "x" * 60)
        scratch = make_scratch()
        try:
            assert len(str(scratch)) <= 24
            assert scratch.stat().st_mode & 0o777 == 0o700
        finally:
            scratch.rmdir()
