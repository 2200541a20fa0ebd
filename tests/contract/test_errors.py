"""The tree of errors: complete, unambiguous, and the same after a trip over the wire."""

from __future__ import annotations

import re
from pathlib import Path

import grpc
import pytest

from kvservice.core import errors
from kvservice.core.errors import KVServiceError, all_errors, error_class
from kvservice.wire import status

ROOT = Path(__file__).resolve().parents[2]
ABSTRACT = {errors.KVServiceError, errors.CapacityError}
BUILTINS = (ValueError, LookupError, ConnectionError, TimeoutError, NotImplementedError)


def every_class() -> list[type[KVServiceError]]:
    """Return all classes of the tree, found without the module's own list."""
    found = [KVServiceError]
    for cls in found:
        found += [sub for sub in cls.__subclasses__() if sub not in found]
    return found


RAISED = [cls for cls in every_class() if cls not in ABSTRACT]


def test_no_class_is_forgotten() -> None:
    """`all_errors` yields every class that can be raised, once, and only those."""
    listed = list(all_errors())
    assert len(listed) == len(set(listed))
    assert set(listed) == set(RAISED)
    assert all("reason" not in vars(cls) for cls in ABSTRACT)


def test_reasons_are_unique() -> None:
    """Two classes never share a reason, so that the reason alone finds the class."""
    assert len({cls.reason for cls in RAISED}) == len(RAISED)


@pytest.mark.parametrize("cls", RAISED, ids=lambda cls: cls.__name__)
def test_class_has_its_own_reason_and_one_code(cls: type[KVServiceError]) -> None:
    """A reason of its own in the form that AIP-193 asks for, and one canonical code."""
    assert "reason" in vars(cls)
    assert re.fullmatch(r"[A-Z][A-Z0-9_]+[A-Z0-9]", cls.reason)
    assert len(cls.reason) <= 63
    assert error_class(cls.reason) is cls
    assert cls.code.value == getattr(grpc.StatusCode, cls.code.name).value[0]


@pytest.mark.parametrize("cls", RAISED, ids=lambda cls: cls.__name__)
def test_class_is_named_for_what_happened(cls: type[KVServiceError]) -> None:
    """A docstring says what to do, and no class hides a builtin of the same name."""
    assert cls.__doc__
    assert not hasattr(__builtins__, cls.__name__)
    if cls.__mro__[1] is KVServiceError and len(cls.__bases__) > 1:
        assert issubclass(cls, BUILTINS)


@pytest.mark.parametrize("cls", RAISED, ids=lambda cls: cls.__name__)
def test_error_survives_the_wire(cls: type[KVServiceError]) -> None:
    """Core to status and back: the same class, message, metadata and delay."""
    sent = cls("expected 3, got 4", retry_delay_s=1.25, expected=3, got=4)
    received = status.from_status(status.to_status(sent))
    assert type(received) is cls
    assert received.message == sent.message
    assert received.metadata == {"expected": "3", "got": "4"}
    assert received.retry_delay_s == 1.25


def table_of_errors() -> dict[str, list[str]]:
    """Return reason -> cells of its row in the README's table of errors."""
    text = (ROOT / "README.md").read_text()
    section = text.split("\n## Errors\n", 1)[1].split("\n## ", 1)[0]
    rows = {}
    for line in section.splitlines():
        if line.startswith("| `"):
            cells = [cell.strip().strip("`") for cell in line.strip("|").split("|")]
            rows[cells[1]] = cells
    return rows


def test_readme_lists_every_error() -> None:
    """The README's table has each class with its reason and code, and none that is gone."""
    rows = table_of_errors()
    assert {reason: cells[0] for reason, cells in rows.items()} == {
        cls.reason: cls.__name__ for cls in RAISED
    }
    assert {reason: cells[2] for reason, cells in rows.items()} == {
        cls.reason: cls.code.name for cls in RAISED
    }
    assert all(cells[3] for cells in rows.values()), "says what the caller should do"
