"""The table of all results: means over seeds, and paired bootstrap intervals over users against a reference row.

    python examples/peers/table.py docs/results/own-data --data ml-100k --reference als

A difference is the mean of (row - reference) over users. Its interval is `runs.statistics.bootstrap_interval`, over
seeds and users. A competitor without a seed is compared with every seed of the other one.
"""

import argparse
import json
from pathlib import Path

import numpy as np
from protocol import ndcg_of, recall_of

from recsys_topk.runs.statistics import bootstrap_interval

VALUES = {"recall": recall_of, "ndcg": ndcg_of}


def read(folder, data):
    """Return the results of a data set, the lowest test Recall@20 first."""
    found = [json.loads(path.read_text()) for path in sorted(Path(folder).glob(f"{data}-*.json"))]
    found = [one for one in found if one["data"] == data]
    if len({one["split"] for one in found}) > 1:
        raise ValueError(f"results of {data} have different splits: { {one['name']: one['split'] for one in found} }")
    return sorted(found, key=lambda one: one["test"]["recall@20"])


def per_user(result, metric, k):
    """Return the metric of each seed and user, (S, users)."""
    return np.stack([VALUES[metric](np.array(run["ranks"]), k) for run in result["runs"]])


def difference(result, reference, metric, k):
    """Return the mean difference to the reference and its interval."""
    one, other = per_user(result, metric, k), per_user(reference, metric, k)
    if len(one) != len(other):  # a competitor without a seed, or with fewer seeds: all pairs
        one, other = np.repeat(one, len(other), 0), np.tile(other, (len(one), 1))
    return float((one - other).mean()), *bootstrap_interval(one - other)


def rows(results, reference, k=20):
    """Return the cells of the table, one list per row."""
    named = {one["name"]: one for one in results}
    if reference not in named:
        raise ValueError(f"no result is called {reference!r}; there are {', '.join(named)}")
    for one in results:
        values = {metric: per_user(one, metric, k).mean(1) for metric in VALUES}
        spread = [f" ± {value.std(ddof=1):.4f}" if len(value) > 1 else "" for value in values.values()]
        cells = [f"{value.mean():.4f}{more}" for value, more in zip(values.values(), spread, strict=True)]
        for metric in VALUES:
            found = difference(one, named[reference], metric, k)
            cells.append("" if one["name"] == reference else "{:+.4f} [{:+.4f}, {:+.4f}]".format(*found))
        spent = [run.get("cpu_seconds", np.nan) for run in one["runs"]]
        peak = max(run.get("peak_memory_mb", 0) for run in one["runs"])
        yield [
            one["name"], *cells, f"{one['validation']['recall@20']:.4f}", str(len(one["trials"])),
            f"{sum(trial.get('cpu_seconds', np.nan) for trial in one['trials']):.0f} s", f"{np.mean(spent):.0f} s",
            f"{peak:,} MB",
        ]  # fmt: skip


def main():
    """Print a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("--data", required=True)
    parser.add_argument("--reference", default="als")
    parser.add_argument("--k", type=int, default=20)
    given = parser.parse_args()
    k = given.k
    head = ["", f"Recall@{k}", f"NDCG@{k}", f"Recall@{k} - {given.reference}", f"NDCG@{k} - {given.reference}"]
    head += ["Recall@20, validation", "trials", "CPU, trials", "CPU, one run", "peak memory"]
    lines = [head, ["---"] * len(head), *rows(read(given.folder, given.data), given.reference, k)]
    print("\n".join(f"| {' | '.join(line)} |" for line in lines))


if __name__ == "__main__":
    main()
