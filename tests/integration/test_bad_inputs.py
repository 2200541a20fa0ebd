"""The catalogue of bad input, over real sockets: each with its code, and nothing lost or changed.

The numbers are those of the catalogue that the service was designed by. Not here, since nothing
like it exists: 60 and 61 (bytes are little-endian and packed by definition, and there are no
checksums), 64 (page ids never travel). 14 is in `test_tls.py`, 66 with the charts.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import grpc
import pytest

from kvservice.config import ManagerSettings, Security, WorkerSettings
from kvservice.core import errors
from kvservice.runtime.manager import ManagerServer
from kvservice.runtime.worker import WorkerServer
from kvservice.v1 import types_pb2, worker_pb2
from kvservice.wire.names import WORKER
from tests import raw_http2
from tests.bad_calls import (
    EMPTY_IS_GOOD,
    GET,
    LIMITS,
    MAX_GROWTH_BYTES,
    NUM_PAGES,
    QUOTAS,
    Bad,
    Bench,
    again,
    allocate,
    as_tenant,
    attend,
    bad_start,
    cancelled,
    closed,
    code_of,
    concurrent,
    conversation,
    draining,
    evicted_pop,
    expired,
    flood,
    huge_batch,
    long_row,
    many_pages,
    many_sessions,
    on_every_method,
    other_request,
    overdue,
    part,
    pop,
    port_in_use,
    quota,
    rapid_reset,
    raw,
    same_request,
    spread_of_nan,
    streams,
    too_much_memory,
    unary,
    unknown_encoding,
    without_header,
)
from tests.serving import (
    DIM,
    KV_HEADS,
    PAGE_BYTES,
    allocate_request,
    attend_call,
    manager_peer,
    new_id,
    spec,
    until,
    worker_peer,
)

pytestmark = pytest.mark.usefixtures("leaves_nothing")


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    folder = tmp_path_factory.mktemp("quotas")
    quotas = folder / "quotas.toml"
    quotas.write_text(QUOTAS)
    security = Security(quota_file=str(quotas))
    with ExitStack() as stack:
        manager = stack.enter_context(ManagerServer(ManagerSettings(limits=LIMITS)))
        settings = WorkerSettings(
            "w0",
            NUM_PAGES * PAGE_BYTES,
            manager_address=manager.address,
            metrics_port=0,
            limits=LIMITS,
            security=security,
        )
        worker = stack.enter_context(WorkerServer(settings))
        peer = stack.enter_context(worker_peer(worker.address))
        front = stack.enter_context(manager_peer(manager.address))
        until(lambda: len(manager.manager.workers()) == 1)
        bench = Bench(manager, worker, peer, front)
        bench.open()
        before = resident_bytes()
        yield bench
        grown = resident_bytes() - before
        assert grown < MAX_GROWTH_BYTES, f"bad input has left {grown >> 20} MiB behind"
        worker.worker.check()


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


BIG = b"\x0a" + bytes([0x80, 0x80, 0x80, 0x01]) + bytes(2 << 20)
LAYER = {"kv_head_count": KV_HEADS, "k_dim": DIM, "v_dim": DIM}
NOBODY = "00000000-0000-4000-8000-000000000000"
NO_IDS = (
    "",
    "x" * 100_000,
    "a\0b",
    "../../etc/passwd",
    "a\nb",
    NOBODY[:-1] + "A",
    "00000000-0000-1000-8000-000000000000",  # of another version
)
Code = str

CASES: list[tuple[str, Code, Bad]] = [
    ("1 unknown method", "UNIMPLEMENTED", raw(f"/{WORKER.full_name}/Nothing")),
    ("2 unknown service", "UNIMPLEMENTED", raw("/nobody.Service/Do")),
    ("3 path /x", "UNIMPLEMENTED", raw("/x")),
    ("4 message over the limit", "RESOURCE_EXHAUSTED", raw(GET, BIG)),
    (
        "5 gzip bomb",
        "RESOURCE_EXHAUSTED",
        raw(GET, bytes(50 << 20), compression=grpc.Compression.Gzip),
    ),
    ("6 metadata", "RESOURCE_EXHAUSTED", raw(GET, metadata=(("filler", "x" * (20 << 10)),))),
    ("7 illegal metadata", "INTERNAL", raw(GET, metadata=(("Illegal Key", "x"),))),
    ("8 random bytes", "UNAVAILABLE", closed(bytes((7 * i + 3) % 256 for i in range(1024)))),
    ("9 HTTP/1.1", "UNAVAILABLE", closed(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")),
    ("10 silence", "UNAVAILABLE", closed(b"")),
    ("10 only the preface", "UNAVAILABLE", closed(raw_http2.PREFACE)),
    ("11 rapid reset", "OK|UNAVAILABLE", rapid_reset),
    ("12 ping flood", "UNAVAILABLE", flood),
    # What the HTTP/2 layer says by itself, before any of the service's code runs.
    ("13 unknown encoding", "INTERNAL", unknown_encoding),
    ("15 too many streams", "RESOURCE_EXHAUSTED", streams),
    ("16 deadline", "DEADLINE_EXCEEDED", overdue),
    ("17 cancelled", "CANCELLED", cancelled),
    ("18 truncated", "INVALID_ARGUMENT", on_every_method(b"\x0a\x05ab")),
    ("19 random", "INVALID_ARGUMENT", on_every_method(b"\xff\xfe\xfd\xfc")),
    ("20 no UTF-8", "INVALID_ARGUMENT", unary("GetSession", b"\x0a\x02\xff\xfe")),
    (
        "21 unknown fields",
        "INVALID_ARGUMENT",
        on_every_method(b"\xf8\x07\x01", but=EMPTY_IS_GOOD),
    ),
    ("22 wire type", "INVALID_ARGUMENT", unary("GetSession", b"\x08\x01")),
    (
        "23 varint of 2**40",
        "INVALID_ARGUMENT",
        unary(
            "Allocate",
            b"\x0a\x24" + NOBODY.encode() + b"\x12\x07\x08\x80\x80\x80\x80\x80\x20",
            front=True,
        ),
    ),
    ("24 empty", "INVALID_ARGUMENT", on_every_method(b"", but=EMPTY_IS_GOOD)),
    ("33 old epoch", "ABORTED", attend(epoch=9)),
    ("33 old incarnation", "ABORTED", attend(incarnation="gone")),
    ("33 never opened", "NOT_FOUND", attend(session_id=NOBODY)),
    *[
        (f"35 id {text[:12]!r}", "INVALID_ARGUMENT", allocate(text, front=front))
        for front in (True, False)
        for text in NO_IDS
    ],
    (
        "36 unknown",
        "NOT_FOUND",
        unary("GetSession", types_pb2.GetSessionRequest(session_id=NOBODY)),
    ),
    ("37 id in use", "ALREADY_EXISTS", other_request),
    ("38 repeat", "OK", same_request),
    (
        "39 fork onto the parent",
        "ALREADY_EXISTS",
        unary(
            "Fork",
            lambda b: types_pb2.ForkRequest(
                session_id=b.session_id, epoch=1, new_session_id=b.session_id
            ),
        ),
    ),
    ("40 no epoch", "INVALID_ARGUMENT", pop(epoch=0)),
    ("41 dtype", "INVALID_ARGUMENT", attend(q__dtype=99)),
    ("41 mask", "INVALID_ARGUMENT", attend(mask__kind=99)),
    ("42 renew what is over", "NOT_FOUND", expired),
    ("43 ttl 0", "INVALID_ARGUMENT", allocate(spec__ttl__seconds=0)),
    ("43 ttl negative", "INVALID_ARGUMENT", allocate(spec__ttl__seconds=-1)),
    ("43 ttl 10**9", "INVALID_ARGUMENT", allocate(spec__ttl__seconds=10**9)),
    ("44 no rows", "INVALID_ARGUMENT", allocate(spec__row_count=0)),
    ("44 reserve nothing", "INVALID_ARGUMENT", allocate(spec__reserve_tokens=0)),
    ("45 sessions", "RESOURCE_EXHAUSTED", as_tenant("small", many_sessions)),
    ("45 rows", "RESOURCE_EXHAUSTED", quota(lambda: allocate_request(new_id(), spec(num_rows=3)))),
    ("45 tokens", "RESOURCE_EXHAUSTED", as_tenant("small", long_row)),
    ("45 pages", "RESOURCE_EXHAUSTED", as_tenant("small", many_pages)),
    (
        "46 full",
        "RESOURCE_EXHAUSTED",
        allocate(spec__row_count=NUM_PAGES, spec__reserve_tokens=16, front=False),
    ),
    ("47 never fits", "INVALID_ARGUMENT", allocate(spec__reserve_tokens=1 << 30)),
    ("48 keep negative", "INVALID_ARGUMENT", pop(keep=[-1])),
    ("48 keep of two rows", "INVALID_ARGUMENT", pop(keep=[1, 1])),
    ("48 evicted", "OUT_OF_RANGE", evicted_pop),
    ("49 other lengths", "ABORTED", pop(expected_lengths=[19])),
    ("49 other position", "ABORTED", attend(positions=[25])),
    ("50 two at once", "ABORTED", concurrent),
    (
        "51 beyond the bound",
        "OUT_OF_RANGE",
        lambda b: b.peer.attend_once(attend_call(b.session_id, 20, 181, step=2)),
    ),
    (
        "52 append nothing",
        "INVALID_ARGUMENT",
        unary(
            "Append",
            lambda b: types_pb2.AppendRequest(
                session_id=b.session_id, epoch=1, token_count=0, expected_lengths=[20]
            ),
        ),
    ),
    ("53 draining", "UNAVAILABLE", draining),
    ("54 never written", "INVALID_ARGUMENT", attend(layer=1)),
    ("55 too few bytes", "INVALID_ARGUMENT", attend(k__data=b"abcd")),
    ("55 too many bytes", "INVALID_ARGUMENT", attend(q__data=bytes(1 << 16))),
    ("56 overflow", "INVALID_ARGUMENT", attend(q__shape=[1 << 40, 1 << 40, 1])),
    ("56 negative", "INVALID_ARGUMENT", attend(q__shape=[-1, -4, DIM])),
    ("56 zero", "INVALID_ARGUMENT", attend(q__shape=[0, 4, DIM], q__data=b"")),
    ("56 rank 0", "INVALID_ARGUMENT", attend(q__shape=[])),
    ("56 rank 64", "INVALID_ARGUMENT", attend(q__shape=[1] * 64)),
    ("57 dim", "INVALID_ARGUMENT", attend(k__shape=[1, KV_HEADS * 2, DIM // 2])),
    ("57 heads", "INVALID_ARGUMENT", attend(k__shape=[1, 1, DIM * KV_HEADS])),
    ("57 layer -1", "INVALID_ARGUMENT", attend(layer=-1)),
    ("57 layer n", "INVALID_ARGUMENT", attend(layer=1)),
    ("58 dtype of another layer", "INVALID_ARGUMENT", attend(q__dtype=4, k__dtype=4, v__dtype=4)),
    ("58 unsupported", "INVALID_ARGUMENT", attend(k__dtype=5)),
    ("59 NaN", "OK", spread_of_nan),
    ("62 a million rows", "INVALID_ARGUMENT|RESOURCE_EXHAUSTED", huge_batch),
    ("63 scale NaN", "INVALID_ARGUMENT", attend(scale=float("nan"))),
    ("63 scale infinite", "INVALID_ARGUMENT", attend(scale=float("inf"))),
    ("65 no header", "INVALID_ARGUMENT", conversation(without_header)),
    ("65 other header", "ABORTED", conversation(again(), again(header__counts=[3]))),
    ("65 ends within", "INVALID_ARGUMENT", conversation(part(b"abc", 9))),
    (
        "65 call within",
        "INVALID_ARGUMENT",
        conversation(part(b"abc", 9), worker_pb2.AttendRequest(call=worker_pb2.AttendCall())),
    ),
    ("65 more than announced", "INVALID_ARGUMENT", conversation(part(b"abcd", 3, last=True))),
    ("67 no key", "INVALID_ARGUMENT", bad_start(Security(key_file="/nowhere/key"))),
    ("68 memory", "INVALID_ARGUMENT", too_much_memory),
    ("69 port in use", "INVALID_ARGUMENT", port_in_use),
]


@pytest.mark.parametrize(("code", "bad"), [case[1:] for case in CASES], ids=[c[0] for c in CASES])
def test_bad_input(bench: Bench, code: Code, bad: Bad) -> None:
    """Each with its code; nothing is changed by it; and the next good call is served."""
    before = bench.state()
    session_id = bench.session_id
    seen, error = code_of(lambda: bad(bench))
    assert seen in code.split("|"), error
    if error is not None:
        assert "Traceback" not in str(error)
        if isinstance(error, errors.QuotaExceeded | errors.OutOfPages):
            assert (error.retry_delay_s is None) is isinstance(error, errors.QuotaExceeded)
    if session_id == bench.session_id:
        assert bench.state()[:2] == before[:2]
        assert bench.state()[3:] == before[3:]
    bench.check_serving()
