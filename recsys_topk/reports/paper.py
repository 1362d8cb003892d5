"""The figures that the paper reports."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import Any, cast

import yaml

# The experiments, in the order of `recsys-topk experiment all` and of the report: the quick ones first.
EXPERIMENTS = ("main-table", "runtime", "tau", "negatives", "streaming")


@cache
def paper_figures() -> Mapping[str, Any]:
    """Return the figures of the paper.

    Example:
        >>> paper_figures()["recall"]["joint"]["dftopk"][0]
        0.404
    """
    text = resources.files("recsys_topk.reports").joinpath("figures.yaml").read_text(encoding="utf-8")
    return cast("Mapping[str, Any]", yaml.safe_load(text))


def paper_curves(figure: str, kind: str) -> dict[str, dict[float, float]]:
    """Return the lines of a figure of the paper by name and x; empty if the paper does not have the figure.

    Figures are ``recall`` (by training negatives), ``tau`` and ``runtime`` (by items). Their kinds are ``joint``,
    ``retrieval`` and ``ranking``; for the runtime, the device.

    Example:
        >>> paper_curves("recall", "joint")["dftopk"][25.0], paper_curves("tau", "joint")["dftopk"][1000.0]
        (0.5607, 0.4039)
    """
    known = paper_figures().get(figure, {})
    lines = known.get(kind, {})
    x = next(iter(known.values()), ())
    by_name = {"dftopk": lines} if isinstance(lines, list) else lines
    return {name: dict(zip(map(float, x), line, strict=False)) for name, line in by_name.items()}
