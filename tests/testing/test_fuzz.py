"""The fuzzer finds planted faults, names the list, and finds nothing in the package."""

import json

import pytest
import torch

from recsys_topk.losses import SoftmaxLoss
from recsys_topk.operators.base import SoftSelection
from recsys_topk.operators.lapsum import LapSum
from recsys_topk.operators.sigmoid import SigmoidTopK
from recsys_topk.registry import UnknownNameError
from recsys_topk.testing.fuzz import Findings, fuzz, fuzz_loss, fuzz_operator
from recsys_topk.testing.random_lists import DTYPES, TEMPERATURES, random_lists


class OverflowsAtLargeScores(SoftmaxLoss):
    def per_list(self, scores, labels, mask, k, weights=None):
        x = torch.where(mask, scores, -torch.inf)
        return (x.exp().sum(-1).log() - scores.amax(-1)).clamp_min(0.0)


class FailsOnOneItem(SoftmaxLoss):
    def per_list(self, scores, labels, mask, k, weights=None):
        assert scores.shape[1] > 1
        return super().per_list(scores, labels, mask, k, weights)


class LosesMass(LapSum):
    def select(self, scores, k, mask):
        selection = super().select(scores, k, mask)
        return SoftSelection(selection.log_p - 1e-3, selection.log_q, mask)


class HasANonFiniteGradient(SigmoidTopK):
    def select(self, scores, k, mask):
        return super().select(scores + 0.0 * scores.abs().sqrt(), k, mask)  # 0 times inf at a score of 0


@pytest.mark.parametrize(
    ("run", "faulty", "kind"),
    [
        (fuzz_loss, OverflowsAtLargeScores, "not_finite"),
        (fuzz_loss, FailsOnOneItem, "exceptions"),
        (fuzz_operator, LosesMass, "not_k"),
        (fuzz_operator, HasANonFiniteGradient, "not_finite"),
    ],
)
def test_planted_fault_is_found_with_its_list(run, faulty, kind):
    found: Findings = run(faulty, lists=5_000)
    others = {"not_finite", "not_k", "exceptions"} - {kind}
    assert found.lists == 5_000
    assert getattr(found, kind) > 0
    assert not any(getattr(found, other) for other in others)
    assert "scores=[" in found.first
    assert "tau=" in found.first


def test_losses_and_operators_of_the_package_have_no_findings():
    faults = [f"{row.subject}: {row.first}" for row in fuzz(lists=2_000, seed=3) if not row.clean]
    assert not faults


def test_equal_seeds_give_equal_findings():
    assert fuzz_operator(LosesMass, 600, seed=7) == fuzz_operator(LosesMass, 600, seed=7)
    assert fuzz_operator(LosesMass, 600, seed=7).first != fuzz_operator(LosesMass, 600, seed=8).first


def test_unknown_name_raises():
    with pytest.raises(UnknownNameError, match="did you mean 'dftopk'"):
        fuzz(["dftpk"], lists=10)


def test_command_counts_lists_and_fails_if_a_fault_is_found(tmp_path, capsys, monkeypatch):
    from recsys_topk.cli.main import main

    target = tmp_path / "findings.json"
    assert main(["fuzz", "dftopk", "--lists", "600", "--seed", "5", "--json", str(target)]) == 0
    assert "1200 lists, 2 losses and operators, seed 5" in capsys.readouterr().out
    assert [(row["subject"], row["lists"]) for row in json.loads(target.read_text())["rows"]] == [
        ("loss dftopk", 600),
        ("operator dftopk", 600),
    ]
    right = LapSum.select

    def wrong(self, scores, k, mask):
        selection = right(self, scores, k, mask)
        return SoftSelection(selection.log_p - 1e-3, selection.log_q, mask)

    monkeypatch.setattr(LapSum, "select", wrong)
    assert main(["fuzz", "lapsum", "--lists", "600"]) == 1
    output = capsys.readouterr()
    assert "faults in operator lapsum" in output.out
    assert "not_k: scores=[" in output.err
    assert main(["fuzz", "lapsun"]) == 2
    assert "did you mean 'lapsum'" in capsys.readouterr().err


def test_interrupted_command_resumes_to_the_findings_of_one_run(tmp_path, capsys, monkeypatch):
    from recsys_topk.cli.main import main
    from recsys_topk.testing import fuzz as module

    right, calls = LapSum.select, []

    def wrong(self, scores, k, mask):
        selection = right(self, scores, k, mask)
        return SoftSelection(selection.log_p - 1e-3, selection.log_q, mask)

    def interrupted(*args):
        calls.append(args)
        if len(calls) == 5:
            raise KeyboardInterrupt
        return draw(*args)

    monkeypatch.setattr(LapSum, "select", wrong)
    whole, part = tmp_path / "whole.json", tmp_path / "part.json"
    command = ["fuzz", "lapsum", "--lists", "3000", "--seed", "2", "--json"]
    assert main([*command, str(whole)]) == 1
    draw = module.random_lists
    monkeypatch.setattr(module, "random_lists", interrupted)
    assert main([*command, str(part)]) == 130
    assert "(interrupted)" in capsys.readouterr().out
    kept = json.loads(part.read_text())["rows"]
    assert sum(row["batches"] for row in kept) == 4
    assert main([*command, str(part), "--resume"]) == 1
    assert json.loads(part.read_text()) == json.loads(whole.read_text())
    drawn = len(calls)
    assert main([*command, str(part), "--resume"]) == 1  # all lists are done
    assert len(calls) == drawn


def test_resume_with_other_options_or_without_a_file_fails(tmp_path, capsys):
    from recsys_topk.cli.main import main

    file = tmp_path / "findings.json"
    assert main(["fuzz", "bce", "--lists", "100", "--json", str(file), "--resume"]) == 2
    assert "there is no file" in capsys.readouterr().err
    assert main(["fuzz", "bce", "--lists", "100", "--json", str(file)]) == 0
    assert main(["fuzz", "bce", "--lists", "200", "--json", str(file), "--resume"]) == 2
    assert "was made with --lists 100 --seed 0 --device cpu" in capsys.readouterr().err
    assert main(["fuzz", "bce", "--resume"]) == 2
    assert "no --json was given" in capsys.readouterr().err
    file.write_text("{}")
    assert main(["fuzz", "bce", "--lists", "100", "--json", str(file), "--resume"]) == 2
    assert "holds no findings" in capsys.readouterr().err


def test_random_lists_bound_the_cost_of_long_lists_and_draw_every_kind():
    batches = [random_lists(0, number, cost="n^2") for number in range(64, 364)]
    assert {batch.scores.dtype for batch in batches} == set(DTYPES)
    assert {batch.tau for batch in batches} == set(TEMPERATURES)
    assert {len(batch.scores) for batch in batches if batch.scores.shape[1] <= 12} == {1024}
    assert all(batch.scores.shape[1] ** 2 * len(batch.scores) <= 1 << 18 for batch in batches)
    assert any(batch.scores.shape[1] > 130 for batch in batches)
    masks = [batch.mask for batch in batches if batch.mask is not None]
    padded = torch.stack([(mask[:, :-1] >= mask[:, 1:]).all(1).float().mean() for mask in masks if mask.shape[1] > 6])
    assert 0.4 < padded.mean() < 0.8
    assert any(isinstance(batch.k, int) for batch in batches)
    assert any(isinstance(batch.k, torch.Tensor) for batch in batches)
    assert not torch.equal(random_lists(1, 0).labels, random_lists(0, 0).labels)
