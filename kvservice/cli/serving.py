"""Subcommands that run something: up, down, worker, demo. Each returns the exit code."""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import sys
import threading
import uuid
from typing import Final

from kvservice import config
from kvservice.cli.exits import OK, Interrupted
from kvservice.clock import Clock, SystemClock
from kvservice.cluster.launch import Down, Launcher
from kvservice.cluster.ports import check_port_free
from kvservice.cluster.state import RunState, ServiceOptions, StateStore
from kvservice.core.errors import NotFound, Unavailable

_POLL_S: Final = 0.5


def up(arguments: argparse.Namespace) -> int:
    """Start manager and workers on Ray; unless detached, stay until a signal and end them."""
    options = ServiceOptions(
        num_workers=arguments.workers,
        memory_bytes=arguments.memory,
        device=arguments.device,
        host=arguments.host,
        port=arguments.port,
        worker_port=arguments.worker_port,
        lane_port=arguments.lane_port,
        metrics_port=arguments.metrics_port,
        worker_metrics_port=arguments.worker_metrics_port,
    )
    launcher = _launcher(arguments)
    state = launcher.up(
        options,
        ray_address=arguments.address,
        timeout_s=arguments.timeout,
        may_exist=arguments.detach,
    )
    if arguments.json:
        text = json.dumps(described(state))
    else:
        end = "end it by: kvservice down" if arguments.detach else "end it by Ctrl-C"
        name = "" if state.name == "default" else f" --name {state.name}"
        text = (
            f"serving at {state.manager_address}, {state.options.num_workers} workers\n"
            f'connect by: kvservice_client.connect("{state.manager_address}")\n'
            f"{end}{name if arguments.detach else ''}"
        )
    if arguments.detach:
        print(text, flush=True)
        return OK
    return _stay(launcher, state, SystemClock(), text)


def _stay(launcher: Launcher, state: RunState, clock: Clock, text: str) -> int:
    """Say `text`, wait for a signal, then end the service; or notice that it has ended."""
    never = threading.Event()
    try:
        print(text, flush=True)  # whoever has read it may end us at once
        while not launcher.is_over(state):
            clock.wait(never, _POLL_S)
    except Interrupted:
        launcher.down()
        return OK
    if launcher.down().was_running:
        raise Unavailable("Ray has ended by itself; what was left of the service has been ended")
    return OK  # by another command


def down(arguments: argparse.Namespace) -> int:
    """End what `up` has started, and nothing else."""
    launcher = _launcher(arguments)
    result = Down(was_running=launcher.forget()) if arguments.forget else launcher.down()
    if arguments.json:
        done = {
            "wasRunning": result.was_running,
            "killedActors": list(result.killed_actors),
            "endedProcessCount": result.ended_processes,
        }
        print(json.dumps(done))
    elif not result.was_running:
        print(f'nothing was running under the name "{arguments.name}"')
    elif arguments.forget:
        print("forgotten")
    elif not (result.killed_actors or result.ended_processes):
        print("nothing of it was left, or ours to end")
    else:
        print("ended")
    return OK


def worker(arguments: argparse.Namespace) -> int:
    """Run one worker alone, without Ray, until a signal."""
    settings = config.WorkerSettings(
        worker_id=arguments.id or f"worker-{uuid.uuid4().hex[:8]}",
        budget_bytes=arguments.memory,
        host=arguments.host,
        port=arguments.port,
        advertise_host=arguments.advertise_host,
        lane_port=arguments.lane_port,
        metrics_port=arguments.metrics_port,
        device=arguments.device,
        manager_address=arguments.manager,
    )
    for name in ("port", "lane_port", "metrics_port"):
        if port := getattr(arguments, name):
            check_port_free(arguments.host, port, f"--{name.replace('_', '-')}")
    try:
        from kvservice.runtime.worker import WorkerServer
    except ImportError as error:
        raise NotFound(
            f"a worker needs the package {error.name}: pip install 'kvservice[server]'"
        ) from error
    logging.basicConfig(level=logging.WARNING)
    # Whoever has read what it says may end it at once.
    with WorkerServer(settings) as server, contextlib.suppress(Interrupted):
        if arguments.json:
            said = {
                "workerId": settings.worker_id,
                "address": server.address,
                "metricsAddress": server.metrics_address,
            }
            print(json.dumps(said), flush=True)
        else:
            print(f"{settings.worker_id} serves at {server.address}", flush=True)
        threading.Event().wait()
    return OK


def demo(arguments: argparse.Namespace) -> int:
    """Generate text by a model whose keys and values are on workers, and compare."""
    try:
        from kvservice.demo.run import DemoOptions, run_demo
    except ImportError as error:
        raise NotFound(
            f"the demo needs the package {error.name}: run `make demo`, "
            "or pip install 'kvservice[demo]'"
        ) from error
    options = DemoOptions(
        prompts=tuple(arguments.prompt or ()),
        max_new_tokens=arguments.max_new_tokens,
        num_workers=arguments.workers,
        address=arguments.address,
        model=arguments.model,
    )
    return run_demo(options)


def described(state: RunState) -> dict[str, object]:
    """Return a record as JSON for scripts."""
    return {
        "name": state.name,
        "managerAddress": state.manager_address,
        "metricsAddress": state.metrics_address,
        "workerCount": state.options.num_workers,
        "rayAddress": state.ray_address,
        "kind": state.kind.value,
    }


def _launcher(arguments: argparse.Namespace) -> Launcher:
    def report(text: str) -> None:
        if not arguments.json:
            print(text, file=sys.stderr)

    return Launcher(
        StateStore(config.run_directory(), arguments.name),
        clock=SystemClock(),
        environment=config.environment(),
        report=report,
    )
