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


class OverflowsAtGreatScores(SoftmaxLoss):
    def per_list(self, scores, labels, mask, k):
        x = torch.where(mask, scores, -torch.inf)
        return (x.exp().sum(-1).log() - scores.amax(-1)).clamp_min(0.0)


class FailsOnOneItem(SoftmaxLoss):
    def per_list(self, scores, labels, mask, k):
        assert scores.shape[1] > 1
        return super().per_list(scores, labels, mask, k)


class LosesMass(LapSum):
    def select(self, scores, k, mask):
        selection = super().select(scores, k, mask)
        return SoftSelection(selection.log_p - 1e-3, selection.log_q, mask)


class HasABadGradient(SigmoidTopK):
    def select(self, scores, k, mask):
        return super().select(scores + 0.0 * scores.abs().sqrt(), k, mask)  # 0 times inf at a score of 0


@pytest.mark.parametrize(
    ("run", "faulty", "kind"),
    [
        (fuzz_loss, OverflowsAtGreatScores, "not_finite"),
        (fuzz_loss, FailsOnOneItem, "exceptions"),
        (fuzz_operator, LosesMass, "not_k"),
        (fuzz_operator, HasABadGradient, "not_finite"),
    ],
)
def test_a_planted_fault_is_found_and_the_list_is_named(run, faulty, kind):
    found: Findings = run(faulty, lists=5_000)
    others = {"not_finite", "not_k", "exceptions"} - {kind}
    assert found.lists == 5_000
    assert getattr(found, kind) > 0
    assert not any(getattr(found, other) for other in others)
    assert "scores=[" in found.first
    assert "tau=" in found.first


def test_every_loss_and_operator_is_clean():
    faults = [f"{row.subject}: {row.first}" for row in fuzz(lists=2_000, seed=3) if not row.clean]
    assert not faults


def test_equal_seeds_give_equal_findings():
    assert fuzz_operator(LosesMass, 600, seed=7) == fuzz_operator(LosesMass, 600, seed=7)
    assert fuzz_operator(LosesMass, 600, seed=7).first != fuzz_operator(LosesMass, 600, seed=8).first


def test_an_unknown_name_is_refused():
    with pytest.raises(UnknownNameError, match="did you mean 'dftopk'"):
        fuzz(["dftpk"], lists=10)


def test_the_command_counts_and_fails_if_something_was_found(tmp_path, capsys, monkeypatch):
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
    said = capsys.readouterr()
    assert "faults in operator lapsum" in said.out
    assert "not_k: scores=[" in said.err
    assert main(["fuzz", "lapsun"]) == 2
    assert "did you mean 'lapsum'" in capsys.readouterr().err
