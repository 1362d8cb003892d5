"""Values and gradients of operators computed by other people's implementations (tests/vectors)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from recsys_topk.operators import TopKOperator

VECTORS = Path(__file__).parents[1] / "vectors"


def load(name: str) -> dict[str, Any]:
    return json.loads((VECTORS / f"{name}.json").read_text())


def tensors(case: dict[str, Any]) -> tuple[Tensor, Tensor | None]:
    mask = case.get("mask")
    scores = torch.tensor(case["scores"], dtype=torch.float64)
    return scores, None if mask is None else torch.tensor(mask, dtype=torch.bool)


def compare(operator: TopKOperator, case: dict[str, Any], tolerance: float, *, gradient: bool = True) -> None:
    """Compare membership and vector-Jacobian product with a case, where the peer's are unique and correct."""
    scores, mask = tensors(case)
    scores.requires_grad_()
    p = operator(scores, case["k"], mask).p
    if case["output_unique"]:
        torch.testing.assert_close(
            p.detach(), torch.tensor(case["output"], dtype=torch.float64), atol=tolerance, rtol=tolerance
        )
    if gradient and case["grad_unique"] and not case.get("peer_grad_known_wrong"):
        p.backward(torch.tensor(case["cotangent"], dtype=torch.float64))
        expected = torch.tensor(case["grad"], dtype=torch.float64)
        torch.testing.assert_close(
            scores.grad, expected, atol=tolerance * max(1.0, float(expected.abs().max())), rtol=tolerance
        )
