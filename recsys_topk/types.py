"""The type of numpy arrays in annotations. Needs only numpy."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy.typing as npt

Array: TypeAlias = npt.NDArray[Any]
"""A numpy array of any dtype; the dtype and the shape are in the docstrings."""
