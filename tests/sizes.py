"""Count the code lines of the package: lines that are not blank, not only a comment and not part of a docstring.

The engine is the machine that the course explains: scheduler, caches, attention, sampling, speculation, devices.
Counted apart: the models (architectures, heads, file formats), the command line with its demo, the benchmarks,
the notebooks' checkers and figures, the training of heads, the HTTP server, the prompting language.

python tests/sizes.py            print the table; exit 1 if a module or the package is over its budget
python tests/sizes.py --write    also put the table into README.md, between its two `<!-- sizes -->` marks
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE, README = ROOT / "minispec", ROOT / "README.md"
MODULE_LIMIT = 400
ENGINE, COMMANDS = "the engine", "the command line"
COMMAND_FILES = {
    "__main__.py",
    "cli.py",
    "demo.py",
    "doctor.py",
    "launch_server.py",
    "plan.py",
    "terminal.py",
}
LIMITS = {ENGINE: 5000, COMMANDS: 750, "bench": 460, "models": 1500, "course": 1550, "training": 700, "serving": 1000}
LIMITS["lang"] = 600
MARK = "<!-- sizes -->"
NO_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


def count_lines(source: str) -> int:
    """Code lines of one module.

    >>> count_lines('"A docstring."\\n\\nx = 1  # why\\n# more\\ny = (2,\\n     3)\\n')
    3
    """
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            if ast.get_docstring(node, clean=False) is not None:
                lines -= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    return len(lines)


def sizes() -> dict[Path, int]:
    """Code lines of each module of the package, in order of path; empty `__init__` files left out."""
    counted = {path: count_lines(path.read_text("utf-8")) for path in sorted(PACKAGE.rglob("*.py"))}
    return {path: lines for path, lines in counted.items() if lines}


def over_budget(counted: dict[Path, int]) -> list[str]:
    """One sentence for each limit that is broken."""
    problems = [f"{p.name} has {n} lines, more than {MODULE_LIMIT}" for p, n in counted.items() if n > MODULE_LIMIT]
    for part, lines in totals(counted).items():
        if lines > LIMITS[part]:
            problems.append(f"{part} has {lines} lines, more than {LIMITS[part]}")
    return problems


def totals(counted: dict[Path, int]) -> dict[str, int]:
    """Lines of the engine and of each folder around it."""
    parts = dict.fromkeys(LIMITS, 0)
    for path, lines in counted.items():
        folder = next((part for part in path.parts if part in LIMITS), None)
        parts[folder or (COMMANDS if path.name in COMMAND_FILES else ENGINE)] += lines
    return {part: lines for part, lines in parts.items() if lines}


def first_sentence(path: Path) -> str:
    """The first line of the module's docstring."""
    docstring = ast.get_docstring(ast.parse(path.read_text("utf-8")))
    assert docstring, f"{path} has no docstring"
    return docstring.splitlines()[0]


def table(counted: dict[Path, int]) -> str:
    """The package map of the README: module, code lines, what it is."""
    rows = ["| module | lines | what it is |", "|---|---:|---|"]
    for path, lines in counted.items():
        rows.append(f"| `{path.relative_to(PACKAGE).as_posix()}` | {lines} | {first_sentence(path)} |")
    parts = totals(counted)
    around = ", ".join(
        f"{lines} in {part if part == COMMANDS else f'`{part}/`'}" for part, lines in parts.items() if part != ENGINE
    )
    rows.append(f"| **{ENGINE}** | **{parts[ENGINE]}** | and around it {around} |")
    return "\n".join(rows)


def readme_table(text: str) -> str:
    """What stands between the two marks."""
    return text.split(MARK)[1].strip()


def main(arguments: list[str]) -> int:
    counted = sizes()
    print(table(counted))
    if "--write" in arguments:
        before, _, after = README.read_text("utf-8").split(MARK)
        README.write_text(f"{before}{MARK}\n{table(counted)}\n{MARK}{after}", "utf-8")
    problems = over_budget(counted)
    print("\n".join(problems))
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
