"""Models of the library `implicit`, fitted on training interactions."""

from __future__ import annotations

import warnings
from importlib import import_module
from typing import Any

import numpy as np
import torch
from torch import Tensor

from recsys_topk.evaluation.training_log import TrainingLog
from recsys_topk.types import Array


def fit_implicit(path: str, baseline: str, log: TrainingLog, **options: Any) -> Any:
    """Return a fitted model.

    Args:
        path: Module and class, e.g. ``"als.AlternatingLeastSquares"``.
        baseline: Name of the baseline, for messages.
        log: The training data.
        options: Options of the model.
    """
    user, item = log.interactions(baseline)
    module, _, name = path.rpartition(".")
    try:
        cls = getattr(import_module(f"implicit.{module}"), name)
    except ImportError as error:
        message = f"the baseline {baseline!r} needs implicit: pip install 'recsys-topk[baselines]'"
        raise ImportError(message, name="implicit") from error
    matrix = sparse_matrix(user, item, (int(user.max(initial=0)) + 1, log.items))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"implicit\.")  # about threads of BLAS and conversions of matrices
        model = cls(num_threads=torch.get_num_threads(), **options)
        model.fit(matrix, show_progress=False)
    return model


def history_matrix(histories: Tensor, items: int) -> Any:
    """Return histories, (B, H) rows followed by -1, as a SciPy matrix (B, C) with 1 where a user had an item."""
    rows = histories.numpy()
    request, column = np.nonzero(rows >= 0)
    return sparse_matrix(request, rows[request, column], (len(rows), items))


def sparse_matrix(user: Array, item: Array, shape: tuple[int, int]) -> Any:
    """Return a SciPy matrix with 1 for each pair of a user and an item."""
    from scipy.sparse import csr_matrix

    matrix = csr_matrix((np.ones(len(user), np.float32), (user, item)), shape)
    matrix.data[:] = 1  # repeated interactions were added up
    return matrix
