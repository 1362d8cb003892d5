"""Popularity, transitions, item-kNN, ALS and EASE: trials on validation, then the test split once.

    python examples/peers/baselines.py path/to/ml-100k --out docs/results/own-data

The ranks come from `protocol.ranks`, in numpy. Recall@20 and NDCG@20 of the chosen settings are measured a second time
by `recsys_topk.evaluation.evaluate_baseline`; the script fails if they differ. ALS has a seed, the others do not.
"""

import argparse
from pathlib import Path

import numpy as np
import torch
from export_split import export
from protocol import METRIC, Cost, Split, best_trial, draw_trials, metrics, ranks, write_result

from recsys_topk.datamodules import InteractionsDataModule
from recsys_topk.evaluation import evaluate_baseline
from recsys_topk.evaluation.baselines import registry
from recsys_topk.evaluation.training_log import TrainingLog

SPACES = {
    "popularity": {},
    "transitions": {"gaps": [5, 3, 10], "newest": [5, 3, 10, 1], "damping": [0.3, 0.0, 0.5, 0.7]},
    "itemknn": {"neighbours": [100, 20, 50, 200, 500], "weighting": ["tfidf", "cosine", "bm25"]},
    "als": {
        "factors": [64, 32, 128],
        "regularization": [1.0, 0.1, 10.0],
        "alpha": [10.0, 1.0, 3.0],
        "iterations": [15, 30],
    },
    "ease": {"regularization": [200.0, 20.0, 50.0, 100.0, 500.0, 1000.0, 2000.0, 5000.0]},
}


def training_log(split):
    """Return the training data of the exported split as the baselines get them."""
    user = np.repeat(np.arange(len(split.train)), [len(one) for one in split.train])
    item = np.concatenate(split.train).astype(np.int64)
    return TrainingLog(torch.from_numpy(np.bincount(item, minlength=split.items)), (user, item))


def measure(split, part, name, options):
    """Fit a baseline; return the ranks and the cost."""
    with Cost() as cost:
        baseline = registry.get(name, **options)
        baseline.fit(training_log(split))

        def scores(some):
            histories = [torch.from_numpy(one.astype(np.int64)) for one in split.history[part][some]]
            padded = torch.nn.utils.rnn.pad_sequence(histories, batch_first=True, padding_value=-1)
            return baseline.scores(padded).numpy()

        found = ranks(split, part, scores)
    return found, cost.found


def check(found, data, part, name, options):
    """Fail unless the evaluator of the toolkit gets the same values."""
    other = evaluate_baseline(registry.get(name, **options), data, part, cuts=[20])
    for metric, value in metrics(found).items():
        if abs(value - other[metric]) > 1e-9:
            raise AssertionError(f"{name}, {part}, {metric}: {value} here, {other[metric]} by evaluate_baseline")


def main():
    """Tune, then test."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("root")
    parser.add_argument("--out", required=True)
    parser.add_argument("--trials", type=int, default=8)
    parser.add_argument("--names", nargs="+", default=list(SPACES))
    given = parser.parse_args()
    torch.set_num_threads(1)
    data = InteractionsDataModule(given.root, split="leave_last")
    data.prepare_data()
    split = Split(export(data))
    for name in given.names:
        space = SPACES[name]
        seeds = [1, 2, 3] if name == "als" else [None]
        trials = []
        for settings in draw_trials(space, given.trials if space else 1):
            seed = {} if seeds[0] is None else {"seed": seeds[0]}
            found, cost = measure(split, "val", name, {**settings, **seed})
            trials.append({"settings": settings, "validation": metrics(found), **cost})
            print(name, settings, metrics(found), flush=True)
        best, runs = best_trial(trials)["settings"], []
        for seed in seeds:
            options = best if seed is None else {**best, "seed": seed}
            found, cost = measure(split, "test", name, options)
            check(found, data, "test", name, options)
            runs.append({"seed": seed, "ranks": found, **cost})
        result = write_result(
            given.out, name, Path(given.root).stem, split, trials, runs, ("recsys-topk", "implicit", "torch", "numpy")
        )
        print(name, best, METRIC, result["validation"][METRIC], result["test"], flush=True)


if __name__ == "__main__":
    main()
