"""Diagnostics of objectives with known results, and with a Trainer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn

from recsys_topk.callbacks.diagnostics import Diagnostics
from recsys_topk.cascades.module import CascadeModule
from recsys_topk.cascades.objectives.base import CascadeObjective, ObjectiveOutput
from recsys_topk.cascades.objectives.joint import JointObjective
from recsys_topk.evaluation.diagnostics import score_diagnostics, share_below
from recsys_topk.losses import DFTopKLoss
from tests.cascades.test_module import SCHEMA, STAGES, batches


class Known(CascadeObjective):
    """Term a lowers even columns; the gradient of term b is -2 times that of a on stage 0, and equal on stage 1."""

    paper: ClassVar[str] = ""

    def compute(
        self,
        scores: Sequence[Tensor],
        labels: Tensor,
        mask: Tensor,
        groups: Tensor | None,
        quotas: Sequence[int],
        k: int,
    ) -> ObjectiveOutput:
        a = scores[0][:, ::2].sum() + scores[1][:, ::2].sum()
        b = -2.0 * scores[0][:, ::2].sum() + scores[1][:, ::2].sum()
        return ObjectiveOutput(a, {"a": a, "b": b})


def test_signs_and_cosines_of_a_known_objective() -> None:
    labels = torch.tensor([[1.0, 0.0, 1.0, 0.0], [1.0, 1.0, 0.0, 0.0]])
    scores = [torch.randn(2, 4), torch.randn(2, 4)]
    mask = torch.ones(2, 4, dtype=torch.bool)
    found = score_diagnostics(Known(DFTopKLoss(), 2), scores, labels, mask, quotas=[3, 2], k=2, names=["first", "last"])
    assert found["wrong_sign/first"] == 1.0
    assert found["cosine/first/a-b"] == pytest.approx(-1.0)
    assert found["cosine/last/a-b"] == pytest.approx(1.0)


def test_selection_mass_grows_to_half_the_list_with_tau() -> None:
    """With a large tau, DFTopK's membership is 1/2 everywhere, so sum(p) / k = N / (2 k)."""
    scores, labels = [torch.randn(8, 40)], (torch.arange(40) < 10).float().expand(8, 40)
    mask = torch.ones(8, 40, dtype=torch.bool)
    for tau, expected, tolerance in ((1e4, 2.0, 1e-3), (1e-4, 1.0, 1e-3)):
        objective = JointObjective(DFTopKLoss(tau=tau), 1)
        found = score_diagnostics(objective, scores, labels, mask, quotas=[20], k=10)
        assert found["selection_mass/stage0"] == pytest.approx(expected, abs=tolerance)


def test_share_below_ignores_zero_gradients() -> None:
    parameter = nn.Parameter(torch.zeros(6))
    parameter.grad = torch.tensor([0.0, 0.0, 1e-9, -1e-9, 1e-3, 1.0])
    assert share_below([parameter], 1e-8) == 0.5
    assert share_below([nn.Parameter(torch.zeros(2))], 1e-8) == 0.0


def test_diagnostics_are_logged_and_do_not_change_the_training(tmp_path: Path) -> None:
    ends = []
    for callbacks in ([], [Diagnostics(every_n_steps=2)]):
        torch.manual_seed(0)
        model = CascadeModule(SCHEMA, STAGES, k=3)
        logger = CSVLogger(tmp_path, name=f"run{len(callbacks)}", version="")
        pl.Trainer(
            max_epochs=1, accelerator="cpu", logger=logger, callbacks=callbacks, enable_progress_bar=False,
            enable_checkpointing=False, enable_model_summary=False, log_every_n_steps=1,
        ).fit(model, batches(4))  # fmt: skip
        ends.append(model.state_dict())
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])
    header = (tmp_path / "run1" / "metrics.csv").read_text().splitlines()[0].split(",")
    assert {
        "diagnostics/selection_mass/retrieval", "diagnostics/wrong_sign/ranking", "diagnostics/below_eps/embeddings",
        "diagnostics/below_eps/dense", "diagnostics/cosine/ranking/stage1-joint",
    } <= set(header)  # fmt: skip
