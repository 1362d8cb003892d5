"""The benchmark command writes, compares and checks results; no timing is asserted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from recsys_topk.bench.isolated import _add_targets, growth_of
from recsys_topk.bench.result import regressions
from recsys_topk.bench.subjects import DATA, Batch, one_pass, subjects, too_big
from recsys_topk.bench.timing import Shape, growth_exponent, in_own_process, interleaved, peak_growth
from recsys_topk.cli.main import main as command
from recsys_topk.ops.selection.sorting import has_ties

FAST = ["--quick", "--shapes", "2x9x3", "--seconds", "0.01"]


def main(argv: list[str]) -> int:
    return command(["bench", *argv])


@pytest.mark.parametrize("suite", ["operators", "losses"])
def test_every_subject_runs_forward_and_backward(suite: str) -> None:
    shape = Shape(3, 12, 4)
    for subject in subjects(suite).values():
        batch = Batch.of(shape, "cpu")
        one_pass(suite, subject, shape, batch)()
        assert batch.scores.grad is not None
        assert batch.scores.grad.isfinite().all(), subject.label


@pytest.mark.parametrize("suite", ["operators", "losses"])
def test_command_writes_json_and_checks_against_it(
    suite: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "result.json"
    assert main([suite, *FAST, "--names", "dftopk", "lapsum", "--json", str(target)]) == 0
    result = json.loads(target.read_text())
    assert [(row["name"], row["shape"]) for row in result["rows"]] == [("dftopk", "2x9x3"), ("lapsum", "2x9x3")]
    assert all(row["ratio"] > 0 and row["ms"] > 0 and row["2-thread ms"] > 0 for row in result["rows"])
    assert "dftopk" in capsys.readouterr().out
    generous = [suite, *FAST, "--names", "dftopk", "--check", str(target), "--tolerance", "1000"]
    assert main(generous) == 0
    for row in result["rows"]:
        row["ratio"] /= 1e6
    target.write_text(json.dumps(result))
    assert main([suite, *FAST, "--names", "dftopk", "--check", str(target)]) == 1
    assert "slower: dftopk 2x9x3" in capsys.readouterr().err


def test_data_has_grades_ties_and_bfloat16(tmp_path: Path) -> None:
    shape, target = Shape(4, 50, 3), tmp_path / "result.json"
    batches = {data: Batch.of(shape, "cpu", data) for data in DATA}
    assert [batches[data].labels.unique().tolist() for data in ("binary", "graded")] == [[0, 1], [0, 1, 2, 3, 4]]
    assert [has_ties(batches[data].scores.detach().float()) for data in ("graded", "ties")] == [False, True]
    assert (batches["bf16"].scores.dtype, batches["bf16"].plain.dtype) == (torch.bfloat16, torch.float32)
    assert main(["losses", *FAST, "--names", "ranknet", "arf_v2", "--data", *DATA, "--json", str(target)]) == 0
    names = [row["name"] for row in json.loads(target.read_text())["rows"]]
    kinds = ["", "-graded", "-k", "-ties", "-bf16", "-weights", "-graded-weights"]
    assert [name for name in names if "ranknet" in name] == [f"ranknet{kind}" for kind in kinds]
    assert [name for name in names if "arf" in name] == [f"arf_v2{kind}" for kind in kinds[:5]]  # it takes no weights
    assert batches["weights"].items.shape == (4, 50)
    assert (batches["graded"].k, batches["k"].k) == (None, 3)


def test_targets_of_weighted_losses_follow_from_the_same_run() -> None:
    names = ["ranknet-graded", "ranknet-graded-weights", "sinkhorn", "bce-weights", "softmax"]
    rows = [{"name": name, "shape": "1024x200x10", "ratio": 5.0} for name in names]
    rows.append({"name": "sinkhorn", "shape": "1x5x2", "ratio": 1.0})
    _add_targets(rows)
    assert [row.get("target") for row in rows] == [20, 6.0, 10, None, None, None]


def test_wrong_usage_exits_with_status_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["operators", "--names", "dftpk", *FAST]) == 2
    assert "did you mean 'dftopk'" in capsys.readouterr().err
    empty = tmp_path / "empty.json"
    empty.write_text('{"rows": []}')
    assert main(["operators", *FAST, "--names", "dftopk", "--check", str(empty)]) == 2
    assert main(["operators", *FAST, "--names", "dftopk", "--check", str(tmp_path / "none.json")]) == 2
    if not torch.cuda.is_available():
        assert main(["operators", *FAST, "--device", "cuda"]) == 2
    for text in ("10x10", "1x5x5", "axbxc", "0x5x1"):
        with pytest.raises(ValueError, match="shape"):
            Shape.parse(text)
    assert main(["operators", "--shapes", "10x10"]) == 2
    assert main(["nothing"]) == 2


def test_regressions_ignore_new_rows_and_allow_the_tolerance() -> None:
    before = [{"name": "a", "shape": "s", "ratio": 2.0}]
    assert regressions(before, [{"name": "a", "shape": "s", "ratio": 2.9}, {"name": "b", "ratio": 9.0}], 0.5) == []
    assert len(regressions(before, [{"name": "a", "shape": "s", "ratio": 3.1}], 0.5)) == 1


def test_too_large_combinations_are_skipped_with_a_reason() -> None:
    found = subjects("operators")
    for label, shape in (("diffsort", "1x1000000x1000"), ("neuralsort", "64x10000x100"), ("perturbed", "1x1000000x10")):
        assert too_big("operators", found[label], Shape.parse(shape))
    for label, shape in (("neuralsort-plain", "64x10000x100"), ("diffsort", "1024x200x10"), ("dftopk", "1x1000000x9")):
        assert too_big("operators", found[label], Shape.parse(shape)) is None
    assert too_big("losses", subjects("losses")["arf"], Shape(64, 10_000, 100))


def test_timing_growth_and_peak_memory_are_measured() -> None:
    ticks = iter(range(0, 10_000_000, 1000))
    ours, base = interleaved(lambda: None, lambda: None, 0.0, lambda: next(ticks))
    assert ours == base == 1e-3
    assert growth_exponent([1, 10, 100], [3.0, 30.0, 300.0]) == pytest.approx(1.0)
    grown = peak_growth(lambda: None, lambda: torch.ones(60_000_000).sum())
    assert grown >= 0.0
    assert in_own_process(growth_of, "losses", "dftopk", Shape(2, 9, 3)) < 50.0


def test_memory_of_a_new_process_does_not_include_its_parent() -> None:
    """Regression: the child of a large process reported a growth of 0."""
    ballast = torch.ones(150_000_000)  # 600 MB
    assert in_own_process(growth_of, "losses", "neuralsort", Shape(1024, 100, 10)) > 2.0
    del ballast
