"""The hot loops: one file per operation, each with a torch reference and faster backends beside it.

`recsys_topk.ops.backend("torch")` or the environment variable ``RECSYS_TOPK_BACKEND`` choose the backend; see
`recsys_topk.ops.dispatch`. Needs torch and numpy only; numba is used if it is installed.
"""

from __future__ import annotations

from recsys_topk.ops.dispatch import backend, current_backend

__all__ = ["backend", "current_backend"]
