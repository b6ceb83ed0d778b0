"""The README cannot rot: names, files, links and commands that it mentions exist."""

from __future__ import annotations

import ast
import re

import sizes

ROOT = sizes.ROOT
TEXT = sizes.README.read_text("utf-8")
PROSE = re.sub(r"```.*?```", "", TEXT, flags=re.S)
QUOTED = re.findall(r"`([^`\n]+)`", PROSE)


def package_names() -> dict[str, set[str]]:
    """Each class, function and constant at the top of a module, with the names inside each class."""
    names: dict[str, set[str]] = {}
    for path in sizes.PACKAGE.rglob("*.py"):
        for node in ast.parse(path.read_text("utf-8")).body:
            if isinstance(node, ast.ClassDef):
                fields = {n.target.id for n in node.body if isinstance(n, ast.AnnAssign)}
                names[node.name] = fields | {n.name for n in node.body if isinstance(n, ast.FunctionDef)}
            elif isinstance(node, ast.FunctionDef):
                names[node.name] = set()
            elif isinstance(node, ast.Assign | ast.AnnAssign):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                names |= {target.id: set() for target in targets if isinstance(target, ast.Name)}
    return names


def is_module(name: str) -> bool:
    path = sizes.PACKAGE.parent.joinpath(*name.split("."))
    return path.with_suffix(".py").is_file() or (path / "__init__.py").is_file()


def unresolved(quoted: list[str]) -> list[str]:
    """Quoted names that look like ours and are not: files, module paths, classes with members, variables."""
    names, source = package_names(), "\n".join(p.read_text("utf-8") for p in sizes.PACKAGE.rglob("*.py"))
    wrong = []
    for name in quoted:
        if re.fullmatch(r"[\w/]+\.(py|md|yml|txt|toml|cfg)", name):
            good = (sizes.PACKAGE / name).is_file() or (ROOT / name).is_file()
        elif re.fullmatch(r"minispec(\.\w+)+", name):
            module, _, last = name.rpartition(".")
            good = is_module(name) or is_module(module) and last in names
        elif match := re.fullmatch(r"(?![A-Z]+$)([A-Z][a-z]*[A-Z][A-Za-z]*)(?:\.(\w+))?(?:\(.*\))?", name):
            good = match[1] in names and (
                match[2] is None or match[2] in names[match[1]] or f"self.{match[2]} = " in source
            )
            good &= all(word in source for word in re.findall(r"(\w+)=", name))
        else:
            good = True  # a command, a package, a setting
        good &= all(variable in source for variable in re.findall(r"MINISPEC_\w+", name))
        wrong += [] if good else [name]
    return wrong


def test_every_name_of_ours_in_the_readme_exists() -> None:
    assert len(QUOTED) > 20 and unresolved(QUOTED) == []


def test_the_name_check_finds_what_does_not_exist() -> None:
    wrong = [
        "kv/pond.py",
        "minispec.kv.pond",
        "minispec.config.Configs",
        "SamplerParams",
        "SpeculativeConfig.shape",
        "MINISPEC_SPEED=9",
        "LLM(x_y=1)",
    ]
    right = [
        "kv/pool.py",
        "minispec.kv.pool",
        "minispec.config.EngineConfig",
        "SamplingParams",
        "SpeculativeConfig.ngram_max",
        "MINISPEC_DEVICE",
        "+cpu",
    ]
    assert unresolved(right + wrong) == wrong


def test_every_link_leads_somewhere_and_every_notebook_is_linked() -> None:
    links = [link for link in re.findall(r"\]\(([^)#]+)\)", TEXT) if "://" not in link]
    assert [link for link in links if not (ROOT / link).exists()] == []
    notebooks = [f"notebooks/{path.name}" for path in sorted((ROOT / "notebooks").glob("[0-9]*.ipynb"))]
    assert [path for path in notebooks if path not in links] == []


def test_every_make_command_is_a_target() -> None:
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), flags=re.M))
    commands = set(re.findall(r"\bmake (?:PYTHON=\S+ )?(demo|test|lab|lint|notebooks|clean)\b", TEXT))
    assert {"demo", "test", "lab"} <= commands <= targets
