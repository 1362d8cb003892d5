"""The examples run as a user would run them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

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


@pytest.mark.parametrize("loss", ["dftopk", "lambdaloss"])
def test_own_training_loop_learns(loss):
    values = [float(line.split()[-1]) for line in run("examples/own_training_loop.py", loss).splitlines()]
    assert values[-1] < 0.7 * values[0]


def test_pair_memory_compares_like_with_like():
    """The obvious form and ours compute the same loss."""
    printed = [run("examples/pair_memory.py", name) for name in ("written_out", "ranknet")]
    obvious, ours = (text.split("loss ")[1].split(",")[0] for text in printed)
    assert float(obvious) == pytest.approx(float(ours), rel=1e-5)


PLUGIN_IN_USE = """
from recsys_topk import losses, operators
from recsys_topk.cli.losses import main
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
assert "cauchy" in operators.available()
main([])
check_loss(losses.registry.resolve("margin"))
check_operator(operators.registry.resolve("cauchy"))
"""


def test_the_plugin_installs_is_found_by_name_and_keeps_the_contract(tmp_path):
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check"]
    run("-m", "pip", "install", *options, "--target", str(tmp_path), "examples/plugin")
    assert "margin" in run("-c", PLUGIN_IN_USE, extra=str(tmp_path), OMP_NUM_THREADS="1")
