"""Damaged pickles of RecFlow: no flipped bit gives other stages, and a few bytes take little memory."""

from __future__ import annotations

import random
import resource
import shutil
from pathlib import Path

import numpy as np
import pytest
from hand_made import HandMade

from recsys_topk.datamodules.recflow.files import DayColumns, RecFlowFiles, read_day
from recsys_topk.datamodules.recflow.pickles import FormatError, load_pickle


def columns(day: DayColumns) -> dict[str, np.ndarray]:
    return {f"{part} {name}": values for part in ("requests", "items") for name, values in getattr(day, part).items()}


def test_no_flipped_bit_gives_other_stages(world_root: Path, tmp_path: Path) -> None:
    files = RecFlowFiles(world_root)
    paths = files.paths(files.days[0])
    before = columns(read_day(paths, files.counts))
    copy = tmp_path / "day.pkl"
    shutil.copy(str(paths["request_id_dict"]), copy)
    content, draw, refused = copy.read_bytes(), random.Random(0), 0
    for at in draw.sample(range(len(content)), 60):
        damaged = bytearray(content)
        damaged[at] ^= 1 << draw.randrange(8)
        copy.write_bytes(damaged)
        try:
            after = columns(read_day({**paths, "request_id_dict": copy}, files.counts))
        except FormatError:
            refused += 1
        else:
            assert all(np.array_equal(before[name], after[name]) for name in before), at
    assert refused > 30


def test_rows_that_differ_from_all_stage_are_refused(hand_made: HandMade) -> None:
    files = hand_made.write()
    (day,) = files.days
    read_day(files.paths(day), files.counts)
    hand_made.stages[500]["rank_neg"][3, 1] ^= 1  # the author of one item
    files = hand_made.write()
    with pytest.raises(FormatError, match=r"request 500: 1 of \d+ rows differ from all_stage; one of the files"):
        read_day(files.paths(day), files.counts)
    hand_made.stages[500]["rank_neg"][3, 1] ^= 1
    hand_made.stages[501]["coarse_nef"] = hand_made.stages[501].pop("coarse_neg")
    files = hand_made.write()
    with pytest.raises(FormatError, match="request 501: unknown stage 'coarse_nef'"):
        read_day(files.paths(day), files.counts)


@pytest.mark.parametrize(
    "content",
    [b"]r\xff\xff\xff\x0f.", b"\x80\x04]r\xff\xff\xff\x3f.", b"\x80\x04\x96\x00\x00\x00\x00\x02\x00\x00\x00."],
    ids=["memo", "larger memo", "bytearray"],
)
def test_a_few_bytes_do_not_take_gigabytes(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "a.pkl").write_bytes(content)
    before, limits = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, resource.getrlimit(resource.RLIMIT_AS)
    with pytest.raises(FormatError, match=r"a\.pkl"):
        load_pickle(tmp_path / "a.pkl")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300_000  # KB
    assert resource.getrlimit(resource.RLIMIT_AS) == limits
