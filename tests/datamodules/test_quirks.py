"""One test per peculiarity of RecFlow's files."""

from __future__ import annotations

import pickle
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pytest
import torch
from hand_made import HandMade
from pyarrow import feather

from recsys_topk.datamodules.negatives.expansion import expand
from recsys_topk.datamodules.recflow.batch_maker import BatchMaker
from recsys_topk.datamodules.recflow.cache import DayCache
from recsys_topk.datamodules.recflow.files import RecFlowFiles
from recsys_topk.datamodules.recflow.layout import LAYOUTS, recflow_schema
from recsys_topk.datamodules.recflow.pickles import FormatError
from recsys_topk.datamodules.recflow.shard import DayShard
from recsys_topk.datamodules.shard import ShardBatch
from recsys_topk.tabular.schema import VARIANT
from recsys_topk.testing.host_reads import DEVICE, no_host_reads

Prepare = Callable[[HandMade], Any]
TWO, THREE = BatchMaker(LAYOUTS["two-stage"], 50), BatchMaker(LAYOUTS["three-stage"], 50)


def batch_of(day: Any, maker: BatchMaker = TWO) -> ShardBatch:
    return maker.make(day, np.arange(len(day)))


def videos(batch: ShardBatch, row: int) -> list[int]:
    """Return the raw video ids of a list, in order, without padding."""
    return batch.item_id[batch.candidates[row][batch.mask[row]]].tolist()


def test_ids_are_shifted_by_one_except_category_level_one(hand_made: HandMade, prepared: Prepare) -> None:
    batch = batch_of(prepared(hand_made))
    assert batch.request[0].tolist() == [6, 13, 1, 4, 4, 2, 3, 31]  # Saturday noon in Beijing; user 3, device 3
    row = batch.items[batch.candidates[0, 4]].tolist()  # video 5: author 5, category 5, one 5, type 1, 5 h later
    assert row == [6, 6, 6, 5, 2, 5, 9, 7]  # 1705018000 is Friday 2024-01-12 08:06:40 in Beijing


def test_two_stage_labels(hand_made: HandMade, prepared: Prepare) -> None:
    batch = batch_of(prepared(hand_made))
    assert batch.labels[0].tolist() == [*range(29, 19, -1), *[7] * 10, *[6] * 10, *[5] * 10]
    assert batch.group[0].tolist() == [*[0] * 10, *[1] * 10, *[2] * 10, *[3] * 10]
    assert videos(batch, 0) == [*range(1, 11), *range(20, 50)]


def test_three_stage_labels(hand_made: HandMade, prepared: Prepare) -> None:
    batch = batch_of(prepared(hand_made), THREE)
    pad = [0] * 6
    assert batch.labels[0].tolist() == [29, 28, 27, 26, *pad, 8, *[0] * 9, *[7] * 10, *[6] * 10, *[5] * 10]
    assert videos(batch, 0)[:5] == [4, 3, 2, 1, 5]
    assert batch.labels.shape == (2, 50)


def test_rank_index_may_start_at_zero(hand_made: HandMade, prepared: Prepare) -> None:
    for row in hand_made.rows:
        row["rank_index"] -= row["rank_pos"]
    assert batch_of(prepared(hand_made)).labels[0, :10].tolist() == list(range(30, 20, -1))


def test_empty_slot_is_masked_with_label_0(hand_made: HandMade, prepared: Prepare) -> None:
    batch = batch_of(prepared(hand_made))
    assert batch.labels[1, :10].tolist() == [29, 28, *[0] * 8]
    assert batch.mask[1].tolist() == [True] * 2 + [False] * 8 + ([True] + [False] * 9) * 3
    empty = ~batch.mask
    assert batch.labels[empty].eq(0).all()
    assert batch.group[empty].eq(-1).all()
    assert batch.candidates[empty].eq(0).all()
    assert 99 in videos(batch, 1)


def test_stage_may_be_absent(hand_made: HandMade, prepared: Prepare) -> None:
    del hand_made.stages[501]["rank_neg"]
    batch = batch_of(prepared(hand_made))
    assert not batch.mask[1, 10:20].any()
    assert videos(batch, 1) == [11, 2, 31, 99]


@pytest.mark.parametrize("shape", [(0, 8), (0,)])
def test_stage_may_be_an_empty_array(hand_made: HandMade, prepared: Prepare, shape: tuple[int, ...]) -> None:
    hand_made.stages[501]["coarse_neg"] = np.empty(shape, dtype=np.int64)
    assert videos(batch_of(prepared(hand_made)), 1) == [11, 2, 21, 99]


def test_stage_with_more_than_ten_items_is_cut(hand_made: HandMade, prepared: Prepare) -> None:
    rows = [hand_made.stage_row(v) for v in range(70, 83)]
    hand_made.stages[501]["prerank_neg"] = np.array(rows)
    batch = batch_of(prepared(hand_made))
    assert videos(batch, 1) == [11, 2, 21, 31, *range(70, 80)]
    assert videos(batch, 0) == [*range(1, 11), *range(20, 50)]


def test_dictionaries_may_be_defaultdicts(hand_made: HandMade, prepared: Prepare) -> None:
    hand_made.stages = defaultdict(dict, {k: defaultdict(list, v) for k, v in hand_made.stages.items()})
    assert videos(batch_of(prepared(hand_made)), 1) == [11, 2, 21, 31, 99]


@pytest.mark.parametrize("protocol", [2, 4, 5])
@pytest.mark.parametrize("dtype", ["int64", "int32"])
def test_arrays_may_have_any_protocol_integer_type_and_order(
    hand_made: HandMade, prepared: Prepare, protocol: int, dtype: str
) -> None:
    hand_made.protocol = protocol
    for stages in hand_made.stages.values():
        stages.update({name: np.asfortranarray(array).astype(dtype) for name, array in stages.items()})
    batch = batch_of(prepared(hand_made))
    assert videos(batch, 0) == [*range(1, 11), *range(20, 50)]
    assert batch.labels[0, 0] == 29


@pytest.mark.parametrize(
    "change",
    [
        lambda counts: counts.update(photo_id=counts.pop("video_id")),
        lambda counts: counts.update({" category_level_two": counts.pop("category_level_two")}),
        lambda counts: counts.update(photo_id=counts["video_id"], video_id=3),
    ],
    ids=["photo_id", "leading space", "photo_id wins"],
)
def test_counts_may_have_any_known_spelling(hand_made: HandMade, change: Callable[[dict[str, int]], None]) -> None:
    change(hand_made.counts)
    files = hand_made.write()
    schema = recflow_schema(files.counts, LAYOUTS["two-stage"])
    assert schema.table("video_id").rows == 102
    assert schema.table("category_level_two").rows == 22
    assert (schema.table("category_level_one").rows, schema.table("category_level_one").padding) == (8, 2)
    assert [schema.table(name).rows for name in ("weekday", "hour", "minute")] == [9, 26, 62]


def test_category_level_one_may_exceed_its_count_by_one(hand_made: HandMade, prepared: Prepare) -> None:
    hand_made.stages[501]["rank_neg"][0, 6] = 7  # count 6, two spare rows
    hand_made.row(501, 21)["category_level_one"] = 7
    batch = batch_of(prepared(hand_made))
    assert batch.items[batch.candidates[1, 10], 3] == 7


def test_history_is_oldest_first_and_padding_comes_after(hand_made: HandMade, prepared: Prepare) -> None:
    hand_made.histories[500][:40, 3] = 5  # padding rows may hold any values
    hand_made.histories[500][:40, 0] = 77
    batch = batch_of(prepared(hand_made))
    assert batch.history_length.tolist() == [3, 0]
    assert batch.history.shape == (2, 50, 5)
    assert batch.history[0, :3].tolist() == [[v + 1, v % 50 + 1, v % 20 + 1, v % 6, v % 4 + 1] for v in (60, 61, 62)]
    assert (batch.history[0, 3:] == torch.tensor([0, 0, 0, 2, 0])).all()
    assert (batch.history[1] == torch.tensor([0, 0, 0, 2, 0])).all()


def test_views_need_not_be_the_last_rows(hand_made: HandMade, prepared: Prepare) -> None:
    views = np.zeros((50, 10), dtype=np.int64)
    views[4], views[30] = hand_made.view_row(70, 5), hand_made.view_row(71, 6)
    hand_made.histories[501] = views
    batch = batch_of(prepared(hand_made))
    assert batch.history[1, :2, 0].tolist() == [71, 72]
    assert batch.history_length[1] == 2


@pytest.mark.parametrize("length", [1, 2, 3, 10, 60])
def test_history_keeps_the_newest_views(hand_made: HandMade, prepared: Prepare, length: int) -> None:
    batch = batch_of(prepared(hand_made), BatchMaker(LAYOUTS["two-stage"], length))
    kept = [60, 61, 62][-length:]
    assert batch.history.shape == (2, length, 5)
    assert batch.history_length.tolist() == [len(kept), 0]
    assert batch.history[0, :, 0].tolist() == [v + 1 for v in kept] + [0] * (length - len(kept))


def test_request_with_two_users_is_two_samples(hand_made: HandMade, prepared: Prepare) -> None:
    hand_made.rows.append({**hand_made.rows[0], "user_id": 9})
    batch = batch_of(prepared(hand_made))
    assert batch.request_id.tolist() == [500, 501, 500]
    assert batch.request[:, 3].tolist() == [4, 5, 10]
    assert videos(batch, 2) == videos(batch, 0)


def test_rows_of_a_request_need_not_be_together(hand_made: HandMade, prepared: Prepare) -> None:
    hand_made.rows.append(hand_made.rows.pop(0))
    batch = batch_of(prepared(hand_made))
    assert batch.request_id.tolist() == [500, 501]
    assert batch.labels[0, 0] == 29


def test_item_with_changing_features_has_one_pool_row_per_variant(hand_made: HandMade, prepared: Prepare) -> None:
    hand_made.stages[501]["rank_pos"][1, 1] = 40  # video 2 by another author than in request 500
    hand_made.row(501, 2)["author_id"] = 40
    batch = batch_of(prepared(hand_made))
    first, second = batch.candidates[0, 1], batch.candidates[1, 1]
    assert batch.item_id[first] == 2
    assert batch.item_id[second] == 2 + VARIANT
    assert batch.items[[first, second], :2].tolist() == [[3, 3], [3, 41]]
    assert batch.item_id.unique().numel() == batch.item_id.numel()


def test_root_may_be_the_data_folder_itself(hand_made: HandMade) -> None:
    files = hand_made.write()
    assert RecFlowFiles(files.folder).days == RecFlowFiles(files.folder.parent).days == ("2024-01-13",)


def test_compressed_and_narrow_feathers_read_the_same(hand_made: HandMade, prepared: Prepare, tmp_path: Path) -> None:
    before = batch_of(prepared(hand_made))
    path = hand_made.folder / "data" / "all_stage" / "2024-01-13.feather"
    table = feather.read_table(path)
    narrow = table.set_column(table.column_names.index("rank_pos"), "rank_pos", table["rank_pos"].cast(pa.int8()))
    feather.write_feather(narrow, path, compression="zstd", chunksize=3)
    files = RecFlowFiles(hand_made.folder)
    cache = DayCache(files, tmp_path / "again")
    cache.prepare(files.days)
    assert torch.equal(batch_of(cache.open(files.days[0])).labels, before.labels)


def test_column_names_may_have_spaces_around_them(hand_made: HandMade, prepared: Prepare, tmp_path: Path) -> None:
    before = batch_of(prepared(hand_made))
    path = hand_made.folder / "data" / "all_stage" / "2024-01-13.feather"
    table = feather.read_table(path)
    feather.write_feather(table.rename_columns([f" {name} " for name in table.column_names]), path)
    files = RecFlowFiles(hand_made.folder)
    cache = DayCache(files, tmp_path / "again")
    cache.prepare(files.days)
    after = batch_of(cache.open(files.days[0]))
    assert torch.equal(after.labels, before.labels)
    assert torch.equal(after.request, before.request)
    feather.write_feather(table.append_column("user_id ", table["age"]), path)
    with pytest.raises(FormatError, match="two columns with the same name"):
        RecFlowFiles(hand_made.folder).read("2024-01-13")


def test_data_can_be_on_another_file_system(hand_made: HandMade, prepared: Prepare, tmp_path: Path) -> None:
    """An object store in memory has no real folders, no memory mapping and no modification time in ns."""
    before = batch_of(prepared(hand_made))
    store = fsspec.filesystem("memory")
    store.put(str(hand_made.folder), "/bucket/recflow", recursive=True)
    try:
        files = RecFlowFiles("memory://bucket/recflow")
        cache = DayCache(files, tmp_path / "again")
        cache.prepare(files.days)
        after = batch_of(cache.open(files.days[0]))
        for name in ("request", "history", "items", "candidates", "labels"):
            assert torch.equal(getattr(after, name), getattr(before, name))
        folder = cache.path(files.days[0])
        store.pipe("/bucket/recflow/data/request_id_dict/2024-01-13.pkl", pickle.dumps(print))
        assert cache.path(files.days[0]) != folder  # a changed file gets a new cache
        with pytest.raises(FormatError, match=r"memory:///bucket/.*2024-01-13.pkl asks for builtins.print"):
            cache.prepare(files.days)
        store.rm("/bucket/recflow/data/seq_effective_50_dict", recursive=True)
        with pytest.raises(FileNotFoundError, match=r"memory:///bucket/.*seq_effective_50_dict"):
            cache.prepare(files.days)
    finally:
        store.rm("/bucket", recursive=True)
    with pytest.raises(FileNotFoundError, match=r"memory:///bucket/recflow. does not exist"):
        RecFlowFiles("memory://bucket/recflow")


def test_all_histories_may_be_empty(hand_made: HandMade, prepared: Prepare) -> None:
    for views in hand_made.histories.values():
        views[:] = 0
    batch = batch_of(prepared(hand_made))
    assert batch.history_length.tolist() == [0, 0]
    assert (batch.history == torch.tensor([0, 0, 0, 2, 0])).all()


def test_request_without_items_is_an_empty_list(hand_made: HandMade, prepared: Prepare) -> None:
    hand_made.stages[501] = {}
    day = prepared(hand_made)
    batch = TWO.make(day, np.array([1]))
    assert not batch.mask.any()
    assert batch.candidates.eq(0).all()
    assert batch.items.shape == (1, 8)  # padding needs one row
    after = expand(
        batch.plain(), 3, seed=1, group=4, catalogue=DayShard(day, TWO).catalogue(), pool_rows=batch.pool_rows
    ).batch
    assert after.mask.sum() == 3
    there = DayShard(day, TWO).catalogue(DEVICE)
    with no_host_reads():  # the number of popular negatives is known on the host
        assert there.popular.tickets == day.catalogue["count"].sum()
    assert not expand(batch.plain(), 3, seed=1, group=4, source="in_batch").batch.mask.any()
