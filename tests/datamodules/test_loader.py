from __future__ import annotations

import copy
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from recsys_topk.datamodules.batch import CascadeBatch
from recsys_topk.datamodules.loader import ShardLoader, global_batches
from recsys_topk.datamodules.recflow.batch_maker import BatchMaker
from recsys_topk.datamodules.recflow.cache import DayCache
from recsys_topk.datamodules.recflow.layout import LAYOUTS
from recsys_topk.datamodules.recflow.shard import DayShard

MAKER = BatchMaker(LAYOUTS["two-stage"], 5)


def make(cache: DayCache, days: int = 2, batch_size: int = 32, **options: object) -> ShardLoader:
    chosen = [DayShard(cache.open(day), MAKER) for day in cache.files.days[:days]]
    return ShardLoader(chosen, batch_size, **{"shuffle": True, "training": True, **options})  # type: ignore[arg-type]


def ids(loader: ShardLoader) -> list[list[int]]:
    return [batch.request_id.tolist() for batch in loader]


@settings(deadline=None)
@given(
    sizes=st.lists(st.integers(4, 60), min_size=1, max_size=4),
    batch_size=st.integers(1, 20),
    processes=st.integers(1, 4),
)
def test_plan_covers_every_request_once_and_gives_every_process_one(
    sizes: list[int], batch_size: int, processes: int
) -> None:
    slices = global_batches(sizes, batch_size, processes)
    for day, size in enumerate(sizes):
        covered = [i for piece in slices if piece.shard == day for i in range(piece.start, piece.stop)]
        assert covered == list(range(size))
    for piece in slices:
        shares = [len(range(piece.start, piece.stop)[rank::processes]) for rank in range(processes)]
        assert min(shares) >= 1
        assert max(shares) <= batch_size + 1
    assert [piece.shard for piece in slices] == sorted(piece.shard for piece in slices)


def test_day_smaller_than_the_number_of_processes_raises() -> None:
    with pytest.raises(ValueError, match="shard number 1 has 3 requests, too few for 4 processes"):
        global_batches([10, 3], 2, 4)


def test_days_come_in_order_and_requests_are_shuffled_within_a_day(day_cache: DayCache) -> None:
    loader = make(day_cache)
    batches = ids(loader)
    assert len(loader) == len(batches) == 10
    first = [i for batch in batches[:5] for i in batch]
    expected = day_cache.open(day_cache.files.days[0]).requests["request_id"].tolist()
    assert first != expected
    assert sorted(first) == expected
    assert [len(batch) for batch in batches] == [32, 32, 32, 32, 22] * 2


def test_only_one_day_is_held_in_memory(day_cache: DayCache) -> None:
    loader = make(day_cache, days=4)
    for batch in loader:
        held = [shard.name for shard in loader.shards if {"item_rows", "view_rows"} & set(vars(shard.day))]
        assert held == [batch.shard]


def test_epochs_differ_and_are_reproducible(day_cache: DayCache) -> None:
    loader = make(day_cache)
    epochs = [ids(loader) for _ in range(2)]
    assert epochs[0] != epochs[1]
    again = make(day_cache)
    again.set_epoch(1)
    assert ids(again) == epochs[1]
    assert ids(make(day_cache, seed=7)) != epochs[0]


def test_abandoned_iteration_starts_over(day_cache: DayCache) -> None:
    loader = make(day_cache)
    all_batches = ids(make(day_cache))
    next(iter(loader))
    assert ids(loader) == all_batches


@pytest.mark.parametrize("workers", [1, 2])
def test_batches_do_not_depend_on_the_number_of_workers(day_cache: DayCache, workers: int) -> None:
    alone, together = make(day_cache), make(day_cache, num_workers=workers)
    for a, b in zip(alone, together, strict=True):
        for name in ("request_id", "request", "history", "items", "candidates", "labels", "mask"):
            assert torch.equal(getattr(a, name), getattr(b, name))
        assert (a.shard, a.draw_seed, a.training) == (b.shard, b.draw_seed, b.training)


@pytest.mark.parametrize("processes", [2, 3])
@pytest.mark.parametrize("training", [True, False])
def test_processes_share_every_batch(day_cache: DayCache, processes: int, training: bool) -> None:
    whole = ids(make(day_cache, batch_size=16 * processes, training=training, shuffle=training))
    shares = [
        ids(make(day_cache, batch_size=16, rank=rank, processes=processes, training=training, shuffle=training))
        for rank in range(processes)
    ]
    assert len({len(share) for share in shares}) == 1
    for number, batch in enumerate(whole):
        assert sorted(batch) == sorted(i for share in shares for i in share[number])


@pytest.mark.parametrize("taken", [1, 4, 5, 7])
@pytest.mark.parametrize("workers", [0, 2])
def test_resume_gives_the_remaining_batches(day_cache: DayCache, taken: int, workers: int) -> None:
    expected = [ids(loader := make(day_cache)), ids(loader)]
    interrupted = make(day_cache, num_workers=workers)
    ids(interrupted)
    stream = iter(interrupted)
    for _ in range(taken):
        next(stream)
    state = pickle.loads(pickle.dumps(interrupted.state_dict()))
    assert state["epoch"] == 1
    assert state["shard"] == day_cache.files.days[taken // 5]
    resumed = make(day_cache, num_workers=workers)
    resumed.load_state_dict(state)
    assert resumed.state_dict() == state
    assert ids(resumed) == expected[1][taken:]
    assert len(resumed) == 10


@pytest.mark.parametrize("taken", [0, 7, 10, 19])
def test_passes_read_all_requests_again_in_another_order_and_resume(day_cache: DayCache, taken: int) -> None:
    loader, once = make(day_cache), make(day_cache)
    loader.passes = 2
    epochs = [ids(loader), ids(loader)]
    assert epochs[0] + epochs[1] == [batch for _ in range(4) for batch in ids(once)]
    assert len(loader) == len(epochs[0]) == 20
    interrupted, resumed = make(day_cache), make(day_cache)
    interrupted.passes = resumed.passes = 2
    batches = iter(interrupted)
    for _ in range(taken):
        next(batches)
    resumed.load_state_dict(interrupted.state_dict())
    assert ids(resumed) == epochs[0][taken:]


def test_state_at_the_end_of_an_epoch_resumes_with_the_next(day_cache: DayCache) -> None:
    loader = make(day_cache)
    ids(loader)
    state = loader.state_dict()
    assert state["shard"] is None
    resumed = make(day_cache)
    resumed.load_state_dict(state)
    assert ids(resumed) == ids(loader)


def test_state_of_another_batch_size_or_seed_raises(day_cache: DayCache) -> None:
    loader = make(day_cache)
    stream = iter(loader)
    next(stream), next(stream)
    with pytest.raises(ValueError, match=r"a global batch of 32 requests .* and this run has 50 x 1"):
        make(day_cache, batch_size=50).load_state_dict(loader.state_dict())
    older = {key: value for key, value in loader.state_dict().items() if key != "global_batch"}
    with pytest.raises(ValueError, match="request 64 of 2024-01-13, where no batch begins"):
        make(day_cache, batch_size=50).load_state_dict(older)
    with pytest.raises(ValueError, match="saved with seed 42, and this run has seed 1"):
        make(day_cache, seed=1).load_state_dict(loader.state_dict())


def test_moved_batch_keeps_shard_and_seed(day_cache: DayCache) -> None:
    batch = next(iter(make(day_cache)))
    moved = batch.to("meta")
    assert (moved.shard, moved.draw_seed, moved.training) == (batch.shard, batch.draw_seed, True)
    assert moved.items.device.type == "meta"
    plain = batch.plain()
    assert type(plain) is CascadeBatch
    assert plain.items is batch.items
    assert copy.deepcopy(batch).shard == batch.shard
