"""The notebooks of docs/notebooks run, and the pages of the site show what is stored in them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[1] / "docs"
NOTEBOOKS = sorted((DOCS / "notebooks").glob("*.ipynb"))


@pytest.mark.long
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs(notebook: Path, tmp_path: Path, environment: dict[str, str]) -> None:
    copy = tmp_path / notebook.name
    copy.write_text(notebook.read_text())
    done = subprocess.run(
        [sys.executable, str(DOCS / "run_notebooks.py"), str(copy)],
        capture_output=True, text=True, check=False, env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    cells = json.loads(copy.read_text())["cells"]
    assert any(cell.get("outputs") for cell in cells)


def test_stored_notebooks_have_output_and_a_page(tmp_path: Path) -> None:
    sys.path.insert(0, str(DOCS))
    try:
        from run_notebooks import write_notebooks
    finally:
        sys.path.remove(str(DOCS))
    write_notebooks(tmp_path)
    assert len(NOTEBOOKS) == 3
    for notebook in NOTEBOOKS:
        printed = [out for cell in json.loads(notebook.read_text())["cells"] for out in cell.get("outputs", ())]
        assert printed, f"run python docs/run_notebooks.py {notebook.name}"
        page = (tmp_path / f"{notebook.stem}.md").read_text()
        assert all(line.rstrip() in page for out in printed for line in out["text"])
