"""Statistics over the seeds of runs, for comparisons, streams and reports."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

Runs: TypeAlias = Mapping[str, Sequence[Mapping[str, Any]]]


def spread(values: Sequence[float]) -> float | None:
    """Return the standard deviation; None for fewer than two values."""
    return statistics.stdev(values) if len(values) > 1 else None


def metric_names(runs: Runs) -> list[str]:
    """Return the names of the metrics, the joint recall first."""
    return list(next(iter(runs.values()))[0]["metrics"])


def summarise(runs: Runs) -> list[dict[str, Any]]:
    """Return one row per competitor of a comparison, finished or not.

    ``joint`` is the mean over seeds of the first metric, ``+-`` its standard deviation, ``p`` the p-value of a paired
    two-sided t-test against the first competitor over the common seeds, ``alone`` the means of the other metrics by
    name, ``seconds`` the mean training time, and ``seeds`` the number of seeds.
    """
    joint, *alone = metric_names(runs)
    first = next(iter(runs))
    by_seed = {
        label: {run.get("seed", number): run["metrics"][joint] for number, run in enumerate(records)}
        for label, records in runs.items()
    }
    return [
        {
            "run": label,
            "joint": statistics.fmean(values.values()),
            "+-": spread(list(values.values())),
            "p": None
            if label == first
            else paired_p_value([values[s] - by_seed[first][s] for s in values if s in by_seed[first]]),
            "alone": {name: statistics.fmean(run["metrics"][name] for run in runs[label]) for name in alone},
            "seconds": statistics.fmean(run["seconds"] for run in runs[label]),
            "seeds": len(values),
        }
        for label, values in by_seed.items()
    ]


def curves(runs: Runs) -> dict[str, dict[str, list[float]]]:
    """Return the joint recall of each seed of a stream, by label and day."""
    lines: dict[str, dict[str, list[float]]] = {}
    for label, records in runs.items():
        for record in records:
            for entry in record["days"]:
                joint = next(iter(entry["metrics"].values()))
                lines.setdefault(label, {}).setdefault(entry["day"], []).append(joint)
    return {label: dict(sorted(by_day.items())) for label, by_day in lines.items()}


def means(lines: Mapping[str, Mapping[Any, Sequence[float]]]) -> dict[str, dict[Any, float]]:
    """Return the mean over seeds of each point of some curves."""
    return {label: {x: statistics.fmean(values) for x, values in line.items()} for label, line in lines.items()}


def bands(
    lines: Mapping[str, Mapping[Any, float]], spreads: Mapping[str, Mapping[Any, float | None]]
) -> dict[str, list[list[float]]]:
    """Return the mean minus and plus the standard deviation of every curve that has one."""
    return {
        label: [[y + sign * (spreads[label][x] or 0.0) for x, y in line.items()] for sign in (-1, 1)]
        for label, line in lines.items()
        if any(spreads[label].values())
    }


def paired_p_value(differences: Sequence[float]) -> float | None:
    """Return the two-sided p-value of a t-test that the mean of `differences` is 0; None for fewer than two values.

    The distribution function of Student's t is computed by its finite series (Abramowitz and Stegun 26.7.3, 26.7.4).

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
    odd = n % 2
    term, series = cosine**odd, 0.0
    for j in range(odd, n - odd, 2):
        series += term
        term *= cosine * cosine * (j + 1) / (j + 2)
    inside = math.sin(angle) * series
    return 1.0 - ((angle + inside) * 2 / math.pi if odd else inside)


def bootstrap_interval(
    differences: npt.NDArray[np.floating[Any]], samples: int = 2000, level: float = 0.95, seed: int = 0
) -> tuple[float, float]:
    """Return a percentile interval of the mean of paired differences, by a bootstrap over seeds and requests.

    The differences between two competitors are (S, R), for each seed and request. Each sample draws seeds and requests
    with replacement, independently of each other, so that the interval covers both the randomness of training and that
    of the requests. The cost is O(samples * R).

    Example:
        >>> bootstrap_interval(np.full((3, 10), 0.25))
        (0.25, 0.25)
    """
    generator = np.random.default_rng(seed)
    seeds, requests = differences.shape
    means = np.empty(samples)
    for number in range(samples):
        weights = generator.multinomial(seeds, np.full(seeds, 1 / seeds)) / seeds
        means[number] = (weights @ differences)[generator.integers(requests, size=requests)].mean()
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)
