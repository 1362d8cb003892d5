"""Other libraries on the split of a data module, for the tables of docs/own-data.md.

    python examples/peers_own_data.py interactions path/to/ml-100k
    python examples/peers_own_data.py lists path/to/rank.train path/to/rank.test

The first prints popularity, item-kNN and ALS (`pip install implicit`): Recall@20 and NDCG@20 over the whole catalogue
without items that the user had before, for requests of the leave-last-out split. The second prints LightGBM's
lambdarank (`pip install lightgbm`): NDCG@5 and NDCG@10, mean and standard deviation over five seeds.
"""

import importlib
import sys

import numpy as np
import torch
from scipy.sparse import csr_matrix

from recsys_topk.datamodules import InteractionsDataModule, ListsDataModule
from recsys_topk.metrics.functional import ndcg_at, recall_at


def imported(name):
    """Return an optional package, or print how to install it and return None."""
    try:
        return importlib.import_module(name)
    except ImportError:
        print(f"{name} is not installed, its rows are left out: pip install {name}")
        return None


def interactions(root):
    """Score all items for each request. All methods get the training data and histories of the cascade."""
    data = InteractionsDataModule(root, split="leave_last")
    train, items = data.shard("train"), data.shard("test").catalogue().item_id.numpy()
    rows = np.arange(len(train))
    seen, own = train.excluded(rows).numpy(), train.catalogue().item_id.numpy()  # all training items of each user
    users, user = np.unique(train.users(rows), return_inverse=True)
    item = np.searchsorted(items, own[seen[seen >= 0]])
    pairs = np.unique(np.stack([np.repeat(user, (seen >= 0).sum(1)), item]), axis=1)
    matrix = csr_matrix((np.ones(pairs.shape[1], np.float32), pairs), (len(users), len(items)))

    def table(split):
        shard = data.shard(split)
        rows = np.arange(len(shard))
        batch, before = shard.batch(rows), shard.excluded(rows).numpy()
        at = np.repeat(rows, (before >= 0).sum(1)), before[before >= 0]
        query = csr_matrix((np.ones(len(at[0]), np.float32), at), (len(rows), len(items)))
        labels = torch.zeros(query.shape)
        where = np.searchsorted(items, batch.item_id[batch.candidates][batch.mask].numpy())
        labels[torch.arange(len(rows)).repeat_interleave(batch.mask.sum(1)), torch.from_numpy(where)] = 1.0
        mask = torch.from_numpy(query.toarray() == 0) | (labels > 0)
        for name, score in methods.items():
            scores = torch.from_numpy(np.ascontiguousarray(score(query), dtype=np.float32))
            values = [recall_at(scores, labels, mask, k=20, m=20)[0], ndcg_at(scores, labels, mask, k=20)[0]]
            print(f"{split:5} {name:40} Recall@20 {values[0].mean():.3f}  NDCG@20 {values[1].mean():.3f}")

    methods = {"popularity": lambda query: np.tile(np.asarray(matrix.sum(0)), (query.shape[0], 1))}
    if imported("implicit"):
        from implicit.als import AlternatingLeastSquares
        from implicit.nearest_neighbours import CosineRecommender

        knn = CosineRecommender(K=20, num_threads=1)
        knn.fit(matrix, show_progress=False)
        methods["item-kNN, cosine, K = 20"] = lambda query: (query @ knn.similarity).toarray()
        als = AlternatingLeastSquares(32, regularization=1.0, alpha=1.0, random_state=0, num_threads=1)
        als.fit(matrix, show_progress=False)
        methods["ALS, 32 factors, regularization 1"] = lambda query: (
            als.recalculate_user(np.arange(query.shape[0]), query) @ als.item_factors.T
        )
    for split in ("val", "test"):
        table(split)


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
