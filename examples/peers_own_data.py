"""Other libraries on the split of a data module, for the tables of docs/own-data.md.

    python examples/peers_own_data.py interactions path/to/ml-100k
    python examples/peers_own_data.py lists path/to/rank.train path/to/rank.test

The first prints popularity, transitions, item-kNN and ALS (`pip install implicit`): Recall@20 and NDCG@20 over the
whole catalogue without items that the user had before, for requests of the leave-last-out split. The second prints
LightGBM's lambdarank (`pip install lightgbm`): NDCG@5 and NDCG@10, mean and standard deviation over five seeds.
"""

import importlib
import sys

import numpy as np
import torch

from recsys_topk.datamodules import InteractionsDataModule, ListsDataModule
from recsys_topk.evaluation import evaluate_baseline
from recsys_topk.evaluation.baselines.als import ALS
from recsys_topk.evaluation.baselines.itemknn import ItemKNN
from recsys_topk.metrics.functional import ndcg_at


def imported(name):
    """Return an optional package, or print how to install it and return None."""
    try:
        return importlib.import_module(name)
    except ImportError:
        print(f"{name} is not installed, its rows are left out: pip install {name}")
        return None


def interactions(root):
    """All methods get the training data, histories and candidates of the cascade."""
    data = InteractionsDataModule(root, split="leave_last")
    data.prepare_data()
    methods = {"popularity": "popularity", "transitions": "transitions"}
    if imported("implicit"):
        methods["item-kNN, cosine, K = 20"] = ItemKNN(20, "cosine")
        methods["ALS, 32 factors, regularization 1"] = ALS(32, regularization=1.0, alpha=1.0)
    for split in ("val", "test"):
        for name, method in methods.items():
            found = evaluate_baseline(method, data, split, cuts=[20])
            print(f"{split:5} {name:40} Recall@20 {found['recall@20']:.3f}  NDCG@20 {found['ndcg@20']:.3f}")


def lists(train, test):
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

    lightgbm = imported("lightgbm")
    results = []
    for seed in range(5 if lightgbm else 0):
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
    for k in (5, 10) if results else ():
        values = np.array([result[k] for result in results])
        print(f"LightGBM lambdarank, defaults  NDCG@{k} {values.mean():.3f} +- {values.std(ddof=1):.3f}")
    random = [ndcg("test", np.random.default_rng(seed).random(len(parts["test"][2]))) for seed in range(100)]
    print("random order  " + "  ".join(f"NDCG@{k} {np.mean([one[k] for one in random]):.3f}" for k in (5, 10)))


if __name__ == "__main__":
    {"interactions": interactions, "lists": lists}[sys.argv[1]](*sys.argv[2:])
