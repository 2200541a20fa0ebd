"""Subcommands that only look: status, stats, workers, sessions. Each returns the exit code."""

from __future__ import annotations

import argparse
import json
from typing import Any, Final

from kvservice import config
from kvservice.cli.exits import NOT_RUNNING, OK, UNHEALTHY, NotRunning
from kvservice.cli.securing import calling, tls_of
from kvservice.cli.serving import described
from kvservice.cluster.processes import is_alive
from kvservice.cluster.state import Kind, RunState, StateStore
from kvservice.core.errors import KVServiceError
from kvservice.core.session import WorkerStats
from kvservice.tables import table
from kvservice.wire import convert
from kvservice.wire.json_form import json_form
from kvservice_client import Client, connect

_TIMEOUT_S: Final = 3.0


def status(arguments: argparse.Namespace) -> int:
    """Say where the manager is, and how its workers are."""
    state = None
    if arguments.address is None:
        state = find_state(arguments.name)
        if state is None:
            return _print_status(arguments, NOT_RUNNING, {"reason": "not running"})
        if state.kind is Kind.LOCAL and (state.head is None or not is_alive(state.head)):
            reason = "its Ray has died: `kvservice down` cleans up"
            return _print_status(arguments, NOT_RUNNING, described(state) | {"reason": reason})
    found: dict[str, object] = {} if state is None else described(state)
    found["managerAddress"] = address = arguments.address or (state and state.manager_address)
    try:
        with connect(str(address), timeout_s=_TIMEOUT_S, **calling(arguments)) as client:
            workers = _workers(client)
            expected = arguments.expect_workers
            if expected is None:
                expected = client.workers_expected() or 1
    except KVServiceError as error:
        return _print_status(arguments, UNHEALTHY, found | {"reason": error.message})
    found["workers"] = workers
    num_alive = sum(worker["state"] == "WORKER_STATE_ALIVE" for worker in workers)
    if num_alive < expected:
        found["reason"] = f"{num_alive} of {expected} workers alive"
        return _print_status(arguments, UNHEALTHY, found)
    return _print_status(arguments, OK, found)


def stats(arguments: argparse.Namespace) -> int:
    """Show how many pages and bytes are used."""
    with connect_to(arguments) as client:
        found = client.page_stats()
    if arguments.json:
        form = [json_form(convert.stats_to_pb(worker)) for worker in found]
        print(json.dumps({"workers": form}, indent=2))
    else:
        print(stats_table(found))
    return OK


def workers(arguments: argparse.Namespace) -> int:
    """List the workers."""
    with connect_to(arguments) as client:
        found = _workers(client)
    as_json = arguments.json
    print(json.dumps({"workers": found}, indent=2) if as_json else _workers_table(found, arguments))
    return OK


def sessions(arguments: argparse.Namespace) -> int:
    """List the sessions."""
    with connect_to(arguments) as client:
        found = client.list_sessions()
    if arguments.json:
        form = [json_form(convert.session_to_pb(session)) for session in found]
        print(json.dumps({"sessions": form}, indent=2))
        return OK
    rows = [
        (
            session.session_id,
            session.spec.num_rows,
            max((length for layer in session.lengths for length in layer), default=0),
            session.epoch,
            ", ".join(extent.worker_id for extent in session.extents),
        )
        for session in found
    ]
    print(table(("session", "rows", "longest", "epoch", "workers"), rows))
    return OK


def stats_table(found: list[WorkerStats]) -> str:
    """Return a line for each worker. Pages count over all its pools."""
    rows = [
        (
            worker.worker_id,
            worker.num_sessions,
            sum(pool.used_pages for pool in worker.pools),
            sum(pool.reserved_pages for pool in worker.pools),
            sum(pool.free_pages for pool in worker.pools),
            config.format_size(worker.used_bytes),
            config.format_size(worker.arena_bytes),
            config.format_size(worker.budget_bytes),
        )
        for worker in found
    ]
    headers = ("worker", "sessions", "used", "reserved", "free", "used bytes", "arenas", "budget")
    return table(headers, rows)


def _print_status(arguments: argparse.Namespace, code: int, found: dict[str, Any]) -> int:
    found = {"name": arguments.name, "healthy": code == OK, **found}
    if arguments.json:
        print(json.dumps(found, indent=2))
        return code
    where = f" at {found['managerAddress']}" if found.get("managerAddress") else ""
    print(f"{'healthy' if code == OK else found['reason']}{where}")
    if found.get("workers"):
        print(_workers_table(found["workers"], arguments))
    return code


def _workers(client: Client) -> list[dict[str, Any]]:
    return [json_form(worker) for worker in client.list_workers()]


def _workers_table(found: list[dict[str, Any]], arguments: argparse.Namespace) -> str:
    scheme = "http" if tls_of(arguments) is None else "https"
    rows = [
        (
            worker["workerId"],
            worker["state"].removeprefix("WORKER_STATE_").lower(),
            worker["address"],
            worker["device"],
            worker["sessionCount"],
            config.format_size(worker["freeBytes"]),
            f"{scheme}://{address}/metrics" if (address := worker["metricsAddress"]) else "",
        )
        for worker in found
    ]
    return table(("worker", "state", "address", "device", "sessions", "free", "metrics"), rows)


def connect_to(arguments: argparse.Namespace) -> Client:
    """Return a client of the stated or recorded service."""
    address = arguments.address
    if address is None:
        state = find_state(arguments.name)
        if state is None:
            raise NotRunning(
                f'nothing is running under the name "{arguments.name}": '
                'start it by "kvservice up", or state --address HOST:PORT'
            )
        address = state.manager_address
    return connect(address, timeout_s=_TIMEOUT_S, **calling(arguments))


def find_state(name: str) -> RunState | None:
    """Return the record of a service that has come as far as serving."""
    state = StateStore(config.run_directory(), name).find()
    return state if state is not None and state.manager_address else None
