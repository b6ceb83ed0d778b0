"""A pytest plugin: nbval with a kernel that gives each cell the outputs that are stored in the repository.

`make test` runs every notebook, so the stored outputs are known to be what the cells give. What nbval makes of a copy
with other outputs can then be asked without running anything:  pytest -p replay --nbval COPY.ipynb
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest
from nbformat import NotebookNode
from nbval.plugin import IPyNbFile

NOTEBOOKS = Path(__file__).resolve().parent.parent / "notebooks"


class Replay:
    """What nbval needs of a kernel. Cells come in order; a skipped one does not come at all."""

    def __init__(self, original: NotebookNode) -> None:
        self.cells = iter([cell for cell in original.cells if cell.cell_type == "code"])
        self.messages: Iterator[dict] = iter(())
        self.count = 0

    def execute_cell_input(self, source: str, allow_stdin: bool) -> str:
        cell = next(cell for cell in self.cells if cell.source == source)
        self.count += 1
        self.messages = iter([*map(self._message, cell.outputs), self._message({"output_type": "status"})])
        return str(self.count)

    def _message(self, output: dict) -> dict:
        content = {"metadata": {}, "execution_count": self.count, "execution_state": "idle", **output}
        return {
            "msg_type": output["output_type"],
            "parent_header": {"msg_id": str(self.count)},
            "content": nbformat.from_dict(content),
        }

    def get_message(self, stream: str, timeout: float) -> dict:
        return next(self.messages)

    def await_reply(self, msg_id: str, timeout: float) -> None: ...

    def is_alive(self) -> bool:
        return True

    def stop(self) -> None: ...


@pytest.hookimpl
def pytest_configure() -> None:
    def setup(notebook: IPyNbFile) -> None:
        parts = notebook.path.parts[-2:] if notebook.path.parent.name == "solutions" else notebook.path.parts[-1:]
        notebook.kernel = Replay(nbformat.read(NOTEBOOKS.joinpath(*parts), as_version=4))
        notebook.setup_sanitize_files()

    IPyNbFile.setup = setup
