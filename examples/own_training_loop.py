"""A plain training loop. Every loss of the package is called as loss(scores, labels, mask)."""

import sys

import torch

from recsys_topk import losses

torch.manual_seed(0)
loss_fn = losses.get(sys.argv[1] if len(sys.argv) > 1 else "dftopk", k=5)  # was: torch.nn.BCEWithLogitsLoss()
model, taste = torch.nn.Linear(8, 1), torch.randn(8)
optimizer = torch.optim.Adam(model.parameters(), lr=0.03)
for step in range(100):
    items, mask = torch.randn(64, 20, 8), torch.rand(64, 20) > 0.1  # 64 lists of 20 candidates, some are padding
    labels = (items @ taste).clamp_min(0.0)  # graded: bigger is better, 0 is not relevant
    loss = loss_fn(model(items).squeeze(-1), labels, mask)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 33 == 0:
        print(f"step {step:3d}  loss {loss.item():.4f}")
