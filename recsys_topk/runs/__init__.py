"""A training run as an object: a config in, `TrainingRun.fit`, `validate`, `test` and `predict` out."""

from __future__ import annotations

from typing import TYPE_CHECKING

from recsys_topk.lazy import attach

if TYPE_CHECKING:
    from recsys_topk.runs.run import TrainingRun as TrainingRun

__all__ = ["TrainingRun"]

__getattr__, __dir__ = attach(__name__)
