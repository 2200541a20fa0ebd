"""For tests of what is in deploy/: the tools that `make setup-deploy` installs."""

from __future__ import annotations

import pytest

from tests.deploy.charts import TOOLS


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs tools that are not installed."""
    if (TOOLS / "helm").exists():
        return
    for item in items:
        if item.get_closest_marker("deploy"):
            item.add_marker(pytest.mark.skip(reason="needs .venv-deploy (`make setup-deploy`)"))
