"""Settings: what can be is taken as it is, what cannot is refused in one line."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvservice.config import (
    Budget,
    ConfigError,
    ManagerSettings,
    Security,
    ServerLimits,
    WorkerSettings,
    format_size,
    memory_limit_bytes,
    parse_budget,
    parse_size,
)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1", 1),
        ("4096", 4096),
        ("2GiB", 2 << 30),
        (" 512 MiB ", 512 << 20),
        ("1.5KiB", 1536),
        ("3TB", 3 * 10**12),
        ("10kB", 10_000),
        ("7B", 7),
    ],
)
def test_sizes_are_read(text: str, size: int) -> None:
    """Bytes, or a number with a unit; binary and decimal units mean what they say."""
    assert parse_size(text) == size


@pytest.mark.parametrize(
    "text", ["", "GiB", "-1", "1 GB GB", "2gib", "1e9", "0", "0.2B", "inf", "2G"]
)
def test_other_texts_are_no_sizes(text: str) -> None:
    """The message names what was given, and says how to write it."""
    with pytest.raises(ConfigError) as caught:
        parse_size(text)
    assert repr(text) in str(caught.value)
    assert "\n" not in str(caught.value)


@given(size=st.integers(1, 1 << 50))
def test_written_sizes_are_read_again(size: int) -> None:
    """As exactly as four digits are."""
    assert abs(parse_size(format_size(size)) - size) <= size * 1e-3


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: ManagerSettings(port=70_000), "port .*70000"),
        (lambda: ManagerSettings(metrics_port=-1), "metrics_port .*-1"),
        (lambda: ManagerSettings(host=""), "host"),
        (lambda: ManagerSettings(host="0.0.0.0"), "advertise_host"),
        (lambda: ManagerSettings(workers_expected=-1), "workers_expected"),
        (lambda: WorkerSettings("", 1 << 20), "worker_id"),
        (lambda: WorkerSettings("a b", 1 << 20), "worker_id .*'a b'"),
        (lambda: WorkerSettings("w", 5), "budget_bytes .*5"),
        (lambda: WorkerSettings("w", 1 << 20, max_sessions=0), "max_sessions"),
        (lambda: WorkerSettings("w", 1 << 20, host="::"), "advertise_host"),
        (lambda: ServerLimits(max_streams=0), "max_streams .*0"),
        (lambda: ServerLimits(max_frame_bytes=10, fragment_bytes=11), "fragment_bytes"),
    ],
)
def test_settings_that_cannot_be_are_refused(make: Callable[[], object], text: str) -> None:
    """By name, rule and value, before anything is started."""
    with pytest.raises(ConfigError, match=text) as caught:
        make()
    assert "\n" not in str(caught.value)


def test_defaults_can_be() -> None:
    """What nobody has set is good as it stands; all addresses may be listened on, if told apart."""
    assert ManagerSettings().limits == ServerLimits()
    open_to_all = Security(insecure=True)
    everywhere = WorkerSettings(
        "w0", 1 << 20, host="0.0.0.0", advertise_host="10.0.0.1", security=open_to_all
    )
    assert everywhere.port == 0


MEMINFO = "MemTotal:       16777216 kB\nMemFree:        1 kB\n"


@pytest.mark.parametrize(
    ("files", "limit"),
    [
        pytest.param({}, 16 << 30, id="no-groups"),
        pytest.param(
            {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": "4294967296\n"},
            4 << 30,
            id="container-v2",
        ),
        pytest.param(
            {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": "max\n"},
            16 << 30,
            id="no-limit-v2",
        ),
        pytest.param(
            {
                "proc/self/cgroup": "0::/pod/container\n",
                "sys/fs/cgroup/pod/memory.max": "2147483648\n",
                "sys/fs/cgroup/pod/container/memory.max": "3221225472\n",
            },
            2 << 30,
            id="tightest-of-nested-v2",
        ),
        pytest.param(
            {
                "proc/self/cgroup": "5:cpu,cpuacct:/x\n4:memory:/docker/abc\n0::/\n",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": "1073741824\n",
            },
            1 << 30,
            id="container-v1",
        ),
        pytest.param(
            {
                "proc/self/cgroup": "4:memory:/\n",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
            },
            16 << 30,
            id="no-limit-v1",
        ),
    ],
)
def test_memory_limit_is_the_tightest(files: Mapping[str, str], limit: int, tmp_path: Path) -> None:
    """Of all control groups that this process is in, and of the machine."""
    for name, text in {"proc/meminfo": MEMINFO, **files}.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert memory_limit_bytes(tmp_path) == limit


def test_memory_limit_of_this_process() -> None:
    """There is one, and it is not absurd."""
    assert 64 << 20 < memory_limit_bytes() < 1 << 50


@pytest.mark.parametrize(
    ("text", "num_bytes"), [("70%", 70 * 1024), ("1 %", 1024), ("2GiB", 2 << 30), ("64KiB", 65536)]
)
def test_budget_is_a_size_or_a_share(text: str, num_bytes: int) -> None:
    """A share is of what there is; a size is itself."""
    assert parse_budget(text).of(100 * 1024) == num_bytes
    assert Budget().of(1) == 2 << 30


@pytest.mark.parametrize("text", ["0%", "96%", "100%", "7.5%", "-5%", "%", "99999%", ""])
def test_other_budgets_are_refused(text: str) -> None:
    """Nothing is left for the process itself, or it is not a budget at all."""
    with pytest.raises(ConfigError):
        parse_budget(text)
