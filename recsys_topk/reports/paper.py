"""What the paper reports."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import Any, cast

import yaml


@cache
def paper_figures() -> Mapping[str, Any]:
    """Return the paper's figures.

    Example:
        >>> paper_figures()["recall"]["joint"]["dftopk"][0]
        0.404
    """
    text = resources.files("recsys_topk.reports").joinpath("figures.yaml").read_text(encoding="utf-8")
    return cast("Mapping[str, Any]", yaml.safe_load(text))
