"""Compiles `kvservice_workers._native` while the package is built.

The extension is optional: without a compiler, or where it does not compile, the package is built
without it, and its workers use torch's kernels. CXX names the compiler; by default it is g++.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

SOURCES = Path("workers", "kvservice_workers", "attention", "native")
NAME = "_native" + sysconfig.get_config_var("EXT_SUFFIX")
FLAGS = (
    "-std=c++17", "-O3", "-fno-math-errno", "-fno-trapping-math",
    "-fPIC", "-shared", "-fvisibility=hidden", "-pthread", "-Wall", "-Wextra",
)  # fmt: skip


class NativeBuildHook(BuildHookInterface[Any]):
    """Adds the extension to a wheel, or puts it beside its package for an editable install."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if self.target_name != "wheel":
            return
        self._folder = tempfile.TemporaryDirectory(prefix="kvservice-native-")
        built = Path(self._folder.name) / NAME
        compiled = self._compile(built)
        if version == "editable":
            # Replaced, not written to: a process that has the old one loaded keeps it. An old one
            # that does not fit the sources must not stay.
            target = Path(self.root, "workers", "kvservice_workers", NAME)
            target.unlink(missing_ok=True)
            if compiled:
                shutil.copy(built, target)
        elif compiled:
            build_data["force_include"][str(built)] = f"kvservice_workers/{NAME}"
        if compiled:
            build_data["pure_python"] = False
            build_data["infer_tag"] = True

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        if self.target_name == "wheel":
            self._folder.cleanup()

    def _compile(self, target: Path) -> bool:
        """Compile the extension and return whether that went well; say why if it did not."""
        command = [
            *shlex.split(os.environ.get("CXX", "g++")),
            *FLAGS,
            f"-I{sysconfig.get_path('include')}",
            *sorted(str(path) for path in Path(self.root, SOURCES).glob("*.cpp")),
            "-o",
            str(target),
        ]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        except OSError as error:
            self.app.display_warning(f"building without the native kernel: {error}")
            return False
        if done.returncode:
            self.app.display_warning(f"building without the native kernel:\n{done.stderr}")
        return done.returncode == 0
