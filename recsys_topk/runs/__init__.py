"""A training run as an object: a config in, `TrainingRun.fit`, `validate`, `test` and `predict` out."""

from recsys_topk.runs.run import TrainingRun

__all__ = ["TrainingRun"]
