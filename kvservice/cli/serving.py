"""Subcommands that run something: up, down, worker, demo. Each returns the exit code."""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import sys
import threading
import uuid
from typing import Any, Final, Protocol, Self

from kvservice import config
from kvservice.cli.exits import OK, Interrupted
from kvservice.cli.signals import signals_interrupt_again
from kvservice.clock import Clock, SystemClock
from kvservice.cluster.launch import Down, Launcher
from kvservice.cluster.ports import check_port_free
from kvservice.cluster.state import RunState, ServiceOptions, StateStore
from kvservice.core.errors import InvalidRequest, NotFound, Unavailable


class _Process(Protocol):
    """A `ProcessServer`, whose module needs what the other subcommands do without."""

    address: str
    metrics_address: str | None
    health_address: str | None

    def wait(self) -> None: ...

    def leave(self) -> bool: ...

    def __enter__(self) -> Self: ...

    def __exit__(self, *error: Any) -> None: ...


_POLL_S: Final = 0.5
_PAUSE_S: Final = 5.0


def up(arguments: argparse.Namespace) -> int:
    """Start manager and workers on Ray; unless detached, stay until a signal and end them.

    Told to keep them, stay as well, but end nothing.
    """
    options = _options(arguments)
    if arguments.keep:
        return _keep(_launcher(arguments), options, arguments)
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
            f"serving at {state.manager_address}, {state.options.total_workers} workers\n"
            f'connect by: kvservice_client.connect("{state.manager_address}")\n'
            f"{end}{name if arguments.detach else ''}"
        )
    if arguments.detach:
        print(text, flush=True)
        return OK
    return _stay(launcher, state, SystemClock(), text)


def _options(arguments: argparse.Namespace) -> ServiceOptions:
    if arguments.scale_file is not None and not arguments.keep:
        raise InvalidRequest("--scale-file is for --keep: nobody looks at it again otherwise")
    return ServiceOptions(
        num_workers=arguments.workers,
        memory_bytes=arguments.memory.num_bytes,
        memory_percent=arguments.memory.percent,
        device=arguments.device,
        num_gpu_workers=arguments.gpu_workers,
        gpu_memory_percent=arguments.gpu_memory,
        host=arguments.host,
        port=arguments.port,
        worker_port=arguments.worker_port,
        lane_port=arguments.lane_port,
        metrics_port=arguments.metrics_port,
        worker_metrics_port=arguments.worker_metrics_port,
        health_port=arguments.health_port,
        worker_health_port=arguments.worker_health_port,
        log_level=arguments.log_level,
        log_format=arguments.log_format,
        manager_address=arguments.manager_address or "",
        by_resource=arguments.by_resource,
        zero_freed_pages=arguments.zero_freed_pages,
        security=_security(arguments),
    )


def _security(arguments: argparse.Namespace) -> config.Security:
    return config.Security(
        token_file=arguments.tokens,
        key_file=arguments.key,
        metrics_token_file=arguments.metrics_token,
        quota_file=arguments.quotas,
        tls_cert=arguments.tls_cert,
        tls_key=arguments.tls_key,
        tls_ca=arguments.tls_ca,
        mutual_tls=arguments.mutual_tls,
        tls_server_name=arguments.tls_server_name,
        insecure=arguments.insecure,
    )


def _keep(launcher: Launcher, options: ServiceOptions, arguments: argparse.Namespace) -> int:
    """Keep the service there until a signal, also while its cluster does not answer."""
    never = threading.Event()
    clock = SystemClock()
    with contextlib.suppress(Interrupted):
        while True:
            try:
                launcher.keep(
                    options,
                    ray_address=arguments.address,
                    timeout_s=arguments.timeout,
                    scale_file=arguments.scale_file,
                )
            except Unavailable as error:
                print(f"trying again: {error}", file=sys.stderr, flush=True)
            clock.wait(never, _PAUSE_S)
    return OK


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


def manager(arguments: argparse.Namespace) -> int:
    """Run a manager alone, without Ray, until a signal."""
    settings = config.ManagerSettings(
        host=arguments.host,
        port=arguments.port,
        advertise_host=arguments.advertise_host,
        metrics_port=arguments.metrics_port,
        health_port=arguments.health_port,
        workers_expected=arguments.workers_expected,
        security=_security(arguments),
    )
    _check_ports(arguments, "port", "metrics_port", "health_port")
    try:
        from kvservice.runtime.manager import ManagerServer
    except ImportError as error:
        raise _lacking("a manager", error) from error
    return _run(ManagerServer(settings), {}, "the manager", arguments)


def worker(arguments: argparse.Namespace) -> int:
    """Run one worker alone, without Ray, until a signal."""
    _check_ports(arguments, "port", "lane_port", "metrics_port", "health_port")
    try:
        from kvservice.runtime.worker import WorkerServer, budget_bytes
    except ImportError as error:
        raise _lacking("a worker", error) from error
    settings = config.WorkerSettings(
        worker_id=arguments.id or f"worker-{uuid.uuid4().hex[:8]}",
        budget_bytes=budget_bytes(arguments.memory, arguments.device),
        host=arguments.host,
        port=arguments.port,
        advertise_host=arguments.advertise_host,
        lane_port=arguments.lane_port,
        metrics_port=arguments.metrics_port,
        health_port=arguments.health_port,
        device=arguments.device,
        manager_address=arguments.manager,
        security=_security(arguments),
        zero_freed_pages=arguments.zero_freed_pages,
        drain_s=arguments.drain_timeout,
    )
    name = settings.worker_id
    return _run(WorkerServer(settings), {"workerId": name}, name, arguments)


def _run(process: _Process, said: dict[str, str], name: str, arguments: argparse.Namespace) -> int:
    """Serve until a signal. `said`: what is said of it as JSON, beside its addresses."""
    from kvservice.runtime import telemetry

    telemetry.start(
        f"kvservice-{arguments.command}",
        log_level=arguments.log_level,
        log_format=arguments.log_format,
    )
    with process:
        try:
            _serve(process, said, name, arguments)
        except Interrupted as interruption:
            if interruption.number == signal.SIGTERM and process.leave():
                with contextlib.suppress(Interrupted), signals_interrupt_again():
                    process.wait()
    return OK


def _serve(
    process: _Process, said: dict[str, str], name: str, arguments: argparse.Namespace
) -> None:
    # Whoever has read what it says may end it at once.
    if arguments.json:
        addresses = {
            "address": process.address,
            "metricsAddress": process.metrics_address,
            "healthAddress": process.health_address,
        }
        print(json.dumps(said | addresses), flush=True)
    else:
        print(f"{name} serves at {process.address}", flush=True)
    process.wait()  # until it has been drained, if it is a worker


def _check_ports(arguments: argparse.Namespace, *names: str) -> None:
    for name in names:
        if port := getattr(arguments, name):
            check_port_free(arguments.host, port, f"--{name.replace('_', '-')}")


def _lacking(what: str, error: ImportError) -> NotFound:
    return NotFound(f"{what} needs the package {error.name}: pip install 'kvservice[server]'")


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
        kill_worker=arguments.kill_worker,
    )
    return run_demo(options)


def described(state: RunState) -> dict[str, object]:
    """Return a record as JSON for scripts."""
    return {
        "name": state.name,
        "managerAddress": state.manager_address,
        "metricsAddress": state.metrics_address,
        "workerCount": state.options.total_workers,
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
