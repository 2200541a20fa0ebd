"""Generate kvservice/v1 from proto/, lint the sources, and compare with the committed baseline.

    python .ci/proto.py generate [DIR]   write the generated code (default: into the repository)
    python .ci/proto.py compare          fail if the committed code is not what would be generated
    python .ci/proto.py lint             buf lint, format, breaking against proto/baseline.binpb
    python .ci/proto.py build FILE       write the compiled sources, comments included
    python .ci/proto.py baseline         rewrite proto/baseline.binpb, at a release

Needs `grpcio-tools` of exactly the version below (the oldest that the package supports: generated
code never runs on an older runtime) and `buf`; `make proto` and `make check` install both.
"""

from __future__ import annotations

import filecmp
import importlib.metadata
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

TOOLS_VERSION = "1.73.1"
ROOT = Path(__file__).resolve().parent.parent
SOURCES = ROOT / "proto"


def googleapis() -> Path:
    """Return the folder from which google/rpc/*.proto can be included."""
    import google.rpc.status_pb2  # of googleapis-common-protos, which ships its sources

    return Path(google.rpc.status_pb2.__file__).parents[2]


def generate(target: Path) -> None:
    version = importlib.metadata.version("grpcio-tools")
    if version != TOOLS_VERSION:
        raise SystemExit(f"grpcio-tools must be {TOOLS_VERSION} to generate code, found {version}")
    import grpc_tools
    from grpc_tools import protoc

    include = Path(grpc_tools.__file__).parent / "_proto"
    files = sorted(str(path.relative_to(SOURCES)) for path in SOURCES.rglob("*.proto"))
    status = protoc.main(
        [
            "protoc",
            f"-I{SOURCES}",
            f"-I{include}",
            f"-I{googleapis()}",
            f"--python_out={target}",
            f"--pyi_out={target}",
            f"--grpc_python_out={target}",
            *files,
        ]
    )
    if status:
        raise SystemExit(status)


def compare() -> None:
    committed = ROOT / "kvservice" / "v1"
    with tempfile.TemporaryDirectory() as name:
        generate(Path(name))
        fresh = Path(name) / "kvservice" / "v1"
        names = {path.name for path in fresh.iterdir()}
        names |= {path.name for path in committed.glob("*_pb2*.py*")}
        _, differ, absent = filecmp.cmpfiles(fresh, committed, sorted(names), shallow=False)
    if differ or absent:
        raise SystemExit(f"kvservice/v1 is out of date, run `make proto`: {differ + absent}")


def workspace(folder: Path) -> None:
    """Lay out what buf reads: our sources, and the one file of googleapis that they import."""
    shutil.copytree(SOURCES, folder, dirs_exist_ok=True)
    rpc = folder / "google" / "rpc"
    rpc.mkdir(parents=True)
    shutil.copy(googleapis() / "google" / "rpc" / "status.proto", rpc)


def buf(folder: Path, *arguments: str) -> None:
    executable = shutil.which("buf", path=str(Path(sys.executable).parent)) or shutil.which("buf")
    if executable is None:
        raise SystemExit("buf is not installed")
    subprocess.run([executable, *arguments], cwd=folder, check=True)


def lint() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        workspace(folder)
        buf(folder, "lint", "--path", "kvservice")
        buf(folder, "format", "--diff", "--exit-code", "--path", "kvservice")
        if (SOURCES / "baseline.binpb").exists():
            buf(folder, "breaking", "--path", "kvservice", "--against", "baseline.binpb")


def build(target: Path) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        workspace(folder)
        buf(folder, "build", "-o", str(target))


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["generate"]:
            generate(ROOT)
        case ["generate", folder]:
            generate(Path(folder))
        case ["compare"]:
            compare()
        case ["lint"]:
            lint()
        case ["build", target]:
            build(Path(target).absolute())
        case ["baseline"]:
            build(SOURCES / "baseline.binpb")
        case _:
            raise SystemExit(__doc__)
