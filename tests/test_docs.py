"""The code and commands that README and CONTRIBUTING show, run as written."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from recsys_topk.cli.main import COMMANDS

ROOT = Path(__file__).parents[1]


def python_blocks(name: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / name).read_text(), re.DOTALL)


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


def test_the_loss_of_the_readme_runs() -> None:
    done = run(
        python_blocks("README.md")[0] + "\nassert scores.grad is not None and bool((scores.grad[~mask] == 0).all())"
    )
    assert done.returncode == 0, done.stderr


def test_the_loss_of_contributing_keeps_the_contract() -> None:
    check = "\nfrom recsys_topk.testing.contract import check_loss\ncheck_loss(MarginLoss)\n"
    done = run(python_blocks("CONTRIBUTING.md")[0] + check)
    assert done.returncode == 0, done.stderr


def test_the_run_of_the_training_page_runs(tmp_path: Path, environment: dict[str, str]) -> None:
    check = """
first = scores[0][0].masked_fill(~batch.mask[0], -torch.inf).topk(30).indices
assert best.tolist() == [batch.item_id[batch.candidates[0][first[scores[1][0][first].argmax()]]].item()]
"""
    code = "\n".join([*python_blocks("docs/training.md"), check])
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=tmp_path, env=environment
    )
    assert done.returncode == 0, done.stderr
    assert "runs/first" in done.stdout
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == ["first", "test-dftopk-tau2-neg25-s42"]
    assert json.loads((tmp_path / "runs" / "first" / "run.json").read_text())["epochs"] == 2


@pytest.mark.parametrize("name", ["README.md", *(f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md")))])
def test_links_and_commands_are_real(name: str) -> None:
    text = (ROOT / name).read_text()
    for target in re.findall(r"\]\(([^)#]+)\)", text):
        if "://" not in target:
            assert (ROOT / name).parent.joinpath(target).exists(), target
    for command in re.findall(r"recsys-topk (\w+)", text):
        assert command in COMMANDS, command
