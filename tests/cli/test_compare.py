"""Comparisons: the summary on made-up numbers, and a real one that is interrupted and goes on."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest

from recsys_topk.cli.compare import paired_p_value, summarise
from tests.conftest import TINY_WORLD, Result

JOINT = "test/joint_recall@10@20/80"


def made_up(*joint: float) -> list[dict[str, object]]:
    return [{"metrics": {JOINT: value, "test/ranking_recall@10@20/80": 0.5}, "seconds": 1.0} for value in joint]


def student_t_two_sided(t: float, n: int) -> float:
    """By the trapezoidal rule on the density."""
    steps = 20000
    constant = math.gamma((n + 1) / 2) / (math.sqrt(n * math.pi) * math.gamma(n / 2))
    heights = [constant * (1 + (t * i / steps) ** 2 / n) ** (-(n + 1) / 2) for i in range(steps + 1)]
    return 1 - 2 * (sum(heights) - (heights[0] + heights[-1]) / 2) * t / steps


@pytest.mark.parametrize("differences", [[0.1, 0.3], [1.0, 2.0, 3.5], [0.2, -0.1, 0.3, 0.4], [1, 2, 1, 3, 2.5, 0]])
def test_p_value_equals_numerical_integration(differences: list[float]) -> None:
    n = len(differences)
    mean = sum(differences) / n
    spread = math.sqrt(sum((d - mean) ** 2 for d in differences) / (n - 1))
    expected = student_t_two_sided(abs(mean) / (spread / math.sqrt(n)), n - 1)
    assert paired_p_value(differences) == pytest.approx(expected, abs=1e-6)


def test_summary() -> None:
    rows = summarise({"a": made_up(0.5, 0.6, 0.7), "b": made_up(0.6, 0.71, 0.79)})
    assert rows[0][JOINT] == pytest.approx(0.6)
    assert rows[0]["+-"] == pytest.approx(0.1)
    assert rows[0]["p"] is None
    assert rows[1]["p"] == pytest.approx(paired_p_value([0.1, 0.11, 0.09]))
    assert summarise({"a": made_up(0.5)})[0]["+-"] is None


def test_a_comparison_goes_on_where_it_was(recsys_topk: Callable[..., Result], tmp_path: Path) -> None:
    command = ["compare", "--losses", "dftopk", "--variant", "smooth=--loss dftopk --loss.tau 100", "--seeds", "1",
               "--jobs", "2", "--out", "c", *TINY_WORLD]  # fmt: skip
    first = recsys_topk(*command)
    assert first.returncode == 0, first.stderr
    kept = (tmp_path / "c" / "trials" / "dftopk-s0.json").read_text()
    (tmp_path / "c" / "trials" / "smooth-s0.json").unlink()
    second = recsys_topk(*command)
    assert second.returncode == 0, second.stderr
    assert "1 of 2 runs are there already" in second.stdout
    assert (tmp_path / "c" / "trials" / "dftopk-s0.json").read_text() == kept
    with (tmp_path / "c" / "comparison.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["run"] for row in rows] == ["dftopk", "smooth"]
    runs = json.loads((tmp_path / "c" / "comparison.json").read_text())["runs"]
    assert float(rows[1][JOINT]) == pytest.approx(runs["smooth"][0]["metrics"][JOINT])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [(["--losses", "dftopk,lapsun"], "did you mean 'lapsum'"), ([], "nothing to compare"),
     (["--variant", "x"], "LABEL=OPTIONS"), (["--variant", "k = 3=--loss dftopk"], "no = in the label")],
)  # fmt: skip
def test_mistakes_are_found_before_anything_runs(
    recsys_topk: Callable[..., Result], arguments: list[str], words: str
) -> None:
    done = recsys_topk("compare", *arguments)
    assert done.returncode == 2
    assert words in done.stderr
