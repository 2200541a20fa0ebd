"""Who may import whom, which library belongs where, and who may ask the time."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCE_ROOTS = {
    "kvservice": ROOT,
    "kvservice_client": ROOT / "client",
    "kvservice_workers": ROOT / "workers",
}

WIRE = {"kvservice.core", "kvservice.v1", "kvservice.wire", "kvservice.clock"}
SHELL = {
    "kvservice.config",
    "kvservice.logs",
    "kvservice.credentials",
    "kvservice.metrics",
    "kvservice.server",
}
WORKERS = {"kvservice_workers", "kvservice_workers.data_plane"}

# Part -> the parts it may import besides itself. A module belongs to the longest name that is a
# prefix of its own; the bare package `kvservice` (its version) is open to all but the core.
MAY_IMPORT: dict[str, set[str]] = {
    "kvservice": set(),
    "kvservice.core": set(),
    "kvservice.v1": set(),
    "kvservice.clock": set(),
    "kvservice.logs": set(),
    "kvservice.wire": {"kvservice.core", "kvservice.v1", "kvservice.logs"},
    "kvservice.config": {"kvservice.core"},
    "kvservice.credentials": {"kvservice.core", "kvservice.clock", "kvservice.config"},
    "kvservice.certificates": {"kvservice.core", "kvservice.config", "kvservice.credentials"},
    "kvservice.metrics": {"kvservice.core", "kvservice.clock", "kvservice.config"},
    "kvservice.tables": {"kvservice.core"},
    "kvservice.manager": WIRE,
    "kvservice.server": WIRE | SHELL,
    "kvservice.runtime": WIRE | SHELL | WORKERS | {"kvservice.manager", "kvservice.certificates"},
    "kvservice_workers": {"kvservice.core", "kvservice.clock"},
    "kvservice_workers.data_plane": WIRE | WORKERS,
    "kvservice_client": WIRE,
    "kvservice.cluster": WIRE | SHELL | WORKERS | {"kvservice.manager", "kvservice.runtime"},
    "kvservice.embedded": WIRE | SHELL | WORKERS | {"kvservice.manager", "kvservice_client"},
    "kvservice.cli": {"*"},
    "kvservice.demo": {"*"},
    "kvservice.__main__": {"*"},
}

# Library -> the files that may import it, as patterns of dotted names. Others may not be imported.
OWNERS: dict[str, tuple[str, ...]] = {
    "ray": ("kvservice.cluster.*",),
    "grpc": (
        "kvservice.server.*",
        "kvservice.wire.status",
        "kvservice.wire.tracing",
        "kvservice_workers.data_plane.*",
        "kvservice_client._transport*",
    ),
    "torch": (
        "kvservice_workers.*",
        "kvservice_client.hf*",
        "kvservice_client._hf*",
        "kvservice_client.tensor_caches",
        "kvservice_client._tensor_*",
        "kvservice_client._dynamic_cache",
        "kvservice_client._static_cache",
        "kvservice_client.paged_cache",
        "kvservice_client.functional",
        "kvservice.demo*",
    ),
    "numpy": ("kvservice_workers.*", "kvservice_client.*", "kvservice.wire.*", "kvservice.demo*"),
    "jax": ("kvservice_client.functional",),
    "transformers": ("kvservice_client.hf*", "kvservice_client._hf*", "kvservice.demo*"),
    "cryptography": ("kvservice.certificates",),
    "prometheus_client": ("kvservice.metrics*",),
    "opentelemetry": ("kvservice.wire.tracing",),
    "rich": ("kvservice.cli*", "kvservice.demo*"),
    "google": (
        "kvservice.v1.*",
        "kvservice.wire.*",
        "kvservice.server.*",
        "kvservice.manager",
        "kvservice.cluster.*",
        "kvservice.embedded",
        "kvservice.cli",
        "kvservice_workers.data_plane.*",
        "kvservice_client.*",
    ),
}
# Published by the grpc project under names of their own.
ALIASES = {"grpc_health": "grpc", "grpc_reflection": "grpc", "grpc_status": "grpc"}
NO_TENSORS = ("kvservice_workers.page_pool", "kvservice_workers.page_table")

# Names that it loads at first use are known to type checkers all the same.
LATE = ("kvservice_client",)
CLOCK = "kvservice.clock"
CONFIG = "kvservice.config"


def modules() -> Iterator[tuple[str, Path]]:
    """Yield dotted name and path of every module that is ours, generated ones excepted."""
    for package, root in SOURCE_ROOTS.items():
        for path in sorted((root / package).rglob("*.py")):
            name = ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")
            if not name.startswith("kvservice.v1"):
                yield name, path


MODULES = dict(modules())


def part_of(module: str) -> str:
    """Return the part that a first-party module belongs to."""
    while module not in MAY_IMPORT:
        module = module.rpartition(".")[0]
        assert module, "not one of ours"
    return module


def imports(tree: ast.Module, module: str, *, is_package: bool) -> Iterator[tuple[int, str]]:
    """Yield line and absolute dotted name of every import, those inside functions included."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = module.split(".")
                keep = len(parents) - node.level + is_package
                base = ".".join([*parents[:keep], *([base] if base else [])])
            for alias in node.names:
                # `from package import module` names a module; `from module import name` does not.
                full = f"{base}.{alias.name}"
                yield node.lineno, full if full in MODULES else base


def import_violations(tree: ast.Module, module: str, *, is_package: bool) -> Iterator[str]:
    own = part_of(module)
    for line, target in imports(tree, module, is_package=is_package):
        root = target.partition(".")[0]
        if root in SOURCE_ROOTS:
            part = part_of(target)
            if part == "kvservice" and own != "kvservice.core":
                continue
            if part != own and not MAY_IMPORT[own] & {part, "*"}:
                yield f"{module}:{line}: {own} may not import {part} ({target})"
        elif root not in sys.stdlib_module_names:
            library = ALIASES.get(root, root)
            allowed = any(fnmatch(module, pattern) for pattern in OWNERS.get(library, ()))
            if not allowed or (module in NO_TENSORS and library in ("torch", "numpy")):
                yield f"{module}:{line}: {library} does not belong here"
        elif root == "time" and module != CLOCK:
            yield f"{module}:{line}: only {CLOCK} asks the time"


def use_violations(tree: ast.Module, module: str) -> Iterator[str]:
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(
                value=ast.Name("os"), attr="environ" | "environb" | "getenv" | "putenv"
            ):
                if module != CONFIG:
                    yield f"{module}:{node.lineno}: only {CONFIG} reads the environment"
            case ast.ImportFrom(module="os", names=names):
                if module != CONFIG and any(n.name in ("environ", "getenv") for n in names):
                    yield f"{module}:{node.lineno}: only {CONFIG} reads the environment"
            case ast.Call(func=ast.Attribute(attr="sleep" | "now" | "utcnow" | "today")):
                if module != CLOCK:
                    yield f"{module}:{node.lineno}: only {CLOCK} asks the time or sleeps"
            case ast.Attribute(value=ast.Name("random"), attr=attr) if attr != "Random":
                yield f"{module}:{node.lineno}: a source of random numbers is a parameter"
            case ast.ImportFrom(module="random", names=names) if any(
                n.name != "Random" for n in names
            ):
                yield f"{module}:{node.lineno}: a source of random numbers is a parameter"
            case ast.If(test=ast.Name("TYPE_CHECKING") | ast.Attribute(attr="TYPE_CHECKING")):
                if module not in LATE and any(
                    name.partition(".")[0] in SOURCE_ROOTS
                    for _, name in imports(ast.Module(node.body, []), module, is_package=False)
                ):
                    yield f"{module}:{node.lineno}: a cycle is resolved, not hidden"
            case _:
                pass


def violations(source: str, module: str, *, is_package: bool = False) -> list[str]:
    """Return what a module does that it may not do."""
    tree = ast.parse(source)
    return [
        *import_violations(tree, module, is_package=is_package),
        *use_violations(tree, module),
    ]


@pytest.mark.parametrize("module", sorted(MODULES))
def test_module_keeps_to_its_layer(module: str) -> None:
    """No module imports what its part may not, or asks for time, environment or chance."""
    path = MODULES[module]
    found = violations(path.read_text(), module, is_package=path.name == "__init__.py")
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("kvservice.core.lease", "import numpy"),
        ("kvservice.core.lease", "from kvservice import clock"),
        ("kvservice.core.lease", "from ..wire import convert"),
        ("kvservice.wire.convert", "import grpc"),
        ("kvservice.wire.convert", "import kvservice.server.app"),
        ("kvservice.manager", "from kvservice.metrics import Registry"),
        ("kvservice.manager", "import ray"),
        ("kvservice.server.app", "import kvservice_workers.worker"),
        ("kvservice.server.app", "import prometheus_client"),
        ("kvservice.server.app", "def f():\n    import kvservice_client"),
        ("kvservice_client._session", "import kvservice_workers"),
        ("kvservice_client._session", "import torch"),
        ("kvservice_client._arrays", "import torch"),
        ("kvservice_client.hf", "import prometheus_client"),
        ("kvservice_workers.worker", "from kvservice.wire import tensors"),
        ("kvservice_workers.page_table", "import numpy as np"),
        ("kvservice_workers.page_pool", "import torch"),
        ("kvservice_workers.worker", "import scipy"),
        ("kvservice_workers.worker", "import time"),
        ("kvservice_workers.worker", "from time import monotonic"),
        ("kvservice_workers.worker", "import os\nos.environ['A']"),
        ("kvservice_workers.worker", "from os import environ"),
        ("kvservice_client._retry", "import random\nrandom.uniform(0, 1)"),
        ("kvservice_client._retry", "from random import uniform"),
        ("kvservice_client._retry", "import asyncio\nasyncio.sleep(1)"),
        ("kvservice_client._retry", "import datetime\ndatetime.datetime.now()"),
        (
            "kvservice_client._retry",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import kvservice_client.x",
        ),
    ],
)
def test_violation_is_found(module: str, source: str) -> None:
    """Each rule, broken on purpose, is reported."""
    assert violations(source, module)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("kvservice.core.lease", "import heapq\nfrom kvservice.core.errors import NotFound"),
        ("kvservice.core.lease", "from .errors import NotFound"),
        ("kvservice_client._retry", "import random\ndef f(rng: random.Random): ..."),
        ("kvservice_client.hf", "import torch\nimport transformers"),
        ("kvservice_workers.data_plane.service", "from kvservice.wire import convert\nimport grpc"),
        ("kvservice.cluster.launch", "import ray\nfrom kvservice.manager import PageManager"),
        ("kvservice.cli", "from kvservice import __version__"),
    ],
)
def test_permitted_use_is_not_reported(module: str, source: str) -> None:
    """The rules do not catch what they should let pass."""
    assert not violations(source, module)


def test_source_roots_are_not_packages() -> None:
    """`client`, `workers`, `proto` and `deploy` cannot be imported by mistake, or shadow others."""
    for folder in ("client", "workers", "proto", "deploy"):
        assert not list((ROOT / folder).glob("*.py")), folder
    assert not list((ROOT / "proto").rglob("__init__.py"))
    assert not list((ROOT / "deploy").rglob("__init__.py"))
