"""Simulated and prepared days equal the result of an independent reader that reads one request at a time."""

from __future__ import annotations

import os
import pickle
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from datasets import Dataset
from pyarrow import feather

from recsys_topk.datamodules.recflow.batch_maker import BatchMaker
from recsys_topk.datamodules.recflow.cache import DayCache
from recsys_topk.datamodules.recflow.files import RecFlowFiles
from recsys_topk.datamodules.recflow.layout import LAYOUTS
from tests.datamodules.research_reader import GROUPS, ResearchDataset


@pytest.mark.parametrize("number", range(4))
def test_two_stage_batches_equal_the_independent_reader(day_cache: DayCache, number: int) -> None:
    day = day_cache.files.days[number]
    research = ResearchDataset(day_cache.files.folder, day)
    rows = np.random.default_rng(number).permutation(len(research))
    batch = BatchMaker(LAYOUTS["two-stage"], 50).make(day_cache.open(day), rows)
    assert len(research) == 150
    for place, row in enumerate(rows):
        request, context, history, viewed, length, *rest = research[int(row)]
        items, masks, labels = rest[:4], rest[4:8], rest[8:]
        mask = torch.from_numpy(np.concatenate(masks).astype(bool))
        assert batch.request_id[place] == request
        assert batch.request[place].tolist() == context.tolist()
        assert batch.history_length[place] == viewed.sum()
        assert max(int(batch.history_length[place]), 1) == length
        assert batch.history[place][: viewed.sum()].tolist() == history[viewed].tolist()
        assert torch.equal(batch.mask[place], mask)
        assert batch.items[batch.candidates[place][mask]].tolist() == np.concatenate(items)[mask.numpy()].tolist()
        assert batch.labels[place][mask].tolist() == np.concatenate(labels)[mask.numpy()].tolist()
        assert batch.labels[place][~mask].eq(0).all()
        assert batch.group[place][mask].tolist() == np.repeat(np.arange(4), 10)[mask.numpy()].tolist()
    assert batch.item_id.tolist() == (batch.items[:, 0] - 1).tolist()
    assert batch.item_id.unique().numel() == batch.item_id.numel()
    integers = ("request_id", "request", "history", "history_length", "item_id", "items", "candidates", "group")
    assert {getattr(batch, name).dtype for name in integers} == {torch.int64}
    assert (batch.labels.dtype, batch.mask.dtype) == (torch.float32, torch.bool)


def test_three_stage_lists_equal_the_pickle(day_cache: DayCache) -> None:
    day = day_cache.files.days[0]
    layout = LAYOUTS["three-stage"]
    stored = pickle.loads((day_cache.files.folder / "request_id_dict" / f"{day}.pkl").read_bytes())
    table = feather.read_table(day_cache.files.folder / "all_stage" / f"{day}.feather")
    names = ("request_id", "video_id", "rerank_pos", "rerank_index")
    place = {(r, v): i for r, v, flag, i in zip(*(table[n].to_pylist() for n in names), strict=True) if flag}
    batch = BatchMaker(layout, 50).make(day_cache.open(day), np.arange(150))
    for row, request in enumerate(batch.request_id.tolist()):
        expected = []
        for number, group in enumerate(layout.groups):
            for item in stored[request].get(group.stage, ()):
                label = group.label if group.label is not None else 30 - place[request, int(item[0])]
                expected.append((int(item[0]), label, number))
        mask = batch.mask[row]
        found = zip(
            batch.item_id[batch.candidates[row][mask]].tolist(),
            batch.labels[row][mask].tolist(),
            batch.group[row][mask].tolist(),
            strict=True,
        )
        assert list(found) == expected


def test_catalogue_counts_every_slot(day_cache: DayCache) -> None:
    day = day_cache.files.days[1]
    stored = pickle.loads((day_cache.files.folder / "request_id_dict" / f"{day}.pkl").read_bytes())
    stages = ("rerank_pos", "rerank_neg", *GROUPS)
    videos = [int(item[0]) for entry in stored.values() for stage in stages for item in entry.get(stage, ())]
    ids, counts = np.unique(videos, return_counts=True)
    catalogue = day_cache.open(day).catalogue
    assert catalogue["item_id"].tolist() == ids.tolist()
    assert catalogue["count"].tolist() == counts.tolist()


def test_files_are_memory_mapped_hugging_face_datasets_with_small_types(day_cache: DayCache) -> None:
    day = day_cache.open(day_cache.files.days[0])
    requests = Dataset.from_file(str(day.folder / "requests.arrow"))
    assert requests.num_rows == 150
    types = {name: requests.data.table.schema.field(name).type for name in requests.column_names}
    assert types["user_id"] == pa.uint8()  # 60 users
    assert types["rank_pos"] == pa.list_(pa.int16(), 10)  # 400 items
    assert types["hour"] == pa.uint8()
    items = Dataset.from_file(str(day.folder / "items.arrow"))
    assert items.data.table.schema.field("video_id").type == pa.uint16()
    for column in day.requests.values():
        assert not column.flags.owndata
        assert not column.flags.writeable


def test_second_preparation_writes_nothing(world_root: Path, tmp_path: Path) -> None:
    cache = DayCache(RecFlowFiles(world_root), tmp_path)
    day = cache.files.days[0]
    cache.prepare([day])
    first = (cache.path(day) / "requests.arrow").stat().st_mtime_ns
    cache.prepare([day])
    assert (cache.path(day) / "requests.arrow").stat().st_mtime_ns == first


def test_changed_source_is_prepared_again_and_replaces_the_old_cache(world_root: Path, tmp_path: Path) -> None:
    root = tmp_path / "world"
    shutil.copytree(world_root, root)
    cache = DayCache(RecFlowFiles(root), tmp_path / "prepared")
    days = cache.files.days[:2]
    cache.prepare(days)
    old, other = cache.path(days[0]), cache.path(days[1])
    changed = cache.files.paths(days[0])["request_id_dict"]
    os.utime(changed, ns=(1, 1))
    assert cache.missing(days) == [days[0]]
    cache.prepare(days)
    assert not old.exists()
    assert cache.path(days[0]).is_dir()
    assert other.is_dir()


_PREPARE = """
import sys
from recsys_topk.datamodules.recflow.cache import DayCache
from recsys_topk.datamodules.recflow.files import RecFlowFiles
files = RecFlowFiles(sys.argv[1])
print("ready", flush=True)
DayCache(files, sys.argv[2]).prepare(files.days)
"""


def test_two_concurrent_processes_prepare_every_day_once(world_root: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-c", _PREPARE, str(world_root), str(tmp_path)]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE) for _ in range(2)]
    for process in running:
        process.communicate(timeout=120)
    assert [process.returncode for process in running] == [0, 0]
    cache = DayCache(RecFlowFiles(world_root), tmp_path)
    assert cache.missing(cache.files.days) == []
    assert len([path for path in cache.folder.iterdir() if path.is_dir()]) == 4
    assert [len(cache.open(day)) for day in cache.files.days] == [150] * 4


def test_killed_preparation_resumes_with_the_missing_days(world_root: Path, tmp_path: Path) -> None:
    cache = DayCache(RecFlowFiles(world_root), tmp_path)
    slow = _PREPARE.replace("DayCache(files", "import time; cache = DayCache(files").replace(
        ".prepare(files.days)",
        "; cache.prepare(files.days[:2]); target = cache.path(files.days[2]); "
        "folder = target.parent / f'.{target.name}.1-abc.partial'; folder.mkdir(); "
        "(folder / 'requests.arrow').write_bytes(b'half'); print('half', flush=True); time.sleep(60)",
    )
    process = subprocess.Popen([sys.executable, "-c", slow, str(world_root), str(tmp_path)], stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline().strip() == b"ready"
    assert process.stdout.readline().strip() == b"half"
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    days = cache.files.days
    assert cache.missing(days) == list(days[2:])
    before = time.time_ns()
    cache.prepare(days)
    assert cache.missing(days) == []
    assert (cache.path(days[0]) / "requests.arrow").stat().st_mtime_ns < before
    assert not list(cache.folder.glob(".*.partial"))
