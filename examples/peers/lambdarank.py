"""LightGBM's lambdarank on the split of a data module, for the table of docs/own-data.md (`pip install lightgbm`).

    python examples/peers/lambdarank.py path/to/rank.train path/to/rank.test

Prints NDCG@5 and NDCG@10: mean and standard deviation over five seeds, and a random order.
"""

import sys

import numpy as np
import torch

from recsys_topk.datamodules import ListsDataModule
from recsys_topk.metrics.functional import ndcg_at


def main(train, test):
    """Train on the arrays of the same split; a fifth of the training queries is for validation."""
    data = ListsDataModule(train, test=test, val_fraction=0.2)
    parts = {}
    for split in ("train", "val", "test"):
        batch = data.shard(split).batch(np.arange(len(data.shard(split))))
        parts[split] = batch, batch.item_values[batch.candidates][batch.mask].numpy(), batch.labels[batch.mask].numpy()

    def ndcg(split, values):
        batch = parts[split][0]
        scores = torch.zeros(batch.mask.shape)
        scores[batch.mask] = torch.as_tensor(values, dtype=torch.float32)
        found = {}
        for k in (5, 10):
            value, counted = ndcg_at(scores, batch.labels, batch.mask, k=k)
            found[k] = float(value[counted].mean())
        return found

    import lightgbm

    results = []
    for seed in range(5):
        sets = {
            split: lightgbm.Dataset(values, labels, group=batch.mask.sum(1).numpy())
            for split, (batch, values, labels) in parts.items()
        }
        options = {
            "objective": "lambdarank", "metric": "ndcg", "eval_at": [10], "bagging_fraction": 0.8, "bagging_freq": 1,
            "feature_fraction": 0.8, "seed": seed, "num_threads": 1, "verbose": -1, "deterministic": True,
        }  # fmt: skip
        stop = lightgbm.early_stopping(50, verbose=False)
        model = lightgbm.train(options, sets["train"], 300, valid_sets=[sets["val"]], callbacks=[stop])
        results.append(ndcg("test", model.predict(parts["test"][1])))
    for k in (5, 10):
        values = np.array([result[k] for result in results])
        print(f"LightGBM lambdarank, defaults  NDCG@{k} {values.mean():.3f} +- {values.std(ddof=1):.3f}")
    random = [ndcg("test", np.random.default_rng(seed).random(len(parts["test"][2]))) for seed in range(100)]
    print("random order  " + "  ".join(f"NDCG@{k} {np.mean([one[k] for one in random]):.3f}" for k in (5, 10)))


if __name__ == "__main__":
    main(*sys.argv[1:])
