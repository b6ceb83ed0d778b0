"""Execute notebooks again, in place:  python -m minispec.course.run_notebooks [06 11 ...]

A number takes the notebook and its solutions; without numbers all are run. Each gets a fresh kernel in its own
folder. What is written is the same on every machine: no widget state, no times, no kernel of the author's.
A notebook that raises or hangs is left as it was, and the exit status is 1. The pictures in figures/ are outputs of
notebooks (`FIGURES`), so they are written anew with them.

Knows: the notebook format. Does not know: what the notebooks say. Used by `make notebooks`,
for notebook 00 (the map) and all others.
"""

from __future__ import annotations

import base64
import sys
from collections.abc import Sequence
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError
from nbformat import NotebookNode

FOLDER = Path(__file__).parents[2] / "notebooks"
FIGURES = {  # file in figures/ -> the notebook that draws it, words of the cell
    "acceptance.svg": ("10", "token_strip(shown"),
    "rollback.svg": ("12", "slots(moments, pool.page_size"),
    "bandwidth.png": ("09", "figures.roofline("),
    "radix.svg": ("06", "film.frames[-1]"),
    "gantt.svg": ("05", "timeline({name"),
    "overlap.svg": ("08", "two_lanes(clocks"),
    "controller.png": ("12", "controller(engine.history)"),
}
WIDGET = "application/vnd.jupyter.widget-view+json"
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}
CELL_TIMEOUT_S = 300


def find(numbers: Sequence[str], folder: Path = FOLDER) -> list[Path]:
    """Notebooks with these two-digit numbers (none: all), each before its solutions. ValueError if one has none."""
    paths = sorted(
        (*folder.glob("[0-9]*.ipynb"), *folder.glob("solutions/[0-9]*.ipynb")), key=lambda path: (path.name, path.parts)
    )
    for number in numbers:
        if not any(path.name.startswith(f"{number}_") for path in paths):
            raise ValueError(f"no notebook {number!r} in {folder.name}: its two-digit number is wanted, as in 06")
    return [path for path in paths if not numbers or path.name.split("_")[0] in numbers]


def execute(notebook: NotebookNode, folder: Path) -> None:
    """Run all cells in `folder`, from empty outputs; a cell that raises or hangs ends it with nbclient's exception."""
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    NotebookClient(
        notebook,
        timeout=CELL_TIMEOUT_S,
        kernel_name="python3",
        resources={"metadata": {"path": str(folder)}},
        extra_arguments=["--log-level=ERROR"],  # to the kernel, which warns of its own transport
    ).execute()


def normalise(notebook: NotebookNode) -> None:
    """Leave in a notebook only what is the same for everybody who runs it."""
    notebook.metadata = nbformat.from_dict(METADATA)
    for cell in notebook.cells:
        tags = cell.metadata.get("tags")
        cell.metadata = nbformat.from_dict({"tags": tags} if tags else {})
        if cell.cell_type == "code":
            cell.outputs = _joined([out for out in cell.outputs if WIDGET not in out.get("data", {})])


def _joined(outputs: list[NotebookNode]) -> list[NotebookNode]:
    """A kernel cuts a stream where its buffer ends; put the pieces together."""
    joined: list[NotebookNode] = []
    for out in outputs:
        before = joined[-1] if joined else None
        if before and out.output_type == before.output_type == "stream" and out.name == before.name:
            before.text += out.text
        else:
            joined.append(out)
    return joined


def figures_of(notebook: NotebookNode, path: Path) -> dict[str, bytes]:
    """The pictures of `FIGURES` that this notebook has drawn: file -> content."""
    found = {}
    for name, (number, words) in FIGURES.items():
        if path.name.startswith(number) and path.parent.name != "solutions":
            [out] = next(c.outputs for c in notebook.cells if words in c.source and c.get("outputs"))
            svg = out.data.get("image/svg+xml")
            found[name] = svg.encode() if svg else base64.b64decode(out.data["image/png"])
    return found


def main(numbers: Sequence[str]) -> int:
    """Run the notebooks with these numbers; 0 if none raised."""
    failed = 0
    for path in find(numbers):
        print(f"{path.relative_to(FOLDER).as_posix()} ... ", end="", flush=True)
        notebook = nbformat.read(path, as_version=4)
        try:
            execute(notebook, path.parent)
        except (CellExecutionError, CellTimeoutError) as error:
            failed = 1
            print(f"failed\n{error}")
            continue
        normalise(notebook)
        nbformat.write(notebook, path)
        for name, content in figures_of(notebook, path).items():
            (FOLDER.parent / "figures" / name).write_bytes(content)
        print("done")
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
