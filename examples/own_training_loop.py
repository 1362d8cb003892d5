"""Swap the loss in a training loop of your own: any loss of the package is loss(scores, labels, mask)."""

import sys

import torch

from recsys_topk import losses

torch.manual_seed(0)
loss_fn = losses.get(sys.argv[1] if len(sys.argv) > 1 else "dftopk", k=5)  # was: torch.nn.BCEWithLogitsLoss()
model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
taste = torch.randn(8)

for step in range(100):
    items = torch.randn(64, 20, 8)  # 64 lists of 20 candidates with 8 features
    mask = torch.rand(64, 20) > 0.1  # some slots are padding
    liking = (items @ taste).masked_fill(~mask, -torch.inf)
    labels = (liking >= liking.topk(5).values[:, -1:]).float()  # the five best are the positives

    loss = loss_fn(model(items).squeeze(-1), labels, mask)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 33 == 0:
        print(f"step {step:3d}  loss {loss.item():.4f}")
