"""The package's shape: imports only point down, modules stay small, and the README's map is true."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
import sizes

# From the bottom up. Modules of one layer do not know each other, except inside one folder.
LAYERS = [
    ["config"],
    ["device", "interrupts", "metrics", "text", "trace"],
    ["core"],
    ["attention", "kv", "models", "palette"],
    ["graphs"],
    ["parallel", "runner", "sampling"],
    ["account", "intake", "scheduler", "speculative"],
    ["engine"],
    ["doctor", "llm", "plan"],
    ["lang", "palette", "parallel_worker", "serving", "terminal", "training"],
    ["bench", "demo"],
    ["cli"],
    ["__main__", "launch_server"],
    ["course"],
]
HEIGHT = {name: height for height, layer in enumerate(LAYERS) for name in layer}
MODULES = [path for path in sorted(sizes.PACKAGE.rglob("*.py")) if path != sizes.PACKAGE / "__init__.py"]


def part_of(path: Path) -> str:
    """The folder or module directly below the package."""
    return path.relative_to(sizes.PACKAGE).parts[0].removesuffix(".py")


def imported_parts(source: str) -> Iterator[str]:
    """Parts of the package that the code imports, at any depth; imports for type checkers alone do not count."""

    def is_typing(node: ast.AST) -> bool:
        return isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")

    waiting: list[ast.AST] = [ast.parse(source)]
    while waiting:
        node = waiting.pop()
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide the layer"
            whole = node.module == "minispec"
            names = [f"minispec.{alias.name}" for alias in node.names] if whole else [node.module or ""]
        for name in names:
            if name.split(".")[0] == "minispec":
                yield name.split(".")[1] if "." in name else "__init__"
        waiting += [child for child in ast.iter_child_nodes(node) if not is_typing(child)]


# `from minispec import LLM` is an import of llm, and `import minispec` could be one.
PUBLIC = {"LLM": "llm", "SamplingParams": "config", "SpeculativeConfig": "config", "__init__": "llm"}
NO_MODULE = {"__version__"}


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.relative_to(sizes.PACKAGE).as_posix())
def test_imports_only_point_down(path: Path) -> None:
    part = part_of(path)
    assert part in HEIGHT, f"{part} has no place in LAYERS"
    for imported in set(imported_parts(path.read_text("utf-8"))) - NO_MODULE:
        imported = PUBLIC.get(imported, imported)
        assert imported == part or HEIGHT[imported] < HEIGHT[part], f"{part} must not import {imported}"


def test_the_import_scanner_sees_every_form() -> None:
    source = """
from typing import TYPE_CHECKING
import minispec.engine as e
from minispec import LLM, course
if TYPE_CHECKING:
    from minispec.hidden import x
else:
    pass
def f():
    from minispec.kv.pool import KVPool
    import torch, minispec
"""
    assert sorted(imported_parts(source)) == ["LLM", "__init__", "course", "engine", "kv"]


def test_modules_and_package_stay_within_their_budget() -> None:
    assert sizes.over_budget(sizes.sizes()) == []
    assert sizes.over_budget({Path("a.py"): 401, Path("b.py"): 400}) == ["a.py has 401 lines, more than 400"]
    many = {Path(f"{i}.py"): 400 for i in range(13)}
    assert sizes.over_budget(many) == ["the engine has 5200 lines, more than 5000"]
    course = {Path("course") / f"{i}.py": 400 for i in range(4)}
    assert sizes.over_budget(course | {Path("a.py"): 400}) == ["course has 1600 lines, more than 1550"]


def test_only_code_lines_count() -> None:
    source = """
class A:
    '''Doc

    more.'''

    # why
    x = (1,
         2)

    def f(self):
        "doc"
        return 1
"""
    assert sizes.count_lines(source) == 5  # class, x (two), def, return


def test_every_module_says_what_it_is() -> None:
    for path in sizes.sizes():
        docstring = ast.get_docstring(ast.parse(path.read_text("utf-8"))) or ""
        taught = "notebook" in docstring or path.name == "__main__.py"
        assert taught, f"{path} does not say which notebook it belongs to"


def test_the_package_map_in_the_readme_is_up_to_date() -> None:
    written = sizes.readme_table(sizes.README.read_text("utf-8"))
    assert written == sizes.table(sizes.sizes()), "run: python tests/sizes.py --write"
