"""The examples run as a user would run them."""

import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]


def run(*command, **environment):
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH"), environment.pop("extra", None)]))
    done = subprocess.run(
        [sys.executable, *command],
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "PYTHONPATH": paths, **environment},
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def printed(script, argument, monkeypatch, capsys):
    """Run a script in this process, as `python script argument`; return what it printed."""
    monkeypatch.setattr(sys, "argv", [script, argument])
    threads = torch.get_num_threads()
    try:
        runpy.run_path(str(ROOT / "examples" / script), run_name="__main__")
    finally:
        torch.set_num_threads(threads)
    return capsys.readouterr().out


@pytest.mark.parametrize("loss", ["dftopk", "lambdaloss"])
def test_own_training_loop_learns(loss, monkeypatch, capsys):
    lines = printed("own_training_loop.py", loss, monkeypatch, capsys).splitlines()
    values = [float(line.split()[-1]) for line in lines]
    assert values[-1] < 0.7 * values[0]


def test_pair_memory_reports_time_and_memory(monkeypatch, capsys):
    text = printed("pair_memory.py", "ranknet", monkeypatch, capsys)
    assert text.startswith("ranknet (recflow): loss 0.90")
    assert text.endswith(" MB\n")


PLUGIN_IN_USE = """
from recsys_topk import losses, operators
from recsys_topk.cli.losses import main
from recsys_topk.spec import build
from recsys_topk.testing import check_loss, check_operator
import torch

loss = losses.get("margin", margin=0.5)
scores = torch.tensor([[2.0, 0.0, 1.0]], requires_grad=True)
value = loss(scores, torch.tensor([[0.0, 1.0, 0.0]]))
expected = 0.5 + torch.logsumexp(torch.tensor([2.0, 1.0]), 0)
assert torch.allclose(value, expected), value
value.backward()
assert scores.grad[0, 1] == -1

p = operators.get("cauchy", tau=0.1)(scores, k=1).p
assert p[0, 0] > 0.9 > p[0, 2]
assert "margin" in losses.available()
described = {"class_path": "recsys_topk_extras.margin.MarginLoss", "init_args": {"margin": 0.5}}  # as in a checkpoint
assert build(described, base=losses.RankingLoss).name == "margin"
assert "cauchy" in operators.available()
main([])
check_loss(losses.registry.resolve("margin"))
check_operator(operators.registry.resolve("cauchy"))
"""


def test_the_plugin_installs_is_found_by_name_and_keeps_the_contract(tmp_path):
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check"]
    run("-m", "pip", "install", *options, "--target", str(tmp_path), "examples/plugin")
    assert "margin" in run("-c", PLUGIN_IN_USE, extra=str(tmp_path), OMP_NUM_THREADS="1")
