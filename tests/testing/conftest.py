"""Lets the tests of the contract suite use the data module of tests/datamodules."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "datamodules"))
