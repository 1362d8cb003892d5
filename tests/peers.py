"""Values and gradients computed by other people's implementations (tests/vectors), and how to compare with them."""

import json
from dataclasses import dataclass
from pathlib import Path

import torch

FOLDER = Path(__file__).parent / "vectors"


@dataclass
class Case:
    """One batch of lists with a peer's value and gradient."""

    name: str
    scores: torch.Tensor
    labels: torch.Tensor
    mask: torch.Tensor
    k: int
    tolerance: float
    raw: dict

    def assert_agrees(self, value):
        """Compare value and gradient, where the peer's are unique and correct."""
        clamped = self.raw.get("peer_clamp_active", False)
        (gradient,) = torch.autograd.grad(value, self.scores)
        if self.raw["output_unique"] and not clamped:
            expected = self.raw["output"]
            assert abs(value.item() - expected) <= self.tolerance * max(1.0, abs(expected)), (
                f"{self.name}: value {value.item()!r}, peer {expected!r}"
            )
        if self.raw["grad_unique"] and not clamped and not self.raw.get("peer_grad_known_wrong", False):
            expected = torch.tensor(self.raw["grad"], dtype=torch.float64)
            worst = (gradient.cpu() - expected).abs().max()
            assert worst <= self.tolerance * max(1.0, float(expected.abs().max())), (
                f"{self.name}: gradient off by {worst}"
            )


def cases(name):
    """Return the cases of a vector file; scores are float64 and require a gradient."""
    stored = json.loads((FOLDER / f"{name}.json").read_text())
    found = []
    for case in stored["cases"]:
        scores = torch.tensor(case["scores"], dtype=torch.float64)
        mask = torch.ones_like(scores, dtype=torch.bool) if case["mask"] is None else torch.tensor(case["mask"]).bool()
        labels = torch.tensor(case["labels"], dtype=torch.float64)
        found.append(
            Case(case["name"], scores.requires_grad_(), labels, mask, case["k"], stored["suggested_tolerance"], case)
        )
    return found


def ordered_pairs(case):
    """Return the number of pairs of valid items with y_i > y_j in each list, by counting."""
    better = case.labels[:, :, None] > case.labels[:, None, :]
    return (better & case.mask[:, :, None] & case.mask[:, None, :]).sum((1, 2))
