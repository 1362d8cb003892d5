"""The test ranks of our own models, as a result beside those of the peers.

    python examples/peers/own.py cascade path/to/ml-100k runs/s1/checkpoints/best.ckpt runs/s2/checkpoints/best.ckpt \
        --trials trials.json --out docs/results/own-data

One checkpoint per seed, in the order of `--seeds`. `--trials`: a JSON list of {settings, validation: {"recall@20":
...}, cpu_seconds}, the trials that chose the settings. `--cost`: a JSON list of {cpu_seconds, peak_memory_mb}, one per
checkpoint. Ranks beyond the quota of the last stage are 0. `--stages 1`: measure the first stage alone; its validation
value is then measured too, with the first checkpoint.
"""

import argparse
import copy
import dataclasses
import json
from pathlib import Path

import numpy as np
import torch
from export_split import export
from protocol import DEEPEST, Split, best_trial, metrics, write_result

from recsys_topk.evaluation import evaluate_corpus
from recsys_topk.runs.deploy import open_checkpoint


def model_ranks(model, data, part="test"):
    """Return the rank of each request's positive over the whole catalogue; 0 = beyond the last quota, or `DEEPEST`.

    With one positive, NDCG = 1 / log2(1 + rank).
    """
    depth = min(DEEPEST, model.cascade.quotas[-1])
    evaluation = evaluate_corpus(model, data, part, cuts=[depth], baselines=False, keep=True)
    value = evaluation.lists.per_request(f"ndcg@{depth}/corpus").double().numpy()
    return np.where(value > 0, np.rint(2 ** (1 / np.where(value > 0, value, 1.0)) - 1), 0).astype(int)


def first_stages(cascade, number):
    """Return a cascade of the first stages of another one, with its weights and its final quota."""
    shorter = copy.copy(cascade)
    shorter.configs = [dataclasses.replace(one) for one in cascade.configs[:number]]
    shorter.configs[-1].quota = cascade.quotas[-1]
    shorter._modules = {**cascade._modules}
    shorter.stages = torch.nn.ModuleDict({one.name: cascade.stages[one.name] for one in shorter.configs})
    return shorter


def main():
    """Measure the checkpoints, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name")
    parser.add_argument("root")
    parser.add_argument("checkpoints", nargs="+")
    parser.add_argument("--trials", required=True)
    parser.add_argument("--cost")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--stages", type=int)
    parser.add_argument("--out", required=True)
    given = parser.parse_args()
    cost = json.loads(Path(given.cost).read_text()) if given.cost else [{}] * len(given.checkpoints)
    runs = []
    for seed, path, spent in zip(given.seeds[: len(given.checkpoints)], given.checkpoints, cost, strict=True):
        model, data, _ = open_checkpoint(path, root=given.root)
        if given.stages:
            model.cascade = first_stages(model.cascade, given.stages)
        runs.append({"seed": seed, "ranks": model_ranks(model, data), **spent})
        if given.stages and len(runs) == 1:
            validation = metrics(model_ranks(model, data, "val"))
    trials = json.loads(Path(given.trials).read_text())
    if given.stages:
        trials = [{"settings": best_trial(trials)["settings"], "validation": validation}]
    versions = ("recsys-topk", "torch", "numpy")
    result = write_result(given.out, given.name, Path(given.root).stem, Split(export(data)), trials, runs, versions)
    print(given.name, result["settings"], result["validation"], result["test"])


if __name__ == "__main__":
    main()
