"""Means over lists are over the lists of all processes, for every objective and loss."""

from __future__ import annotations

from pathlib import Path

import pytest

from recsys_topk import losses
from recsys_topk.cascades.objectives.base import registry as objectives
from tests.distributed.launch import launch


@pytest.mark.slow
@pytest.mark.parametrize("processes", [2, 3])
def test_parts_of_a_batch_give_the_mean_and_the_gradient_of_the_whole(processes: int, tmp_path: Path) -> None:
    for found in launch("tests.distributed.means", processes, tmp_path, timeout=250):
        assert not {case: apart for case, apart in found.items() if not apart < 2e-5}
        for name in (*losses.available(), *objectives.available()):
            assert name == "perturbed" or any(name in case.split() for case in found), name
