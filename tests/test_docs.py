"""The code that README, CONTRIBUTING and docs show is run as written; every command they show is parsed."""

from __future__ import annotations

import contextlib
import io
import json
import re
import shlex
import subprocess
import sys
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest

from recsys_topk.cli.arguments import parse_options
from recsys_topk.cli.corpus_options import split_corpus_options
from recsys_topk.cli.main import COMMANDS, main
from recsys_topk.runs import TrainingRun

ROOT = Path(__file__).parents[1]
PAGES = ["README.md", *(f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md")))]
TRAINING = ("fit", "validate", "test", "predict")
TAKE_FIT_OPTIONS = ("demo", "compare", "stream", "experiment", "sweep", "prepare", "plan")


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


@pytest.mark.parametrize("page", ["swap-the-loss", "tutorial"])
def test_the_code_of_the_first_pages_runs(page: str) -> None:
    names: dict[str, Any] = {}
    for block in python_blocks(f"docs/{page}.md"):
        exec(block, names)
    assert float(names["scores"].grad.abs().sum()) > 0.0
    if "retrieval" in names:
        assert all(float(names[stage].grad.abs().sum()) > 0.0 for stage in ("retrieval", "ranking"))


def test_troubleshooting_quotes_messages_of_the_package() -> None:
    sources = (path.read_text() for path in (ROOT / "recsys_topk").rglob("*.py"))
    text = " ".join(re.sub(r'"\s*\n\s*f?"', "", source) for source in sources)  # joins strings of several lines
    quoted = re.findall(r"^### `(.*)`$", (ROOT / "docs" / "troubleshooting.md").read_text(), re.MULTILINE)
    parts = [part.strip() for heading in quoted for part in re.split(r"`, `|\.\.\.", heading)]
    assert len(parts) > 20
    assert [part for part in parts if part not in text] == []


def test_the_index_lists_every_page() -> None:
    listed = re.findall(r"^[\w/-]+$", (ROOT / "docs" / "index.md").read_text(), re.MULTILINE)
    pages = {path.stem for path in (ROOT / "docs").glob("*.md")} - {"index"}
    assert sorted(name for name in listed if "/" not in name) == sorted(pages)


@pytest.mark.parametrize("name", PAGES)
def test_links_and_commands_are_real(name: str) -> None:
    text = (ROOT / name).read_text()
    for target in re.findall(r"\]\(([^)#]+)\)", text):
        if "://" not in target:
            assert (ROOT / name).parent.joinpath(target).exists(), target
    for command in re.findall(r"recsys-topk (\w+)", text):
        assert command in COMMANDS, command


def commands_of(name: str) -> list[list[str]]:
    """The commands of a page, as words: from blocks, indented lines and code within sentences."""
    text = re.sub(r"\\\n\s*", " ", (ROOT / name).read_text())
    text = re.sub(r"```python\n.*?```", "", text, flags=re.DOTALL)
    fenced = re.findall(r"```\w*\n(.*?)```", text, re.DOTALL)
    text = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    lines = [line.strip() for block in fenced for line in block.splitlines()]
    lines += [line.strip() for line in text.splitlines() if line.startswith("    ")]
    lines += [" ".join(code.split()) for code in re.findall(r"`(recsys-topk [^`]+)`", text)]
    parts = [part for line in lines for part in line.split(" && ") if re.match(r"recsys-topk \w+", part)]
    return [shlex.split(re.sub(r"\[(--[^]]*)\]", r"\1", part), comments=True)[1:] for part in parts]


@lru_cache
def help_of(command: str, *suite: str) -> str:
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.suppress(SystemExit):
        main([command, *suite, "--help"])
    return said.getvalue()


@lru_cache
def parse_as_fit(*arguments: str) -> None:
    """Parse options as `recsys-topk fit` does; what names a file of the reader's is left out."""
    asked = [text for text in arguments if text.endswith(("help", "help_all"))]
    if asked or not arguments:
        return
    config = parse_options([*arguments, "..."] if arguments[-1].startswith("--") else arguments)
    for name in ("ckpt_path", "resume"):
        config.pop(name, None)
    if not config:
        return
    config["config"] = [given for given in config.pop("config", []) if not given.endswith(".yaml")]
    TrainingRun(config).options()


@pytest.mark.parametrize("name", PAGES)
def test_commands_parse(name: str) -> None:
    for command, *rest in commands_of(name):
        assert command in COMMANDS, command
        if command in TRAINING:
            parse_as_fit(*split_corpus_options(command, rest)[0])
            continue
        text = help_of(command, *(rest[:1] if command == "bench" else []))
        options = [word.partition("=")[0] for word in rest if word.startswith("--")]
        unknown = [option for option in options if not re.search(rf"{re.escape(option)}\b", text)]
        if command in TAKE_FIT_OPTIONS:
            chosen = [*unknown, "--data", "--config"]
            ends = {at: at + 1 + ("=" not in word) for at, word in enumerate(rest) if word.partition("=")[0] in chosen}
            parse_as_fit(*(word for at, end in ends.items() for word in rest[at:end]))
        else:
            assert unknown == [], (command, unknown)
