"""LightGBM's lambdarank on the split of a data module, for the table of docs/own-data.md (`pip install lightgbm`).

    python examples/peers/lambdarank.py path/to/rank.train path/to/rank.test
    python examples/peers/lambdarank.py path/to/eb-nerd

Prints NDCG@5 and NDCG@10: mean and standard deviation over five seeds, and a random order. LightGBM has the features of
`fit`: numbers, the counts of earlier requests, whether the item is in the history, and ids as categories or no ids.
Equal scores are ordered at random.
"""

import sys

import numpy as np
import torch

from recsys_topk.datamodules import ListsDataModule
from recsys_topk.metrics.functional import ndcg_at


def main(train, test=None):
    """Train on the arrays of the same split. With a test file, a fifth of the training queries is for validation."""
    data = ListsDataModule(train, **({"counts": True} if test is None else {"test": test, "val_fraction": 0.2}))
    parts = {}
    for split in ("train", "val", "test"):
        batch = data.shard(split).batch(np.arange(len(data.shard(split))))
        row, place = torch.where(batch.mask)
        item = batch.candidates[row, place]
        ids = [batch.items[item], batch.request[row]]
        if batch.history.shape[-1]:
            ids.append((batch.items[item][:, None, :1] == batch.history[row]).any(1))
        numbers = [block[at] for block, at in ((batch.item_values, item), (batch.request_values, row)) if len(block)]
        columns = [block.numpy().reshape(len(row), -1) for block in (*ids, *numbers)]
        parts[split] = batch, np.concatenate(columns, axis=1), batch.labels[batch.mask].numpy()
    categories, columns_of = (sum(block.shape[1] for block in found) for found in (columns[:2], columns))

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

    wanted = {"": np.arange(columns_of)}
    if 0 < categories < columns_of:
        wanted = {" with ids": wanted[""], " without ids": wanted[""][categories:]}
    for name, chosen in wanted.items():
        results = []
        for seed in range(5):
            named = [place for place, column in enumerate(chosen) if column < categories]
            sets = {
                split: lightgbm.Dataset(
                    values[:, chosen], labels, group=batch.mask.sum(1).numpy(), categorical_feature=named
                )
                for split, (batch, values, labels) in parts.items()
            }
            options = {
                "objective": "lambdarank", "metric": "ndcg", "eval_at": [10], "bagging_fraction": 0.8,
                "bagging_freq": 1, "feature_fraction": 0.8, "seed": seed, "num_threads": 1, "verbose": -1,
                "deterministic": True,
            }  # fmt: skip
            stop = lightgbm.early_stopping(50, verbose=False)
            model = lightgbm.train(options, sets["train"], 300, valid_sets=[sets["val"]], callbacks=[stop])
            scores = model.predict(parts["test"][1][:, chosen])
            results.append(ndcg("test", scores + 1e-6 * np.random.default_rng(seed).random(scores.size)))  # breaks ties
        for k in (5, 10):
            values = np.array([result[k] for result in results])
            print(f"LightGBM lambdarank{name}  NDCG@{k} {values.mean():.3f} +- {values.std(ddof=1):.3f}")
    random = [ndcg("test", np.random.default_rng(seed).random(len(parts["test"][2]))) for seed in range(100)]
    print("random order  " + "  ".join(f"NDCG@{k} {np.mean([one[k] for one in random]):.3f}" for k in (5, 10)))


if __name__ == "__main__":
    main(*sys.argv[1:])
