"""Docstrings and notebooks cannot rot: names resolve, each module names its notebooks, each notebook its modules."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import nbformat
import pytest
import sizes
from test_readme import unresolved

from minispec import course

NOTEBOOKS = {path.name[:2]: path for path in sorted((sizes.ROOT / "notebooks").glob("[0-9]*.ipynb"))}
MODULES = [path for path, lines in sizes.sizes().items()]
OUTSIDE = {"__init__.py", "__main__.py"}  # of the package itself: doors, taught nowhere


def docstrings(path: Path) -> str:
    """All docstrings of a module."""
    nodes = ast.walk(ast.parse(path.read_text("utf-8")))
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef)
    return "\n".join(ast.get_docstring(node) or "" for node in nodes if isinstance(node, kinds))


def taught_in(path: Path) -> set[str]:
    """Numbers of the notebooks that a module's docstring names."""
    text = " ".join((ast.get_docstring(ast.parse(path.read_text("utf-8"))) or "").split())
    named = re.findall(r"[nN]otebooks? ((?:\d\d(?: \([^)]*\))?(?:, | and | to )?)+)", text)
    return set(re.findall(r"\b\d\d\b", re.sub(r"\([^)]*\)", "", " ".join(named))))


def read_in(number: str) -> list[Path]:
    """Modules that a notebook's title says it reads."""
    title = nbformat.read(NOTEBOOKS[number], as_version=4).cells[0].source.split("needs:")[0]
    return [sizes.ROOT / name for name in re.findall(r"`(minispec/[\w/]+\.py)`", title)]


def prose(number: str) -> str:
    """A notebook's text without what it says of other engines."""
    cells = nbformat.read(NOTEBOOKS[number], as_version=4).cells
    text = "\n\n".join(cell.source for cell in cells if cell.cell_type == "markdown")
    return re.sub(r"## In real engines.*?(?=^## Next)|```.*?```", "", text, flags=re.S | re.M)


def quoted(text: str) -> list[str]:
    return re.findall(r"(?<!`)`([^`\n]+)`(?!`)", text)


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.relative_to(sizes.PACKAGE).as_posix())
def test_every_name_of_ours_in_a_docstring_exists(path: Path) -> None:
    assert unresolved(quoted(docstrings(path))) == []


@pytest.mark.parametrize("number", NOTEBOOKS)
def test_every_name_of_ours_in_a_notebook_exists(number: str) -> None:
    assert unresolved(quoted(prose(number))) == []


def test_each_module_names_a_notebook_and_each_notebook_is_named_by_what_it_reads() -> None:
    silent = [path.relative_to(sizes.PACKAGE).as_posix() for path in MODULES if not taught_in(path)]
    assert set(silent) <= OUTSIDE
    assert {number for path in MODULES for number in taught_in(path)} == set(NOTEBOOKS)
    strangers = [
        (number, path.name) for number in NOTEBOOKS for path in read_in(number) if number not in taught_in(path)
    ]
    assert strangers == [] and all(read_in(number) for number in NOTEBOOKS)


def test_the_course_has_a_small_public_api() -> None:
    assert course.__all__ == ["check", "figures", "load", "naive_greedy", "predict", "reveal", "setup", "show"]
    sources = [nbformat.read(path, as_version=4).cells for path in NOTEBOOKS.values()]
    code = "\n".join(cell.source for cells in sources for cell in cells if cell.cell_type == "code")
    assert set(re.findall(r"\bcourse\.(\w+)", code)) <= {*course.__all__}
