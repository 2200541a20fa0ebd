"""The numbers are true: after each call of a workload, all of them are what a model says."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
from google.protobuf.duration_pb2 import Duration

from kvservice.cli import main
from kvservice.clock import ManualClock
from kvservice.config import ManagerSettings, ServerLimits, WorkerSettings
from kvservice.core import errors
from kvservice.core import session as core
from kvservice.core.distribution import POWERS, SECONDS
from kvservice.core.geometry import LayerSpec
from kvservice.core.session import WorkerStats
from kvservice.runtime.manager import ManagerServer
from kvservice.runtime.worker import WorkerServer
from kvservice.v1 import manager_pb2, types_pb2, worker_pb2
from kvservice.wire import calls, convert
from kvservice.wire.names import WORKER
from kvservice.wire.tensors import from_numpy
from kvservice_workers.counters import (
    DISCREPANCIES,
    FAILURE_REASONS,
    FREE_REASONS,
    MOVED,
    REPLAYED,
)
from tests.page_model import PAGE_SIZE, PageModel
from tests.serving import (
    DIM,
    GEOMETRY,
    HEADS,
    KV_HEADS,
    PAGE_BYTES,
    Peer,
    allocate_request,
    manager_peer,
    new_id,
    scrape,
    until,
    worker_peer,
)

LAYERS, ROWS, WINDOW = 2, 2, 20
LIMITS = ServerLimits(max_streams=8, unary_threads=4)
NUM_PAGES = 64
SETTINGS = WorkerSettings(
    "w0", NUM_PAGES * PAGE_BYTES * LAYERS, metrics_port=0, max_sessions=4, limits=LIMITS
)
pytestmark = pytest.mark.usefixtures("leaves_nothing")


class Workload:
    """Calls on one worker, and on the model; every call is counted as gRPC's metrics count it."""

    def __init__(self, server: WorkerServer, peer: Peer, clock: ManualClock, seed: int) -> None:
        self.server, self.peer, self.clock = server, peer, clock
        self.model = PageModel(num_layers=LAYERS, token_bytes=GEOMETRY.token_bytes)
        self.rng = random.Random(seed)
        self.epochs: dict[str, int] = {}
        self.steps: dict[str, int] = {}
        self.handled: Counter[tuple[str, str]] = Counter()  # method, code
        self.answered: Counter[str] = Counter()  # code of each Attend

    def call(
        self, method: str, request: Any, error: type[errors.KVServiceError] | None = None
    ) -> Any:
        code = "OK" if error is None else error.code.name
        self.handled[method, code] += 1
        if error is None:
            return self.peer.call(method, request)
        with pytest.raises(error):
            self.peer.call(method, request)
        return None

    def open(self, **fields: Any) -> str:
        session_id = new_id()
        layer = LayerSpec(window=WINDOW, geometry=GEOMETRY)
        spec = core.SessionSpec(ROWS, layers=(layer,) * LAYERS, ttl_s=60.0, **fields)
        self.call("Allocate", allocate_request(session_id, spec))
        self.model.open(session_id, ROWS)
        self.epochs[session_id], self.steps[session_id] = 1, 0
        return session_id

    def attend(self, session_id: str, count: int, *, step: int, evict: int = 0) -> list[Any]:
        """Return the calls that append `count` tokens to all rows, layer by layer."""
        rows = self.model.sessions[session_id]
        shape = (count * len(rows), KV_HEADS, DIM)
        q = from_numpy(np.ones((shape[0], HEADS, DIM), np.float32))
        kv = from_numpy(np.ones(shape, np.float32))
        evictions = (core.EvictBefore(WINDOW, (evict,) * len(rows)),) if evict else ()
        header = core.StepHeader((count,) * len(rows), evict_before=evictions)
        made = [
            core.AttendCall(
                session_id=session_id,
                epoch=self.epochs[session_id],
                step=step,
                layer=layer,
                q=q,
                scale=1.0,
                mask=core.Mask(window=WINDOW),
                k=kv,
                v=kv,
                header=header,
                positions=tuple(row.length for row in rows),
            )
            for layer in range(LAYERS)
        ]
        return [calls.attend_call_to_pb(call, call_id=1) for call in made]

    def send(self, call: worker_pb2.AttendCall, error: type[errors.KVServiceError] | None = None):
        self.handled["Attend", "OK"] += 1
        self.answered["OK" if error is None else error.code.name] += 1
        if error is None:
            self.peer.attend_once(call)
            return
        with pytest.raises(error):
            self.peer.attend_once(call)

    def append(self, session_id: str, count: int, *, evict: int = 0) -> list[Any]:
        self.steps[session_id] += 1
        sent = self.attend(session_id, count, step=self.steps[session_id], evict=evict)
        for call in sent:
            self.send(call)
        if evict:
            self.model.evict(session_id, evict)
        self.model.append(session_id, count)
        return sent

    def change(self, method: str, session_id: str, **fields: Any) -> Any:
        """Make a structural change; return its request, which may be repeated once."""
        kind = getattr(types_pb2, f"{method}Request")
        request = kind(session_id=session_id, epoch=self.epochs[session_id], **fields)
        self.call(method, request)
        self.epochs[session_id] += 1
        return request

    def pop(self, session_id: str, keep: int) -> Any:
        lengths = [row.length for row in self.model.sessions[session_id]]
        keeps = [keep] * len(lengths)
        made = self.change("Pop", session_id, keep=keeps, expected_lengths=lengths)
        self.model.pop(session_id, keep)
        return made

    def fork(self, session_id: str) -> tuple[str, Any]:
        child = new_id()
        length = self.model.sessions[session_id][0].length
        request = types_pb2.ForkRequest(
            session_id=session_id, epoch=self.epochs[session_id], new_session_id=child
        )
        self.call("Fork", request)
        self.model.fork(session_id, child, length)
        self.epochs[child], self.steps[child] = 1, 0
        return child, request

    def release(self, session_id: str) -> None:
        self.call("Release", types_pb2.ReleaseRequest(session_ids=[session_id]))
        self.model.end(session_id, "release")

    # What must be the case

    def check(self, *, reserved: int = 0) -> None:
        """Compare every series of the worker's own with the model, and RPC and command with it."""
        found = scrape(self.server.metrics_address or "")
        stats = self.server.worker.stats()
        [pool] = stats.pools
        expected = self.expected(stats, reserved)
        ours = {name: value for name, value in found.items() if name.startswith("kvservice_")}
        process = (
            "kvservice_build_info",
            "kvservice_failpoints",
            "kvservice_queue",
            "kvservice_auth_failures",
            "kvservice_config_last_reload",
            "kvservice_stream_call_seconds",
        )
        ours = {name: value for name, value in ours.items() if not name.startswith(process)}
        assert ours == expected
        assert pool.used_pages == self.model.used
        assert self.model.allocations - sum(self.model.frees.values()) == self.model.used
        assert stats.arena_bytes <= stats.budget_bytes
        self.check_calls(found)

    def expected(self, stats: WorkerStats, reserved: int) -> dict[str, float]:
        """Return every series and its value. Only what a pool's growth decides is taken over."""
        model, worker = self.model, 'worker="w0"'
        [pool] = stats.pools
        page_bytes = PAGE_BYTES * LAYERS if pool.page_bytes else 0
        numbers: dict[str, float] = {
            "budget_bytes": SETTINGS.budget_bytes,
            "used_bytes": model.used * page_bytes,
            "leases": len(model.sessions),
            "page_allocations_total": model.allocations,
            "appended_tokens_total": model.appended_tokens,
            "popped_tokens_total": model.popped_tokens,
            "appended_bytes_total": model.appended_bytes,
            "read_bytes_total": model.read_bytes,
            "lease_expirations_total": model.expirations,
            "stale_epoch_rejections_total": model.stale_epochs,
            "moved_bytes_total": 0,
            "arriving_sessions": 0,
        }
        found = {f"kvservice_{name}{{{worker}}}": value for name, value in numbers.items()}
        states = {"used": model.used, "reserved": reserved, "free": pool.free_pages}
        for state, number in states.items():
            found[f'kvservice_pages{{pool="0",state="{state}",{worker}}}'] = number
        total = sum(states.values())
        found[f'kvservice_arena_bytes{{device="cpu",{worker}}}'] = total * page_bytes
        for name, value in (
            ("page_size_bytes", page_bytes),
            ("page_tokens", PAGE_SIZE),
            ("tokens", model.tokens),
        ):
            found[f'kvservice_{name}{{pool="0",{worker}}}'] = value
        found[f'kvservice_tenant_pages{{tenant="default",{worker}}}'] = model.held
        found[f'kvservice_tenant_pages{{tenant="other",{worker}}}'] = 0
        info = f'device="cpu",incarnation="{self.server.incarnation}",{worker}'
        found[f"kvservice_worker_info{{{info}}}"] = 1
        draining = len(model.sessions) if stats.draining else 0
        active = len(model.sessions) - draining
        found[f'kvservice_sessions{{state="active",{worker}}}'] = active
        found[f'kvservice_sessions{{state="draining",{worker}}}'] = draining
        for name, by, known, counts in (
            ("page_frees", "reason", FREE_REASONS, model.frees),
            ("allocation_failures", "reason", FAILURE_REASONS, model.failures),
            ("idempotent_replays", "method", REPLAYED, model.replays),
            ("moves", "result", MOVED, Counter[str]()),
            ("reconcile_discrepancies", "kind", DISCREPANCIES, Counter[str]()),
        ):
            for value in known:
                found[f'kvservice_{name}_total{{{by}="{value}",{worker}}}'] = counts[value]
        # The clock stands still, so that each call has taken no time.
        rows = model.attention_rows
        found |= buckets("attention_duration_seconds", SECONDS, [0.0] * len(rows), device="cpu")
        found |= buckets("attention_batch_size", POWERS, rows)
        found |= buckets("session_pages", POWERS, model.ended_pages)
        found |= buckets("handover_duration_seconds", SECONDS, [])
        for code, number in self.answered.items():
            labels = f'grpc_code="{code}",grpc_method="Attend",grpc_service="{WORKER.full_name}"'
            found[f"kvservice_stream_calls_total{{{labels}}}"] = number
        lane = 'grpc_code="OK",grpc_method="Attend",grpc_service="kvservice.lane"'
        found[f"kvservice_stream_calls_total{{{lane}}}"] = 0
        return found

    def check_calls(self, found: dict[str, float]) -> None:
        """Compare gRPC's metrics: what was called, how it ended, and that nothing is in flight."""
        per_method: Counter[str] = Counter()
        for (method, code), number in self.handled.items():
            labels = series_of(method)
            name = f'grpc_server_handled_total{{grpc_code="{code}",{labels}}}'
            assert found[name] == number, name
            per_method[method] += number
        for method, number in per_method.items():
            labels = series_of(method)
            for name in ("started_total", "msg_received_total", "handling_seconds_count"):
                assert found[f"grpc_server_{name}{{{labels}}}"] == number, (name, method)
        started = sum(v for n, v in found.items() if n.startswith("grpc_server_started_total"))
        assert started == sum(per_method.values())


def series_of(method: str) -> str:
    kind = {"Attend": "bidi_stream", "Read": "server_stream"}.get(method, "unary")
    return f'grpc_method="{method}",grpc_service="{WORKER.full_name}",grpc_type="{kind}"'


def buckets(name: str, bounds: Any, values: list[Any], **labels: str) -> dict[str, float]:
    """Return a histogram's series, counted one by one."""
    text = ",".join([f'{key}="{value}"' for key, value in labels.items()])
    before = f"{text}," if text else ""
    found = {
        f'kvservice_{name}_bucket{{{before}le="{bound}",worker="w0"}}': float(
            sum(value <= bound for value in values)
        )
        for bound in map(float, bounds)
    }
    found[f'kvservice_{name}_bucket{{{before}le="+Inf",worker="w0"}}'] = len(values)
    found[f'kvservice_{name}_count{{{before}worker="w0"}}'] = len(values)
    found[f'kvservice_{name}_sum{{{before}worker="w0"}}'] = sum(values)
    return found


@pytest.fixture
def workload() -> Iterator[Workload]:
    """Return a workload on a worker whose time only moves when told to."""
    clock = ManualClock()
    with WorkerServer(SETTINGS, clock=clock) as server, worker_peer(server.address) as peer:
        yield Workload(server, peer, clock, seed=8)
        server.worker.check()


def test_every_number_is_the_models(workload: Workload) -> None:
    """All verbs, with what they share, copy, evict, repeat and refuse, one check after each."""
    w, model = workload, workload.model
    a = w.open()
    w.append(a, 21)
    w.check()
    sent = w.append(a, 5)
    w.check()
    w.send(sent[-1])  # the last layer again, as after a lost answer
    model.replays["Attend"] += 1
    model.attended(a, 1)
    w.check()
    b, forking = w.fork(a)
    w.check()
    w.call("Fork", forking)
    model.replays["Fork"] += 1
    w.append(a, 1)  # copies the shared page of each row
    w.check()
    w.append(b, 30)
    w.append(b, 1, evict=32)
    w.check()
    popping = w.pop(a, 7)
    w.check()
    w.call("Pop", popping)
    model.replays["Pop"] += 1
    selecting = w.change("Select", a, rows=[1, 0, 0])
    model.select(a, [1, 0, 0])
    w.check()
    w.call("Select", selecting)
    model.replays["Select"] += 1
    w.append(a, 14)
    w.check()
    stale = types_pb2.ResetRequest(session_id=a, epoch=1)
    w.call("Reset", stale, errors.StaleEpoch)
    old = w.attend(a, 1, step=99)[0]
    old.epoch = 1
    w.send(old, errors.StaleEpoch)
    model.stale_epochs += 2
    w.check()
    read = worker_pb2.ReadRequest(session_id=b, epoch=1, layer=0, start=32, stop=50)
    method = w.peer.channel.unary_stream(f"/{WORKER.full_name}/Read")
    assert len(list(method(read.SerializeToString(), timeout=10))) == 1
    w.handled["Read", "OK"] += 1
    model.read(b, 18)
    w.check()
    resetting = w.change("Reset", a)
    model.reset(a)
    w.check()
    w.call("Reset", resetting)
    model.replays["Reset"] += 1
    attaching = w.change("Attach", a)
    w.call("Attach", attaching)
    model.replays["Attach"] += 1
    w.check()
    w.release(b)
    w.check()
    w.clock.advance(61.0)
    until(lambda: not w.server.worker.num_sessions)
    model.end(a, "lease_expired")
    w.check()
    assert model.used == 0


def test_refusals_and_reservations_are_counted(workload: Workload) -> None:
    """Room that is promised is reserved; what finds none is counted, by why."""
    w, model = workload, workload.model
    share = NUM_PAGES // 2 // ROWS + 4  # pages of a row: two such reservations are too many
    a = w.open(reserve_tokens=share * PAGE_SIZE)
    w.append(a, 20)
    w.check(reserved=(share - 2) * ROWS)
    layer = LayerSpec(window=WINDOW, geometry=GEOMETRY)
    greedy = core.SessionSpec(
        ROWS, layers=(layer,) * LAYERS, reserve_tokens=share * PAGE_SIZE, ttl_s=60.0
    )
    for _ in range(3):
        w.call("Allocate", allocate_request(new_id(), greedy), errors.OutOfPages)
    model.failures["out_of_pages"] += 3
    w.check(reserved=(share - 2) * ROWS)
    for _ in range(3):
        w.open()
    modest = core.SessionSpec(ROWS, layers=(layer,) * LAYERS, ttl_s=60.0)
    w.call("Allocate", allocate_request(new_id(), modest), errors.TooManySessions)
    model.failures["too_many_sessions"] += 1
    w.server.worker.drain()
    w.call("Allocate", allocate_request(new_id(), modest), errors.Draining)
    model.failures["draining"] += 1
    w.check(reserved=(share - 2) * ROWS)
    for session_id in list(model.sessions):
        w.release(session_id)
    w.check()


def test_random_workload_is_the_models(workload: Workload) -> None:
    """Two hundred calls in no particular order; allocations - frees = used after each."""
    w, model, rng = workload, workload.model, workload.rng
    w.open()
    for number in range(200):
        session_id = rng.choice(sorted(model.sessions))
        rows = model.sessions[session_id]
        action = rng.choice(("append", "append", "append", "pop", "select", "fork", "release"))
        if action == "append" and model.used < NUM_PAGES // 2:
            w.append(session_id, rng.randint(1, 20))
        elif action == "pop" and rows[0].length:
            w.pop(session_id, rng.randint(0, rows[0].length))
        elif action == "select":
            indices = [rng.randrange(len(rows)) for _ in range(rng.randint(1, 3))]
            w.change("Select", session_id, rows=indices)
            model.select(session_id, indices)
        elif action == "fork" and len(model.sessions) < SETTINGS.max_sessions:
            w.fork(session_id)
        elif action == "release" and len(model.sessions) > 1:
            w.release(session_id)
        if number % 4 == 0:
            w.check()
    w.check()


def test_audit_finds_pages_that_no_table_explains(workload: Workload) -> None:
    """A reference too many, or too few, is counted once by its kind; a good worker has none."""
    w = workload
    session_id = w.open()
    w.append(session_id, 40)
    assert w.server.worker.audit() == 0
    [pool] = w.server.worker._pools
    pages = [row.entries[0] for row in _tables(w, session_id)]
    pool.pages.retain(pages[:1])
    pool.pages._refcounts[pages[1]] -= 1
    found = (w.server.worker.audit(), w.server.worker.audit(), w.server.worker.audit())
    assert found == (2, 0, 0)
    samples = scrape(w.server.metrics_address or "")
    pool.pages.release(pages[:1])
    pool.pages._refcounts[pages[1]] += 1
    for kind, number in (("leaked", 1), ("double_owned", 0), ("missing", 1)):
        labels = f'kind="{kind}",worker="w0"'
        assert samples[f"kvservice_reconcile_discrepancies_total{{{labels}}}"] == number


def _tables(w: Workload, session_id: str) -> Any:
    [session] = [s for s in w.server.worker._sessions.all() if s.key[1] == session_id]
    [group] = session.groups.values()
    return group.tables


def test_rpc_command_and_metrics_agree(capsys: pytest.CaptureFixture[str]) -> None:
    """`PageStats` of the manager, `kvservice stats --json`, and what both workers export."""
    with ExitStack() as stack:
        settings = ManagerSettings(metrics_port=0, limits=LIMITS)
        manager = stack.enter_context(ManagerServer(settings))
        peer = stack.enter_context(manager_peer(manager.address))
        workers = {}
        for name in ("w0", "w1"):
            settings_of = WorkerSettings(
                name, 1 << 22, metrics_port=0, manager_address=manager.address, limits=LIMITS
            )
            workers[name] = stack.enter_context(WorkerServer(settings_of))
        until(lambda: len(peer.call("ListWorkers", manager_pb2.ListWorkersRequest()).workers) == 2)
        for spread in (1, 2):
            spec = core.SessionSpec(1, layers=(LayerSpec(geometry=GEOMETRY),), spread=spread)
            request = allocate_request(new_id(), spec)
            request.spec.ttl.CopyFrom(Duration(seconds=3600))
            session = peer.call("Allocate", request).session
            for extent in session.extents[:1]:
                with worker_peer(extent.address) as of_worker:
                    kv = from_numpy(np.ones((40, KV_HEADS, DIM), np.float32))
                    call = core.AttendCall(
                        session_id=session.session_id,
                        epoch=1,
                        step=1,
                        layer=0,
                        q=from_numpy(np.ones((40, HEADS, DIM), np.float32)),
                        scale=1.0,
                        mask=core.Mask(),
                        k=kv,
                        v=kv,
                        header=core.StepHeader((40,)),
                        positions=(0,),
                        partial=spread > 1,
                    )
                    of_worker.attend_once(calls.attend_call_to_pb(call, call_id=1))
        by_rpc = peer.call("PageStats", types_pb2.PageStatsRequest()).workers
        assert main(["stats", "--address", manager.address, "--json"]) == 0
        by_command = {w["workerId"]: w for w in json.loads(capsys.readouterr().out)["workers"]}
        assert sorted(by_command) == ["w0", "w1"]
        assert sum(pool.used_page_count for stats in by_rpc for pool in stats.pools) == 6
        for stats in by_rpc:
            samples = scrape(workers[stats.worker_id].metrics_address or "")
            assert exported(convert.stats_from_pb(stats)).items() <= samples.items()
            said = by_command[stats.worker_id]
            assert said["pageAllocationCount"] == stats.page_allocation_count
            assert said["attentionSeconds"]["counts"] == list(stats.attention_seconds.counts)
            assert [pool["usedPageCount"] for pool in said["pools"]] == [
                pool.used_page_count for pool in stats.pools
            ]
            assert {each["reason"]: each["count"] for each in said["pageFrees"]} == {
                each.reason: each.count for each in stats.page_frees
            }


def exported(stats: WorkerStats) -> dict[str, float]:
    """Return what a worker's snapshot, as it came over the wire, must look like when exported."""
    worker = f'worker="{stats.worker_id}"'
    numbers = {
        "budget_bytes": stats.budget_bytes,
        "used_bytes": stats.used_bytes,
        "leases": stats.num_sessions,
        "page_allocations_total": stats.page_allocations,
        "appended_tokens_total": stats.appended_tokens,
        "popped_tokens_total": stats.popped_tokens,
        "appended_bytes_total": stats.appended_bytes,
        "read_bytes_total": stats.read_bytes,
        "lease_expirations_total": stats.lease_expirations,
        "stale_epoch_rejections_total": stats.stale_epochs,
        "attention_batch_size_count": stats.attention_rows.num_values,
        "session_pages_count": stats.session_pages.num_values,
        "moved_bytes_total": stats.moved_bytes,
        "handover_duration_seconds_count": stats.handover_seconds.num_values,
    }
    found = {f"kvservice_{name}{{{worker}}}": float(value) for name, value in numbers.items()}
    for pool in stats.pools:
        for state, number in (
            ("used", pool.used_pages),
            ("reserved", pool.reserved_pages),
            ("free", pool.free_pages),
        ):
            found[f'kvservice_pages{{pool="{pool.pool}",state="{state}",{worker}}}'] = number
    for name, by, counts in (
        ("page_frees", "reason", stats.page_frees),
        ("allocation_failures", "reason", stats.allocation_failures),
        ("idempotent_replays", "method", stats.replays),
        ("moves", "result", stats.moves),
        ("reconcile_discrepancies", "kind", stats.page_discrepancies),
    ):
        for value, number in counts.items():
            found[f'kvservice_{name}_total{{{by}="{value}",{worker}}}'] = number
    return found
