"""What is written down about the code is there, and refers to what exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.contract.test_layering import MODULES

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = sorted(ROOT.glob("*.md"))
TESTS = sorted((ROOT / "tests").rglob("test_*.py"))


def anchors(text: str) -> set[str]:
    """Return the anchors that a document's headings have, as forges make them."""
    titles = re.findall(r"(?m)^#+ (.+)$", text)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(path: Path) -> None:
    """Every relative link names a file, and every anchor a heading."""
    for target in re.findall(r"\]\(([^)\s]+)\)", path.read_text()):
        if "://" in target:
            continue
        name, _, anchor = target.partition("#")
        linked = path.parent / name if name else path
        assert linked.exists(), target
        if anchor:
            assert anchor in anchors(linked.read_text()), target


def test_make_targets_exist() -> None:
    """Every `make` target that a document names is in the Makefile, and explained there."""
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"(?m)^([a-z][a-z-]*):", makefile))
    explained = set(re.findall(r"(?m)^#   make ([a-z-]+)", makefile))
    assert explained <= targets
    for path in DOCUMENTS:
        named = set(re.findall(r"(?:`|^)make ([a-z][a-z-]+)", path.read_text(), re.MULTILINE))
        assert named <= targets, path.name


def test_decisions_are_numbered_and_dated() -> None:
    """Decisions count up from 1, have a date, and say what would change them."""
    section = (ROOT / "README.md").read_text().split("\n## Decisions\n", 1)[1]
    section = section.split("\n## ", 1)[0]
    heads = re.findall(r"(?m)^\*\*(\d+)\. [^*]+\*\* \((\d{4}-\d{2}-\d{2})\)\.$", section)
    assert [int(number) for number, _ in heads] == list(range(1, len(heads) + 1))
    assert section.count("*Would change our mind:*") == len(heads) == section.count("\n**")
    assert sorted(date for _, date in heads) == [date for _, date in heads]


def is_bare(node: ast.stmt) -> bool:
    """Whether a public class or function lacks a docstring.

    One plain statement needs none, nor a mapping to or from protobuf, whose module explains it.
    """
    match node:
        case ast.ClassDef(name=name):
            pass
        case ast.FunctionDef(name=name, body=body) if len(body) > 1:
            pass
        case _:
            return False
    plain = name.startswith("_") or name.endswith(("_to_pb", "_from_pb"))
    return not plain and not ast.get_docstring(node)


@pytest.mark.parametrize("module", sorted(MODULES))
def test_module_and_its_public_names_are_explained(module: str) -> None:
    """Modules, public classes and public functions have docstrings."""
    tree = ast.parse(MODULES[module].read_text())
    assert ast.get_docstring(tree), "the module"
    assert [ast.unparse(node).split("\n")[0] for node in tree.body if is_bare(node)] == []


@pytest.mark.parametrize("path", TESTS, ids=lambda path: str(path.relative_to(ROOT / "tests")))
def test_test_says_what_it_shows(path: Path) -> None:
    """Every test has a docstring."""
    bare = [
        node.name
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef)
        and node.name.startswith("test_")
        and not ast.get_docstring(node)
    ]
    assert bare == []
