"""The alerts: well-formed, each tried both ways, each explained."""

from __future__ import annotations

import re
from typing import Any

import pytest
import yaml

from tests.contract.test_docs import anchors
from tests.monitoring import DEPLOY, RULES, promtool
from tests.programs import ROOT, needs

TESTS = RULES.with_name("rules_test.yml")


def rules() -> list[dict[str, Any]]:
    groups = yaml.safe_load(RULES.read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


ALERTS = [rule for rule in rules() if "alert" in rule]
NAMES = sorted({rule["alert"] for rule in ALERTS})


@needs("promtool")
def test_promtool_accepts_rules_and_configuration() -> None:
    """Rules without lint, and a configuration that names them."""
    assert "SUCCESS" in promtool("check", "rules", "--lint-fatal", str(RULES))
    promtool("check", "config", str(RULES.with_name("prometheus.yml")))


@needs("promtool")
def test_unit_tests_of_the_rules_pass() -> None:
    """With labels, annotations and times exactly as expected."""
    assert "SUCCESS" in promtool("test", "rules", TESTS.name, cwd=TESTS.parent)


@pytest.mark.parametrize("name", NAMES)
def test_each_alert_is_tried_both_ways(name: str) -> None:
    """There is a case that fires it, and one that leaves it silent."""
    cases = yaml.safe_load(TESTS.read_text())["tests"]
    expected = [
        bool(check["exp_alerts"])
        for case in cases
        if case["name"].startswith(f"{name} ")
        for check in case["alert_rule_test"]
        if check["alertname"] == name
    ]
    assert set(expected) == {True, False}


@pytest.mark.parametrize("rule", ALERTS, ids=lambda rule: str(rule["alert"]))
def test_each_alert_says_what_to_do(rule: dict[str, Any]) -> None:
    """Severity, summary, description, and a section of the runbook that exists."""
    assert rule["labels"]["severity"] in ("warning", "critical")
    said = rule["annotations"]
    assert said["summary"]
    assert len(said["description"]) > len(said["summary"])
    path, _, anchor = said["runbook_url"].partition("#")
    assert anchor == rule["alert"].lower()
    assert anchor in anchors((ROOT / path).read_text())


def test_runbook_has_no_alerts_that_are_gone() -> None:
    """Each section of an alert is of one that there is."""
    titles = re.findall(r"(?m)^## (KVService\w+)$", (DEPLOY / "runbook.md").read_text())
    assert sorted(titles) == NAMES
