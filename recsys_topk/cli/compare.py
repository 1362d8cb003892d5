"""`recsys-topk compare`: several losses on the same data and batches, with seeds, spread and paired significance."""

from __future__ import annotations

import argparse
import csv
import json
import math
import os
import shlex
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from recsys_topk.cli.console import echo, table, warn


def main(argv: list[str]) -> int:
    """Run what has not been run yet, then print and write the table."""
    parser = argparse.ArgumentParser(
        prog="recsys-topk compare",
        description="Train several losses on the same data and batch order, with seeds, spread and a paired test. "
        "Further options go to every `recsys-topk fit`. Finished runs are kept: an interrupted "
        "comparison goes on where it was.",
        allow_abbrev=False,
    )
    parser.add_argument("--losses", default="", help="names, with commas between them")
    parser.add_argument(
        "--variant", action="append", default=[], metavar="LABEL=OPTIONS",
        help="a further competitor, e.g. 'dftopk tau 500=--loss dftopk --loss.tau 500'",
    )  # fmt: skip
    parser.add_argument("--seeds", type=int, default=3, help="runs of each (default: %(default)s)")
    parser.add_argument("--out", default="runs/compare", help="folder of the comparison (default: %(default)s)")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time, each with one thread if more than 1")
    options, further = parser.parse_known_args(argv)
    variants = {name: ["--loss", name] for name in options.losses.split(",") if name}
    for text in options.variant:
        label, equals, arguments = text.partition("=")
        variants[label] = shlex.split(arguments)
        if not equals or not arguments.lstrip().startswith("--"):
            raise ValueError(f"--variant must be LABEL=OPTIONS, with no = in the label, got {text!r}")
    if not variants:
        raise ValueError("nothing to compare: give --losses dftopk,listnet or --variant")
    if options.seeds < 1:
        raise ValueError(f"--seeds must be at least 1, got {options.seeds}")
    check_losses(variants)
    folder = Path(options.out)
    run_all(folder, variants, options.seeds, further, options.jobs)
    results = {label: read(folder, label, options.seeds) for label in variants}
    rows = summarise(results)
    echo(table(rows))
    (folder / "comparison.json").write_text(json.dumps({"rows": rows, "runs": results}, indent=1))
    with (folder / "comparison.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(dict.fromkeys(key for row in rows for key in row)))
        writer.writeheader()
        writer.writerows(rows)
    echo(f"written: {folder / 'comparison.json'}, {folder / 'comparison.csv'}")
    return 0


def check_losses(variants: Mapping[str, Sequence[str]]) -> None:
    """Raise at once if a loss or objective is misspelt, not after the runs before it."""
    from recsys_topk.cli.arguments import rewrite

    for arguments in variants.values():
        rewrite(["fit", *arguments])


def path_of(folder: Path, label: str, seed: int) -> Path:
    """Return the file with the numbers of one run."""
    name = "".join(c if c.isalnum() or c in "-." else "-" for c in label)
    return folder / "trials" / f"{name}-s{seed}.json"


def run_all(folder: Path, variants: Mapping[str, Sequence[str]], seeds: int, further: Sequence[str], jobs: int) -> None:
    """Run every (variant, seed) whose numbers are not there yet, with a line for each."""
    (folder / "trials").mkdir(parents=True, exist_ok=True)
    todo = [(label, seed) for seed in range(seeds) for label in variants if not path_of(folder, label, seed).is_file()]
    total = len(variants) * seeds
    if len(todo) < total:
        echo(f"{total - len(todo)} of {total} runs are there already")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"} if jobs > 1 else dict(os.environ)

    def trial(label: str, seed: int) -> str | None:
        target = path_of(folder, label, seed)
        arguments = [*further, *variants[label], f"--seed_everything={seed}", f"--data.seed={seed}"]
        arguments += ["--out", str(folder / "runs"), "--name", target.stem, "--trainer.enable_progress_bar=false"]
        done = subprocess.run(
            [sys.executable, "-m", "recsys_topk.cli.trial", str(target), *arguments],
            capture_output=True, text=True, check=False, env=environment,
        )  # fmt: skip
        if done.returncode != 0:
            return (done.stderr.strip().splitlines() or ["no message"])[-1]
        return None

    failures = []
    with ThreadPoolExecutor(jobs) as pool:
        waiting = {(label, seed): pool.submit(trial, label, seed) for label, seed in todo}
        for number, ((label, seed), future) in enumerate(waiting.items(), start=total - len(todo) + 1):
            failure = future.result()
            if failure is not None:
                failures.append(f"{label}, seed {seed}: {failure}")
                warn(f"[{number}/{total}] {failures[-1]}")
                continue
            found = json.loads(path_of(folder, label, seed).read_text())
            joint = next(iter(found["metrics"].values()))
            echo(f"[{number}/{total}] {label}, seed {seed}: {joint:.4f} ({found['seconds']:.0f} s)")
    if failures:
        raise ValueError(
            f"{len(failures)} runs failed; the first: {failures[0]}. Mend it and run the same command again"
        )


def read(folder: Path, label: str, seeds: int) -> list[dict[str, Any]]:
    """Return what each seed measured."""
    return [json.loads(path_of(folder, label, seed).read_text()) for seed in range(seeds)]


def summarise(results: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """Return a row for each competitor: means over seeds, and a paired test against the first competitor.

    `+-` is the standard deviation over seeds of the first metric (the joint recall), and `p` that of a paired
    two-sided t-test on it over seeds.
    """
    first = next(iter(results))
    names = list(results[first][0]["metrics"])
    rows = []
    for label, runs in results.items():
        values = {name: [run["metrics"][name] for run in runs] for name in names}
        joint, *alone = names
        baseline = [run["metrics"][joint] for run in results[first]]
        differences = [a - b for a, b in zip(values[joint], baseline, strict=True)]
        row: dict[str, Any] = {"run": label, joint: statistics.fmean(values[joint])}
        row["+-"] = statistics.stdev(values[joint]) if len(runs) > 1 else None
        row["p"] = None if label == first else paired_p_value(differences)
        row |= {name: statistics.fmean(values[name]) for name in alone}
        row["seconds"] = statistics.fmean(run["seconds"] for run in runs)
        rows.append(row)
    return rows


def paired_p_value(differences: Sequence[float]) -> float | None:
    """Return the two-sided p of a t-test that the mean of `differences` is 0; None for fewer than two of them.

    The distribution function of Student's t with n degrees of freedom, by its finite series (Abramowitz and Stegun
    26.7.3, 26.7.4).

    Example:
        >>> round(paired_p_value([1.0, 2.0, 3.0]), 4)
        0.0742
    """
    if len(differences) < 2:
        return None
    spread = statistics.stdev(differences)
    if spread == 0.0:
        return 1.0 if statistics.fmean(differences) == 0.0 else 0.0
    n = len(differences) - 1
    t = abs(statistics.fmean(differences)) / (spread / math.sqrt(len(differences)))
    angle = math.atan(t / math.sqrt(n))
    cosine = math.cos(angle)
    if n % 2:
        term, series = cosine, 0.0
        for j in range(1, n - 1, 2):
            series += term
            term *= cosine * cosine * (j + 1) / (j + 2)
        inside = (angle + math.sin(angle) * series) * 2 / math.pi
    else:
        term, series = 1.0, 0.0
        for j in range(0, n, 2):
            series += term
            term *= cosine * cosine * (j + 1) / (j + 2)
        inside = math.sin(angle) * series
    return 1.0 - inside
