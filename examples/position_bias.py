"""Clicks with position bias: inverse propensities as item weights.

    python examples/position_bias.py 5

Lists of 20 items are shown in the order of an old ranker. Place r is looked at with probability 1 / r, and a relevant
item that is looked at is clicked. The clicks favour what the old ranker liked. A click at place r with the weight r has
the same expected weight at every place.
"""

from __future__ import annotations

import sys

import torch
from torch import Tensor, nn

from recsys_topk.losses import RankNetLoss
from recsys_topk.metrics.functional.ranks import ndcg_at

LISTS, ITEMS, FEATURES, LARGEST = 2000, 20, 8, 20.0


def simulate(draw: torch.Generator, lists: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return features (B, N, F), the relevance, the clicks and the weights of lists, (B, N) each."""
    taste = torch.linspace(1.0, -1.0, FEATURES)
    old = torch.linspace(-1.0, 1.0, FEATURES)  # the old ranker likes the opposite
    x = torch.randn(lists, ITEMS, FEATURES, generator=draw)
    relevance = (x @ taste + torch.randn(lists, ITEMS, generator=draw) > 2.0).float()
    places = (x @ old).argsort(1, descending=True).argsort(1) + 1
    clicks = relevance * (torch.rand(lists, ITEMS, generator=draw) < 1.0 / places)
    weights = torch.where(clicks > 0, places.float().clamp_max(LARGEST), 1.0)
    return x, relevance, clicks, weights


def train(x: Tensor, clicks: Tensor, weights: Tensor | None, seed: int) -> nn.Linear:
    """Return a linear model trained on the clicks."""
    torch.manual_seed(seed)
    model = nn.Linear(FEATURES, 1, bias=False)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    loss = RankNetLoss(pairs="sum")  # a mean over the positives of a list would divide by their weights
    for _ in range(60):
        optimizer.zero_grad()
        loss(model(x).squeeze(-1), clicks, item_weights=weights).backward()
        optimizer.step()
    return model


def main(seeds: int) -> None:
    """Print NDCG@5 of both models on new lists, one line per seed."""
    torch.set_num_threads(1)
    print("seed  without weights  with weights")
    for seed in range(seeds):
        draw = torch.Generator().manual_seed(seed)
        x, _, clicks, weights = simulate(draw, LISTS)
        fresh, relevance, _, _ = simulate(draw, 2000)
        found = []
        for given in (None, weights):
            scores = train(x, clicks, given, seed)(fresh).squeeze(-1).detach()
            values, counted = ndcg_at(scores, relevance, k=5)
            found.append(float(values[counted].mean()))
        print(f"{seed:4}  {found[0]:15.4f}  {found[1]:12.4f}")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 and sys.argv[1] else 5)
