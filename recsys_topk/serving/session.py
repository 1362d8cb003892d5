"""Runs an ONNX file with onnxruntime. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from recsys_topk.serving.manifest import Model

Array = npt.NDArray[Any]


class Session:
    """A loaded model of an export. Thread-safe. A call uses `threads` threads; 0 = chosen by onnxruntime."""

    def __init__(self, path: Path, model: Model, threads: int = 1) -> None:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        options.log_severity_level = 3
        self.model = model
        self._session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])

    def run(self, given: Mapping[str, Array]) -> Array:
        """Return the output for arrays by input name. Arrays are converted to the data types of the inputs."""
        inputs = {one.name: np.ascontiguousarray(given[one.name], dtype=one.dtype) for one in self.model.inputs}
        found: Array = self._session.run([self.model.output], inputs)[0]
        return found
