"""What all competitors share: the split, the metrics, the trials, and the file of a result. Needs numpy only.

A result is one JSON file per competitor and data set. `runs` holds one entry per seed with `ranks`: the rank of the
test item of each user among all candidates, in the order of the split, 0 = beyond 100. Every Recall@k and NDCG@k up to
100, and paired intervals over users, can be computed from it.
"""

import hashlib
import importlib.metadata
import json
import platform
import random
import resource
import sys
import time
from pathlib import Path

import numpy as np

DEEPEST = 100
METRIC = "recall@20"


class Split:
    """The split that `export_split.py` wrote.

    `train` is a list of item rows per user, oldest first. `history`, `excluded` and `target` of "val" and "test" have
    one entry per request. Items are rows of the catalogue, 0 .. items - 1.
    """

    def __init__(self, path):
        with np.load(path) as arrays:
            self.arrays = dict(arrays)
        self.items = int(self.arrays["items"])
        self.train = self._lists("train")
        self.history = {split: self._lists(f"{split}_history") for split in ("val", "test")}
        self.excluded = {split: self._lists(f"{split}_excluded") for split in ("val", "test")}
        self.target = {split: self.arrays[f"{split}_target"] for split in ("val", "test")}
        parts = b"".join(name.encode() + self.arrays[name].tobytes() for name in sorted(self.arrays))
        self.digest = hashlib.sha256(parts).hexdigest()[:16]

    def _lists(self, name):
        return np.split(self.arrays[name], self.arrays[f"{name}_ends"][:-1])


def ranks(split, part, scores, step=256):
    """Return the rank of each target, 0 if it is beyond `DEEPEST`. Ties count against the target.

    `scores` is a function of a slice of requests that returns (requests, items); -inf = the item is not known.
    """
    target, found = split.target[part], []
    for start in range(0, len(target), step):
        some = slice(start, start + step)
        values = np.array(scores(some), dtype=np.float32)
        row = np.arange(len(values))
        own = values[row, target[some]].copy()
        for number, excluded in enumerate(split.excluded[part][some]):
            values[number, excluded] = -np.inf
        values[row, target[some]] = -np.inf
        better = (values >= own[:, None]) & (values > -np.inf)
        found.append(np.where(own > -np.inf, 1 + better.sum(1), 0))
    rank = np.concatenate(found)
    return np.where(rank <= DEEPEST, rank, 0)


def recall_of(rank, k):
    """Return Recall@k of each request: one target, so 1 or 0."""
    return ((rank > 0) & (rank <= k)).astype(float)


def ndcg_of(rank, k):
    """Return NDCG@k of each request: 1 / log2(1 + rank)."""
    return recall_of(rank, k) / np.log2(1 + np.maximum(rank, 1))


def metrics(rank, k=20):
    """Return the means over requests."""
    return {f"recall@{k}": float(recall_of(rank, k).mean()), f"ndcg@{k}": float(ndcg_of(rank, k).mean())}


def draw_trials(space, number, seed=0):
    """Return settings: the first value of each option, then a random design. The same sampler for every competitor.

    In the design, the values of an option occur equally often (up to one), in random order.
    """
    generator = random.Random(seed)
    columns = {}
    for name, values in space.items():
        rest = [values[(at + 1) % len(values)] for at in range(number - 1)]
        columns[name] = [values[0], *generator.sample(rest, len(rest))]
    return [{name: column[at] for name, column in columns.items()} for at in range(number)]


class Cost:
    """CPU seconds of the block, and the peak memory of the process until its end."""

    def __enter__(self):
        self._start = time.process_time()
        return self

    def __exit__(self, *_):
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
        self.found = {"cpu_seconds": round(time.process_time() - self._start, 1), "peak_memory_mb": peak}


def best_trial(trials):
    """Return the trial with the largest validation Recall@20, the first one of equals."""
    return max(trials, key=lambda trial: trial["validation"][METRIC])


def write_result(folder, name, data, split, trials, runs, libraries, **facts):
    """Write the JSON of a competitor.

    `trials`: {settings, validation, cpu_seconds, ...} each; `runs`, with the settings of the best trial: {seed, ranks,
    cpu_seconds, peak_memory_mb, ...} each.
    """
    found = [np.asarray(run["ranks"]) for run in runs]
    runs = [{**run, "test": metrics(rank), "ranks": rank.tolist()} for run, rank in zip(runs, found, strict=True)]
    versions = {one: importlib.metadata.version(one) for one in libraries}
    result = {
        "name": name,
        "data": data,
        "split": split.digest,
        "requests": len(split.target["test"]),
        "settings": best_trial(trials)["settings"],
        "validation": best_trial(trials)["validation"],
        "test": {key: float(np.mean([run["test"][key] for run in runs])) for key in runs[0]["test"]},
        "command": " ".join(["python", f"examples/peers/{Path(sys.argv[0]).name}", *sys.argv[1:]]),
        "versions": {"python": platform.python_version(), **versions},
        "cpu": cpu_model(),
        **facts,
        "trials": trials,
        "runs": runs,
    }
    write_json(Path(folder) / f"{data}-{name}.json", result)
    return result


def write_json(path, content):
    """Write a file whole or not at all. Lists of numbers are on one line."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(content, indent=1)
    for run in content.get("runs", ()):
        text = text.replace(_indented(run["ranks"]), json.dumps(run["ranks"], separators=(",", ":")))
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(text + "\n")
    partial.replace(path)


def _indented(values):
    return "[\n" + ",\n".join(f"    {value}" for value in values) + "\n   ]"


def cpu_model():
    """Return the name of the processor."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()
