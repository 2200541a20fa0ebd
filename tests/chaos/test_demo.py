"""The demo in which a worker dies in mid-sentence, with a tiny model."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.test_demo import model_folder

__all__ = ["model_folder"]

pytestmark = [pytest.mark.chaos, pytest.mark.slow, pytest.mark.ray]


@pytest.mark.timeout(240)
@pytest.mark.usefixtures("leaves_nothing")
def test_a_worker_dies_in_mid_sentence(model_folder: Path, tmp_path: Path) -> None:
    """The answer is the one of an undisturbed local run, and both are shown."""
    done = subprocess.run(
        [
            *(sys.executable, "-m", "kvservice", "demo", "--model", str(model_folder)),
            *("--max-new-tokens", "16", "--prompt", "Are you there?", "--kill-worker"),
        ],
        env=os.environ | {"KVSERVICE_RUN_DIR": str(tmp_path / "run")},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "was killed by SIGKILL after 8 tokens" in done.stdout
    assert "16 tokens: identical" in done.stdout
    answers = [line for line in done.stdout.splitlines() if line.startswith("  0> ")]
    assert len(answers) == 2, done.stdout
    assert answers[0] == answers[1]
    assert "released: 0 pages are used" in done.stdout
