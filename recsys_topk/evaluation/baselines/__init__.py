"""Recommenders without a cascade, measured by the same evaluation: one file per baseline, found by name."""

from recsys_topk.evaluation.baselines.base import Baseline, make_baselines, registry

__all__ = ["Baseline", "make_baselines", "registry"]
