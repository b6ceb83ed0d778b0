"""The notebooks keep their form, so that a strict comparison of their outputs means something.

nbval compares nothing in a cell that was saved without being run, and ignores a sanitize rule that it cannot parse.
Each rule of form here is a function from a notebook to complaints; the last tests plant faults and see them found.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import nbformat
import pytest
from IPython.core.inputtransformer2 import TransformerManager
from nbformat import NotebookNode
from nbval.plugin import get_sanitize_patterns

from minispec.course import run_notebooks
from minispec.course.run_notebooks import METADATA

REPOSITORY = "minispec/minispec"  # on GitHub: where Colab installs from and Binder looks
ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "notebooks"
LESSONS = sorted(FOLDER.glob("*.ipynb"))
SOLUTIONS = sorted(FOLDER.glob("solutions/*.ipynb"))
MAX_BYTES, MAX_CODE_LINES, MAX_IGNORED = 400_000, 8, 0.2
IGNORE = "nbval-ignore-output"
SKIP = "nbval-skip"
TAGS = {IGNORE, SKIP, "raises-exception"}
START = f"""import importlib.util

if importlib.util.find_spec("minispec") is None:  # in Colab: the package and the model, once
    %pip install --quiet "minispec @ git+https://github.com/{REPOSITORY}" matplotlib ipywidgets
    !python -m minispec fetch"""

TITLE_PARTS = [r"^# \d\d · \w", r"\*\*One question:\*\* \*.+\?\*", r"\d+ minutes · reads: `minispec/", "needs:"]
SECTIONS = ["## By hand", "## Predict", "## Run", "## Checkpoint", "## Time it", "## Picture", "## Exercises"]
SECTIONS += ["### Exercise 1:", "### Exercise 2:", "## You can now say", "## In real engines", "## Next"]
UNSTABLE = {
    "an address": r"0x[0-9a-f]{3}",
    "seconds": r"\d ?(ms|µs|s|seconds|minutes)\b(?! ·)",
    "a speed": r"(it|tok|tokens)/s\b",
    "a progress bar": r"\r",
}
PATH = r"(?<![\w.])(/(home|root|tmp|work|usr|opt|var|Users)/|[A-Z]:\\)"


def code_cells(nb: NotebookNode) -> list[NotebookNode]:
    return [cell for cell in nb.cells if cell.cell_type == "code"]


def markdown(nb: NotebookNode) -> str:
    return "\n\n".join(cell.source for cell in nb.cells if cell.cell_type == "markdown")


def ignored(cell: NotebookNode) -> bool:
    return bool({IGNORE, SKIP} & set(cell.metadata.get("tags", ())))


def output_texts(cell: NotebookNode) -> Iterator[str]:
    for out in cell.outputs:
        data = {"text": out.get("text", "")} | out.get("data", {})
        yield from (text for kind, text in data.items() if kind != "image/png" and isinstance(text, str))


# Rules for every notebook ------------------------------------------------------------------------------------------


def not_run_in_order(nb: NotebookNode) -> list[str]:
    counts = [cell.execution_count for cell in code_cells(nb)]
    counts += [out.execution_count for cell in code_cells(nb) for out in cell.outputs if "execution_count" in out]
    wanted = list(range(1, len(code_cells(nb)) + 1))
    return [] if counts[: len(wanted)] == wanted and set(counts) <= set(wanted) else [f"execution counts {counts}"]


def bad_outputs(nb: NotebookNode) -> list[str]:
    found = []
    for number, cell in enumerate(code_cells(nb), start=1):
        for out in cell.outputs:
            if out.output_type == "error" and "raises-exception" not in cell.metadata.get("tags", ()):
                found.append(f"[{number}] an error")
            if out.get("name") == "stderr":
                found.append(f"[{number}] text on stderr")
            if any("widget" in kind for kind in out.get("data", ())):
                found.append(f"[{number}] a widget")
        for text in output_texts(cell):
            found += [f"[{number}] a path of this machine"] if re.search(PATH, text) else []
            for name, pattern in UNSTABLE.items():
                if not ignored(cell) and (match := re.search(pattern, text)):
                    found.append(f"[{number}] {name}: {match[0]!r}")
    return found


def bad_metadata(nb: NotebookNode) -> list[str]:
    found = [] if nb.metadata == METADATA else [f"metadata {dict(nb.metadata)}"]
    for number, cell in enumerate(nb.cells):
        tags = set(cell.metadata.get("tags", ()))
        if set(cell.metadata) - {"tags"} or not tags <= TAGS:
            found.append(f"cell {number}: metadata {dict(cell.metadata)}")
    return found


def bad_code(nb: NotebookNode) -> list[str]:
    found = []
    for number, cell in enumerate(code_cells(nb), start=1):
        if cell.source == START:
            continue
        lines = [line for line in cell.source.split("\n") if line.strip()]
        found += [f"[{number}] {len(lines)} lines"] * (len(lines) > MAX_CODE_LINES or not lines)
        for name, pattern in {"a device by name": r"cuda", "a shell command": r"^\s*[!%]", "a path": PATH}.items():
            found += [f"[{number}] {name}"] if re.search(pattern, cell.source, re.M) else []
    source = "\n".join(cell.source for cell in code_cells(nb))
    return found + (["no import from minispec"] if not re.search(r"^(from|import) minispec\b", source, re.M) else [])


def dead_references(nb: NotebookNode, folder: Path) -> list[str]:
    """Links to files, and modules named in the text, that do not exist."""
    text = markdown(nb)
    drawn = "\n".join(text for cell in code_cells(nb) for text in output_texts(cell))
    links = re.findall(r"\]\(([^)#]+)[^)]*\)", text) + re.findall(r'href="([^"]+)"', drawn)
    found = [link for link in links if not re.match(r"https?://", link) and not (folder / link).exists()]
    found += [path for path in re.findall(r"`(minispec/[\w/.]*)`", text) if not (ROOT / path).exists()]
    modules = re.findall(r"`(minispec(?:\.\w+)+)`", text)
    return found + [module for module in modules if importlib.util.find_spec(module) is None]


def start_gaps(nb: NotebookNode, path: str) -> list[str]:
    """What the first cells lack: links that open this very notebook elsewhere, and the cell that makes it run there.

    Nothing may be imported above that cell: an installation cannot replace what is loaded.
    """
    title, start = nb.cells[:2]
    links = {
        "Open in Colab": f"https://colab.research.google.com/github/{REPOSITORY}/blob/main/{path}",
        "Open in Binder": f"https://mybinder.org/v2/gh/{REPOSITORY}/main?urlpath=lab/tree/{path}",
    }
    found = [words for words, link in links.items() if f"[{words}]({link})" not in title.source]
    return found + ([] if start.source == START and start.metadata.get("tags") == [SKIP] else ["the start cell"])


def complaints(nb: NotebookNode, folder: Path) -> list[str]:
    nbformat.validate(nb)
    return not_run_in_order(nb) + bad_outputs(nb) + bad_metadata(nb) + bad_code(nb) + dead_references(nb, folder)


# Rules for lessons -------------------------------------------------------------------------------------------------


def template_gaps(nb: NotebookNode, number: str) -> list[str]:
    """What the template asks for and a lesson lacks, in order of the template."""
    text, source = markdown(nb), "\n".join(cell.source for cell in code_cells(nb))
    found = [part for part in TITLE_PARTS if not re.search(part, nb.cells[0].source, re.M)]
    places = [re.search(f"^{re.escape(section)}", text, re.M) for section in SECTIONS]
    found += [section for section, place in zip(SECTIONS, places, strict=True) if place is None]
    starts = [place.start() for place in places if place]
    found += [] if starts == sorted(starts) else ["sections out of order"]
    wanted = ["course.setup(", "course.predict(", "course.reveal(", "assert ", "check_integrity()"]
    wanted += [f"course.check.nb{number}_ex1(", f"course.check.nb{number}_ex2("]
    found += [call for call in wanted if call not in source]
    found += ["two hints"] if text.count("<details><summary>Hint") < 2 or text.count("</details>") < 2 else []
    share = sum(map(ignored, code_cells(nb))) / len(code_cells(nb))
    return found + ([f"{share:.0%} of the code cells ignored"] if share > MAX_IGNORED else [])


def verdicts(nb: NotebookNode) -> list[str]:
    """What the checkers printed, without the name of the exercise."""
    printed = "\n".join(text for cell in code_cells(nb) for text in output_texts(cell))
    return re.findall(r"^exercise \d.*?: (.*)$", printed, re.M)


# The notebooks -----------------------------------------------------------------------------------------------------


def read(path: Path) -> NotebookNode:
    return nbformat.read(path, as_version=4)


def name(path: Path) -> str:
    return path.relative_to(FOLDER).as_posix()


@pytest.mark.parametrize("path", LESSONS + SOLUTIONS, ids=name)
def test_a_notebook_is_executed_stable_and_clean(path: Path) -> None:
    assert complaints(read(path), path.parent) == []
    assert path.stat().st_size <= MAX_BYTES
    assert "widgets" not in read(path).metadata


@pytest.mark.parametrize("path", LESSONS + SOLUTIONS, ids=name)
def test_a_notebook_can_be_opened_elsewhere(path: Path) -> None:
    assert start_gaps(read(path), path.relative_to(ROOT).as_posix()) == []


@pytest.mark.parametrize("installed", [True, False])
def test_the_start_cell_installs_the_package_only_where_it_is_not(
    installed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    shell = SimpleNamespace(run_line_magic=lambda *words: calls.append(" ".join(words)), system=calls.append)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if installed else None)
    exec(TransformerManager().transform_cell(START), {"get_ipython": lambda: shell})
    assert [call.split()[:2] for call in calls] == ([] if installed else [["pip", "install"], ["python", "-m"]])


@pytest.mark.parametrize("path", LESSONS, ids=name)
def test_a_lesson_follows_the_template(path: Path) -> None:
    assert template_gaps(read(path), path.name[:2]) == []


@pytest.mark.parametrize("path", LESSONS, ids=name)
def test_exercises_are_open_in_the_lesson_and_solved_in_its_solutions(path: Path) -> None:
    lesson, solutions = read(path), read(FOLDER / "solutions" / path.name)
    assert len(verdicts(lesson)) >= 2 and set(verdicts(lesson)) == {"not done yet"}
    assert len(verdicts(solutions)) == len(verdicts(lesson))
    assert all(re.fullmatch(r"ok \(\d+ cases?\)", verdict) for verdict in verdicts(solutions))


def test_the_start_page_is_the_map_of_all_notebooks_and_ways_through_it() -> None:
    page = (FOLDER / "README.md").read_text("utf-8")
    for path in LESSONS:
        title = read(path).cells[0].source
        heading, question = re.search(r"^# (.+)", title)[1], re.search(r"\*\*One question:\*\* \*(.+\?)\*", title)[1]
        cells = (f"[{heading}]({path.name})", question, re.search(r"(\d+) minutes", title)[1])
        assert f"| {' | '.join(cells)} | [solutions](solutions/{path.name}) |" in page
    links = re.findall(r"\]\(([^)]+)\)", page)
    assert [link for link in links if not (FOLDER / link).is_file()] == []
    ways = re.split(r"^- ", page.split("## ")[1], flags=re.M)[1:]
    assert [re.findall(r"\[(\d\d)\]", way) for way in ways] == [
        ["00", "02", "06", "09", "10", "12", "13"],
        [],
        ["09", "10", "12", "14", "11"],
    ]


def test_figures_are_what_the_notebooks_drew_and_are_listed_with_their_command() -> None:
    folder, drawn = ROOT / "figures", {}
    for path in LESSONS + SOLUTIONS:
        drawn |= run_notebooks.figures_of(read(path), path)
    assert set(drawn) == set(run_notebooks.FIGURES)
    for file, content in drawn.items():
        assert (folder / file).read_bytes() == content, f"python -m minispec.course.run_notebooks writes {file}"
    table = re.findall(r"^\| \[(.+)\]\((.+)\) \| .+ \| (.+) \|$", (folder / "README.md").read_text("utf-8"), re.M)
    commands = {file: command for file, link, command in table if file == link}
    others = {"demo.png": "`make demo`", "mtp_module.svg": "drawn by hand"}
    others |= {name: "the command in the README, under Measured" for name in ("bench.png", "bench.json")}
    remade = {
        f: f"`python -m minispec.course.run_notebooks {number}`" for f, (number, _) in run_notebooks.FIGURES.items()
    }
    assert commands == remade | others
    files = {path.name: path.stat().st_size for path in folder.iterdir()}
    assert set(files) == {*commands, "README.md"} and max(files.values()) < 150_000


def test_the_course_has_its_first_lessons_and_no_solutions_without_a_lesson() -> None:
    assert [path.name[:2] for path in LESSONS][:3] == ["00", "01", "02"]
    assert [path.name for path in SOLUTIONS] == [path.name for path in LESSONS]


def test_notebooks_are_ruff_clean() -> None:
    for command in (["check"], ["format", "--check"]):
        done = subprocess.run(
            [sys.executable, "-m", "ruff", *command, "--quiet", FOLDER], cwd=ROOT, capture_output=True
        )
        assert done.returncode == 0, done.stdout.decode() + done.stderr.decode()


# The sanitize file -------------------------------------------------------------------------------------------------

SANITIZE = (FOLDER / "sanitize.cfg").read_text("utf-8")
RULES = get_sanitize_patterns(SANITIZE)
SAME = {  # a rule's line in the file -> two outputs that must count as the same
    "device": ("device: cpu, dtype: float32", "device: cuda, dtype: float32"),
    "figure": ("<Figure size 640x480 with 2 Axes>", "<Figure size 850x360 with 2 Axes>"),
    "rate": ("35.1 tokens/s", "104 tok/s"),
    "time": ("in 12.5 ms", "in 3 s"),
    "address": ("<Request at 0x7f00aa>", "<Request at 0x5581bc01>"),
}
DIFFERENT = [
    ("138 rows, 16 steps", "139 rows, 16 steps"),
    ("<Figure size 850x360 with 1 Axes>", "<Figure size 850x360 with 2 Axes>"),
    ("[504, 3575, 282]", "[504, 3575, 283]"),
    ("device: cpu, dtype: float32", "device: cpu, dtype: bfloat16"),
    ("21.8 operations for each byte", "21.9 operations for each byte"),
]


def sanitized(text: str, rules: list[tuple[str, str]] = RULES) -> str:
    for regex, replacement in rules:
        text = re.sub(regex, replacement, text)
    return text


def test_every_sanitize_rule_parses() -> None:
    named = re.findall(r"^\[(\w+)\]", SANITIZE, re.M)
    assert (
        len(RULES) == len(re.findall(r"^\s*regex", SANITIZE, re.M)) == len(re.findall(r"^\s*replace", SANITIZE, re.M))
    )
    assert named == list(SAME) and len(RULES) == len(named)


@pytest.mark.parametrize("number", range(len(SAME)), ids=list(SAME))
def test_a_sanitize_rule_hides_what_it_is_for(number: int) -> None:
    one, other = list(SAME.values())[number]
    sample = re.findall(r"^\[\w+\] sample: (.*)$", SANITIZE, re.M)[number]
    alone = [RULES[number]]
    assert sanitized(one, alone) == sanitized(other, alone) != one
    assert sanitized(sample, alone) != sample


@pytest.mark.parametrize("one, other", DIFFERENT)
def test_sanitize_rules_hide_nothing_else(one: str, other: str) -> None:
    assert sanitized(one) != sanitized(other)


# The rules above find planted faults -------------------------------------------------------------------------------


def planted(source: str = "from minispec import course", text: str = "", **cell: object) -> NotebookNode:
    outputs = [nbformat.v4.new_output("stream", name="stdout", text=text)] if text else []
    code = nbformat.v4.new_code_cell(source, **({"execution_count": 1, "outputs": outputs} | cell))
    return nbformat.v4.new_notebook(cells=[code], metadata=nbformat.from_dict(METADATA))


def widget() -> NotebookNode:
    return nbformat.v4.new_output("display_data", {"application/vnd.jupyter.widget-view+json": {}, "text/plain": "x"})


FAULTS = {
    "unrun": planted(execution_count=None),
    "order": planted(execution_count=2),
    "stderr": planted(outputs=[nbformat.v4.new_output("stream", name="stderr", text="warning")]),
    "error": planted(outputs=[nbformat.v4.new_output("error", ename="E", evalue="", traceback=[])]),
    "widget": planted(outputs=[widget()]),
    "address": planted(text="<Request at 0x7f00aa>"),
    "seconds": planted(text="it took 12.5 ms"),
    "speed": planted(text="35.1 tokens/s"),
    "bar": planted(text="50%\r100%"),
    "path": planted(text="saved to /home/anna/a.png"),
    "ignored path": planted(text="saved to /home/anna/a.png", metadata={"tags": [IGNORE]}),
    "tag": planted(metadata={"tags": ["nbval-ignore"]}),
    "scroll": planted(metadata={"scrolled": True}),
    "device": planted("from minispec import course\nx = x.cuda()"),
    "shell": planted("from minispec import course\n!pip list"),
    "long": planted("from minispec import course\n" + "x = 1\n" * 8),
    "import": planted("import torch"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault: str) -> None:
    assert len(complaints(FAULTS[fault], FOLDER)) == 1


def test_a_good_cell_gives_no_complaint() -> None:
    assert complaints(planted(text="138 rows"), FOLDER) == []
    assert complaints(planted(text="it took 12.5 ms", metadata={"tags": [IGNORE]}), FOLDER) == []


def test_faults_of_the_first_cells_are_found() -> None:
    path = LESSONS[0].relative_to(ROOT).as_posix()
    for fault in ("[Open in Colab]", "[Open in Binder]", "00_the_map", "%pip"):
        nb = read(LESSONS[0])
        for cell in nb.cells[:2]:
            cell.source = cell.source.replace(fault, "")
        assert start_gaps(nb, path)
    nb = read(LESSONS[0])
    nb.cells[1].metadata = nbformat.from_dict({})
    assert start_gaps(nb, path) == ["the start cell"]
    del nb.cells[1]
    assert start_gaps(nb, path) == ["the start cell"]


def test_kernel_names_and_widget_state_are_found() -> None:
    nb = planted()
    nb.metadata["widgets"] = {"application/vnd.jupyter.widget-state+json": {"state": {}, "version_major": 2}}
    assert len(complaints(nb, FOLDER)) == 1
    nb = planted()
    nb.metadata = nbformat.from_dict(METADATA | {"kernelspec": {"name": "my-env", "display_name": "Mine"}})
    assert len(complaints(nb, FOLDER)) == 1


@pytest.mark.parametrize("text", ["[x](99_no.ipynb)", "`minispec/kv/pond.py`", "`minispec.kv.pond`"])
def test_dead_references_are_found(text: str) -> None:
    nb = planted()
    nb.cells.append(
        nbformat.v4.new_markdown_cell(f"[00](00_the_map.ipynb), `minispec/kv/pool.py`, `minispec.kv`, {text}")
    )
    assert len(dead_references(nb, FOLDER)) == 1


@pytest.mark.parametrize("section", SECTIONS)
def test_a_missing_section_is_found(section: str) -> None:
    nb = read(LESSONS[0])
    for cell in nb.cells:
        if cell.cell_type == "markdown":
            cell.source = re.sub(f"^{re.escape(section)}", "text", cell.source, flags=re.M)
    assert template_gaps(nb, "00") == [section]


def test_too_many_ignored_cells_are_found() -> None:
    nb = read(LESSONS[0])
    for cell in code_cells(nb)[1:6]:
        cell.metadata = nbformat.from_dict({"tags": [IGNORE]})
    assert any("ignored" in gap for gap in template_gaps(nb, "00"))


# A stored output that is wrong makes the strict run fail -------------------------------------------------------------


def change_outputs(nb: NotebookNode) -> set[str]:
    """Change one character in each output that nbval compares: a digit or a letter in its middle. Returns the cells."""
    changed = set()
    for number, cell in enumerate(code_cells(nb)):
        for out in [] if ignored(cell) else cell.outputs[:1]:
            fields = out.data if "data" in out else out
            kind = min(set(fields) & {"text", "image/svg+xml", "text/markdown", "text/plain"})
            letters = [place for place, letter in enumerate(fields[kind]) if letter.isalnum()]
            place = letters[len(letters) // 2]
            other = "8" if fields[kind][place] == "7" else "7"
            fields[kind] = fields[kind][:place] + other + fields[kind][place + 1 :]
            changed.add(f"Cell {number}")
    return changed


def strict_run(folder: Path, *options: str) -> tuple[set[tuple[str, str]], str]:
    """nbval as `make test` runs it, over `folder` -> (notebook, cell) of what failed, and the last line."""
    command = [sys.executable, "-m", "pytest", "-q", "-rf", "-c", "/dev/null", f"--rootdir={folder}", "--color=no"]
    command += ["--nbval", "--nbval-current-env", f"--nbval-sanitize-with={FOLDER / 'sanitize.cfg'}", *options, folder]
    places = os.pathsep.join(map(str, [ROOT / "tests", ROOT]))  # of the plugin, and of the package for a kernel
    environment = os.environ | {"PYTHONPATH": places}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    return set(re.findall(r"^FAILED (\S+)::(Cell \d+)", done.stdout, re.M)), done.stdout.splitlines()[-1]


def test_nbval_finds_each_output_that_differs_from_what_the_cell_gives(tmp_path: Path) -> None:
    """The kernel is played from the stored outputs; that they are what the cells give is what `make test` checks."""
    planted_cells = set()
    for path in LESSONS + SOLUTIONS:
        nb, copy = read(path), tmp_path / "changed" / name(path)
        cells = change_outputs(nb)
        assert cells, f"{name(path)} has no output that is compared"
        planted_cells |= {(f"changed/{name(path)}", cell) for cell in cells}
        (tmp_path / "same" / name(path)).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, tmp_path / "same" / name(path))
        copy.parent.mkdir(parents=True, exist_ok=True)
        nbformat.write(nb, copy)
    failed, last_line = strict_run(tmp_path, "-p", "replay")
    assert failed == planted_cells, last_line
    assert len(planted_cells) > 300


def test_nbval_finds_a_changed_output_with_a_real_kernel(tmp_path: Path) -> None:
    nb = read(LESSONS[0])
    assert "Cell 1" in change_outputs(nb)
    nbformat.write(nb, tmp_path / LESSONS[0].name)
    failed, last_line = strict_run(tmp_path, "-x")
    assert failed == {(LESSONS[0].name, "Cell 1")} and "1 failed" in last_line
