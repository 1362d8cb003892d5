"""Run the notebooks and store their output: `python docs/run_notebooks.py`; the site shows them as pages.

The cells are plain Python, so that no Jupyter is needed here. An error in a cell fails; stored output is replaced.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

NOTEBOOKS = Path(__file__).parent / "notebooks"


def run(notebook: dict[str, Any]) -> dict[str, Any]:
    """Return a notebook with the output of its cells, run in one namespace in the working directory."""
    names: dict[str, Any] = {"__name__": "__main__"}
    cells = []
    for number, cell in enumerate(notebook["cells"], start=1):
        if cell["cell_type"] == "code":
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                exec(compile("".join(cell["source"]), f"<cell {number}>", "exec"), names)
            lines = printed.getvalue().splitlines(keepends=True)
            output = [{"output_type": "stream", "name": "stdout", "text": lines}] if lines else []
            cell = {**cell, "outputs": output}
        cells.append(cell)
    return {**notebook, "cells": cells}


def page(notebook: dict[str, Any]) -> str:
    """Return a notebook as a page of Markdown."""
    parts = []
    for cell in notebook["cells"]:
        text = "".join(cell["source"])
        parts.append(text if cell["cell_type"] == "markdown" else f"```python\n{text}\n```")
        for output in cell.get("outputs", ()):
            parts.append("".join(f"    {line}" for line in output["text"]).rstrip())
    return "\n\n".join(parts) + "\n"


def write_notebooks(target: Path) -> None:
    """Write the pages of all notebooks, with their stored output."""
    target.mkdir(parents=True, exist_ok=True)
    for file in NOTEBOOKS.glob("*.ipynb"):
        text, out = page(json.loads(file.read_text(encoding="utf-8"))), target / f"{file.stem}.md"
        if not out.exists() or out.read_text(encoding="utf-8") != text:
            out.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    for path in [Path(name).resolve() for name in sys.argv[1:]] or sorted(NOTEBOOKS.glob("*.ipynb")):
        with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
            os.environ["RECSYS_TOPK_CACHE"] = folder
            done = run(json.loads(path.read_text(encoding="utf-8")))
        path.write_text(json.dumps(done, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        sys.stdout.write(f"{path.name}: done\n")
