"""An ONNX file that is run by onnxruntime. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from recsys_topk.serving.manifest import Model

Array = npt.NDArray[Any]


class Session:
    """A model of an export, loaded once. May be called from several threads.

    Args:
        path: The ONNX file.
        model: Its inputs and its output.
        threads: Threads of one call; 0 = as onnxruntime chooses.
    """

    def __init__(self, path: Path, model: Model, threads: int = 1) -> None:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        options.log_severity_level = 3
        self.model = model
        self._session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])

    def run(self, given: Mapping[str, Array]) -> Array:
        """Return the output, given arrays by name; integers and floats are converted to what the model reads."""
        inputs = {one.name: np.ascontiguousarray(given[one.name], dtype=one.dtype) for one in self.model.inputs}
        found: Array = self._session.run([self.model.output], inputs)[0]
        return found
