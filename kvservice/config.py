"""The only reader of files and of the environment."""

from __future__ import annotations

import os
from pathlib import Path


def environment() -> dict[str, str]:
    """Return a copy of this process's environment, for processes that it starts."""
    return dict(os.environ)


def run_directory() -> Path:
    """Return where running services are recorded: private to the user.

    `KVSERVICE_RUN_DIR`, else `$XDG_RUNTIME_DIR/kvservice`, else `~/.local/state/kvservice`.
    """
    if stated := os.environ.get("KVSERVICE_RUN_DIR"):
        return Path(stated).absolute()
    if runtime := os.environ.get("XDG_RUNTIME_DIR"):
        return Path(runtime) / "kvservice"
    return Path.home() / ".local" / "state" / "kvservice"


def cache_directory() -> Path:
    """Return where things are kept that can be made again.

    `KVSERVICE_CACHE_DIR`, else `$XDG_CACHE_HOME/kvservice`, else `~/.cache/kvservice`.
    """
    if stated := os.environ.get("KVSERVICE_CACHE_DIR"):
        return Path(stated).absolute()
    if cache := os.environ.get("XDG_CACHE_HOME"):
        return Path(cache) / "kvservice"
    return Path.home() / ".cache" / "kvservice"
