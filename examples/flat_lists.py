"""Lists of different lengths in 1-D tensors, with one list id per item instead of padding and a mask."""

import torch

from recsys_topk.losses import LapSumLoss

query = torch.tensor([7, 3, 7, 7, 3, 9, 7, 3])  # the query of each candidate
scores = torch.tensor([0.2, 1.1, -0.3, 0.8, 0.4, 0.0, 0.1, -0.5], requires_grad=True)
clicks = torch.tensor([1.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0])

loss = LapSumLoss(k=1)(scores, clicks, list_ids=query)  # query 9 has no click and is skipped
loss.backward()
order = query.argsort(stable=True)  # the same data, sorted by list
again = LapSumLoss(k=1)(scores[order], clicks[order], lengths=query.unique(return_counts=True)[1])
print(f"loss {loss.item():.4f} {again.item():.4f}, gradient of query 9: {scores.grad[5].item():g}")
