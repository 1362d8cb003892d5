"""Time and memory of a pairwise loss: `python examples/pair_memory.py ranknet`, or `written_out` for the naive form.

1024 lists of 200 items, forward and backward on one thread: median CPU time, and growth of the peak memory. Labels are
as in RecFlow (10 distinct positives, 30 graded negatives, 160 zeros). With `random` as a second argument they are drawn
from 0 to 29, so that nearly every item has a larger label than some other item.
"""

import statistics
import sys
import time

import torch
import torch.nn.functional as F

from recsys_topk import losses
from recsys_topk.bench.timing import peak_memory as peak_megabytes


def written_out(scores, labels):
    """RankNet with (B, N, N) tensors and autograd, as in most implementations."""
    pair = labels[:, :, None] > labels[:, None, :]
    logistic = F.softplus(scores[:, None, :] - scores[:, :, None])
    return ((logistic * pair).sum((1, 2)) / pair.sum((1, 2))).mean()


torch.set_num_threads(1)
torch.manual_seed(0)
name, kind = sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else "recflow"
loss = written_out if name == "written_out" else losses.get(name)
scores = torch.randn(1024, 200, requires_grad=True)
if kind == "random":
    labels = torch.randint(0, 30, (1024, 200)).float()
else:
    labels = torch.zeros(1024, 200)
    labels[:, :10] = torch.arange(20.0, 10.0, -1.0)
    labels[:, 10:20], labels[:, 20:30], labels[:, 30:40] = 3.0, 2.0, 1.0

F.binary_cross_entropy_with_logits(scores, (labels > 0).float()).backward()
before, times = peak_megabytes(), []
for _ in range(5):
    start = time.process_time()
    value = loss(scores, labels)
    value.backward()
    times.append(time.process_time() - start)
milliseconds = statistics.median(times) * 1e3
print(f"{name} ({kind}): loss {value.item():.6f}, {milliseconds:.0f} ms, {peak_megabytes() - before:.0f} MB")
