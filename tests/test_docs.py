"""The Python code in README, CONTRIBUTING and docs runs; tests/test_doc_commands.py tests the commands."""

from __future__ import annotations

import ast
import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from recsys_topk.cli.main import COMMANDS
from recsys_topk.losses.base import registry as losses
from recsys_topk.operators.base import registry as operators

ROOT = Path(__file__).parents[1]
PAGES = ["README.md", *(f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md")))]


def python_blocks(name: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / name).read_text(), re.DOTALL)


def run(python: list[str], code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*python, "-c", code], capture_output=True, text=True, check=False)


def test_readme_code_runs(warm_python: list[str]) -> None:
    done = run(
        warm_python,
        python_blocks("README.md")[0] + "\nassert scores.grad is not None and bool((scores.grad[~mask] == 0).all())",
    )
    assert done.returncode == 0, done.stderr


def test_loss_in_contributing_keeps_the_contract(warm_python: list[str]) -> None:
    check = "\nfrom recsys_topk.testing.contract import check_loss\ncheck_loss(MarginLoss)\n"
    done = run(warm_python, python_blocks("CONTRIBUTING.md")[0] + check)
    assert done.returncode == 0, done.stderr


def test_training_page_code_runs(tmp_path: Path, environment: dict[str, str], warm_python: list[str]) -> None:
    check = """
first = scores[0][0].masked_fill(~batch.mask[0], -torch.inf).topk(30).indices
assert best.tolist() == [batch.item_id[batch.candidates[0][first[scores[1][0][first].argmax()]]].item()]
"""
    code = "\n".join([*python_blocks("docs/training.md"), check])
    done = subprocess.run(
        [*warm_python, "-c", code], capture_output=True, text=True, check=False, cwd=tmp_path, env=environment
    )
    assert done.returncode == 0, done.stderr
    assert "runs/first" in done.stdout
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == ["first", "test-first"]
    assert json.loads((tmp_path / "runs" / "first" / "run.json").read_text())["epochs"] == 2


@pytest.mark.parametrize("page", ["index", "swap-the-loss", "tutorial"])
def test_first_pages_code_runs(page: str) -> None:
    names: dict[str, Any] = {}
    for block in python_blocks(f"docs/{page}.md"):
        exec(block, names)
    assert float(names["scores"].grad.abs().sum()) > 0.0
    if "retrieval" in names:
        assert all(float(names[stage].grad.abs().sum()) > 0.0 for stage in ("retrieval", "ranking"))


@pytest.mark.parametrize(("page", "check"), [("cascades", "check_stage(Linear)"), ("metrics", "check_metric(HitAt)")])
def test_own_stage_and_own_metric_keep_the_contract(page: str, check: str, warm_python: list[str]) -> None:
    """The checks are in the code of the pages; a metric that counts masked items fails it."""
    (block,) = [block for block in python_blocks(f"docs/{page}.md") if check in block]
    assert len([line for line in block.splitlines() if line and "import" not in line]) <= 15
    done = run(warm_python, block)
    assert done.returncode == 0, done.stderr
    if "HitAt" in check:
        wrong = run(warm_python, block.replace("self.m, mask, labels) & positive", "self.m) & (labels > 0)"))
        assert "masked items change the value" in wrong.stderr


def test_tutorial_and_own_data_use_different_names_of_runs() -> None:
    """They once shared a name, and the second page's next command tested the model of the first."""
    named = [
        set(re.findall(r"--name (\w+)", (ROOT / f"docs/{page}.md").read_text())) for page in ("tutorial", "own-data")
    ]
    assert all(named)
    assert not named[0] & named[1]


def test_troubleshooting_quotes_messages_of_the_package() -> None:
    sources = (path.read_text() for path in (ROOT / "recsys_topk").rglob("*.py"))
    text = " ".join(re.sub(r'"\s*\n\s*f?"', "", source) for source in sources)  # joins strings of several lines
    quoted = re.findall(r"^### `(.*)`$", (ROOT / "docs" / "troubleshooting.md").read_text(), re.MULTILINE)
    parts = [part.strip() for heading in quoted for part in re.split(r"`, `|\.\.\.", heading)]
    assert len(parts) > 20
    assert [part for part in parts if part not in text] == []


@pytest.mark.parametrize("kind", ["losses", "operators"])
def test_every_loss_and_operator_has_a_formula(kind: str) -> None:
    formulas = yaml.safe_load((ROOT / "docs" / "formulas.yaml").read_text())
    named = set(formulas[kind]) - {"cross_entropy"}
    own = {name for name in formulas["operators"] if name not in named} if kind == "losses" else set()
    registry = {"losses": losses, "operators": operators}[kind]
    assert named | own == {
        name for name, cls in registry.classes().items() if cls.__module__.startswith("recsys_topk.")
    }


def test_index_lists_every_page() -> None:
    listed = re.findall(r"^[\w/-]+$", (ROOT / "docs" / "index.md").read_text(), re.MULTILINE)
    pages = {path.stem for path in (ROOT / "docs").glob("*.md")} - {"index"}
    assert sorted(name for name in listed if "/" not in name) == sorted(pages)


@pytest.mark.parametrize("name", PAGES)
def test_linked_files_and_named_commands_exist(name: str) -> None:
    text = (ROOT / name).read_text()
    for target in re.findall(r"\]\(([^)#]+)\)", text):
        if "://" not in target:
            assert (ROOT / name).parent.joinpath(target).exists(), target
    for command in re.findall(r"recsys-topk ([a-z]\w*)", text):  # skips the placeholder COMMAND
        assert command in COMMANDS, command


def test_walks_of_the_architecture_page_name_existing_functions() -> None:
    """A hop may be an inherited method; it must be defined in the file that the walk names."""
    text = (ROOT / "docs" / "architecture.md").read_text().partition("## Walks\n")[2].partition("\n## ")[0]
    walks = dict(re.findall(r"^### (.*?)\n(.*?)(?=^### |\Z)", text, re.DOTALL | re.MULTILINE))
    limits = {"Fit on simulated data": 45, "Fit on one CSV": 30, "From a checkpoint to a service": 35}
    assert walks.keys() == limits.keys()
    for title, walk in walks.items():
        hops = re.findall(r"^\d+\. `([\w/]+\.py):([\w.]+)`", walk, re.MULTILINE)
        assert 5 < len(hops) <= limits[title], title
        assert len(hops) == len(set(hops)) == len(re.findall(r"^\d+\. ", walk, re.MULTILINE))
        for file, name in hops:
            nodes = ast.parse((ROOT / "recsys_topk" / file).read_text()).body
            for part in name.split("."):
                found = [
                    node for node in nodes if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name == part
                ]
                assert found, f"{title}: {file} has no {name}"
                nodes = found[0].body
