from __future__ import annotations

import filecmp
import itertools
import pickle
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hand_made import SMALL
from pyarrow import feather

from recsys_topk.datamodules.recflow.datamodule import RecFlowDataModule
from recsys_topk.datamodules.recflow.layout import STAGES
from recsys_topk.datamodules.simulator.description import describe_world, group_auc
from recsys_topk.datamodules.simulator.ground_truth import GroundTruth, _recalls, reference_recalls
from recsys_topk.datamodules.simulator.simulation import simulate
from recsys_topk.datamodules.simulator.world import PRESETS, World, WorldConfig, world_options
from recsys_topk.tabular.schema import VARIANT


def files_of(root: Path) -> list[Path]:
    return sorted(path.relative_to(root) for path in root.rglob("*") if path.is_file())


def test_same_seed_gives_the_same_files(tmp_path: Path) -> None:
    config = replace(SMALL, days=2, requests=40)
    first, second = simulate(tmp_path / "a", config), simulate(tmp_path / "b", config)
    data = [path for path in files_of(first) if path.suffix != ".npz"]
    assert files_of(first) == files_of(second)
    assert len(data) == 7
    assert filecmp.cmpfiles(first, second, data, shallow=False)[0] == data
    other = simulate(tmp_path / "c", replace(config, seed=4))
    assert not filecmp.cmp(first / data[0], other / data[0], shallow=False)


def test_progress_names_each_day_and_a_used_folder_raises(tmp_path: Path) -> None:
    seen: list[str] = []
    config = replace(SMALL, days=2, requests=20, start="2024-02-28")
    root = simulate(tmp_path / "world", config, progress=seen.append)
    assert seen == ["2024-02-28", "2024-02-29"]
    with pytest.raises(FileExistsError, match="exists and is not empty"):
        simulate(root, config)


def test_failed_simulation_leaves_no_files(tmp_path: Path) -> None:
    def fail(day: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        simulate(tmp_path / "world", replace(SMALL, requests=20), progress=fail)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"users": 0}, "at least 1 users, got 0"),
        ({"items": 10}, "at least 200 items, got 10"),
        ({"noise": -1.0}, "noise must not be negative"),
        ({"retrieval_noise": -1.0}, "retrieval_noise -1.0"),
        ({"author_quality": 1.5}, "must lie in"),
        ({"new_items": 1000}, "got 1000 per day; use more items or fewer new ones"),
        ({"retrieved": 300, "searched": 200}, "at least 300 searched, got 200"),
        ({"start": "2024-13-01"}, "YYYY-MM-DD"),
        ({"days": 0}, "at least 1 days"),
        ({"days": 10**7}, "before the year 10000, got 10000000 days"),
    ],
)
def test_invalid_worlds_raise(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        WorldConfig(**change)  # type: ignore[arg-type]


def test_three_files_of_a_day_are_consistent(world_root: Path) -> None:
    """Check row by row every rule of the format that connects the three files of a day."""
    day = "2024-01-14"
    table = feather.read_table(world_root / "data" / "all_stage" / f"{day}.feather")
    assert {str(field.type) for field in table.schema} == {"int64"}
    stages = pickle.loads((world_root / "data" / "request_id_dict" / f"{day}.pkl").read_bytes())
    histories = pickle.loads((world_root / "data" / "seq_effective_50_dict" / f"{day}.pkl").read_bytes())
    flags: dict[tuple[int, str], dict[int, dict[str, int]]] = {}
    times = {}
    for row in table.to_pylist():
        times[row["request_id"]] = row["request_timestamp"]
        for stage in ("realshow", *STAGES):
            if row[stage]:
                flags.setdefault((row["request_id"], stage), {})[row["video_id"]] = row
    assert set(stages) == set(histories) == set(times)
    empty = {"absent": 0, "array": 0}
    for request, entry in stages.items():
        for stage in ("realshow", *STAGES):
            rows = entry.get(stage)
            known = flags.get((request, stage), {})
            if rows is None or not len(rows):
                empty["absent" if rows is None else "array"] += 1
                assert not known
                continue
            assert rows.shape == (len(known), 8)
            assert rows[:, 0].tolist() == [v for v in rows[:, 0].tolist() if v in known]
            for place, row in enumerate(rows.tolist()):
                feather_row = known[row[0]]
                names = ("video_id", "author_id", "duration", "category_level_two", "upload_type", "upload_timestamp")
                assert row[:6] == [feather_row[name] for name in names]
                assert row[6] == feather_row["category_level_one"] != 2
                if stage in ("rank_pos", "rerank_pos"):
                    assert feather_row[stage.replace("pos", "index")] == place + 1
        history = histories[request]
        viewed = history[:, 7] > 0
        assert history.shape == (50, 10)
        assert viewed.tolist() == sorted(viewed.tolist())
        assert not history[~viewed].any()
        seen = history[viewed, 7]
        assert (np.diff(seen) >= 0).all()
        assert (seen < times[request]).all()
        assert (history[viewed, 5] * 1000 < seen).all()
    assert min(empty.values()) > 0


def test_view_is_in_the_history_of_the_next_request(world_root: Path) -> None:
    day = "2024-01-13"
    table = feather.read_table(world_root / "data" / "all_stage" / f"{day}.feather").to_pylist()
    histories = pickle.loads((world_root / "data" / "seq_effective_50_dict" / f"{day}.pkl").read_bytes())
    by_user: dict[int, list[int]] = {}
    viewed: dict[int, set[int]] = {}
    for row in table:
        requests = by_user.setdefault(row["user_id"], [])
        if not requests or requests[-1] != row["request_id"]:
            requests.append(row["request_id"])
        if row["effective_view"]:
            viewed.setdefault(row["request_id"], set()).add(row["video_id"])
    checked = 0
    for requests in by_user.values():
        for before, after in itertools.pairwise(requests):
            newest = histories[after][histories[after][:, 9] == before]
            assert set(newest[:, 0].tolist()) == viewed.get(before, set())
            checked += len(newest)
    assert checked > 50


def test_true_utility_equals_the_formula(world_root: Path) -> None:
    truth = GroundTruth.load(world_root)
    world, config = truth.world, truth.world.config
    assert config == SMALL
    assert World.make(config).vector.tobytes() == world.vector.tobytes()
    request, items = int(truth.request_id[250]), [0, 17, 399]
    user, now = int(truth.user[250]), int(truth.time_ms[250])
    start = 1705075200  # 2024-01-13 00:00 in Beijing
    angle = config.drift * (now / 1000 - start) / 86400
    found = truth.true_utility(np.array([request]), np.array([items]))[0]
    for item, value in zip(items, found, strict=True):
        taste = np.cos(angle) * world.taste[user] + np.sin(angle) * world.taste_later[user]
        age = max((now / 1000 - world.upload_s[item]) / 86400, 0)
        block = int((now // 1000 + 8 * 3600) % 86400 // (86400 / 6))
        expected = (
            config.taste * float(taste @ world.vector[item])
            + config.popularity * world.appeal[item]
            + config.freshness * np.exp(-age / 3)
            + config.context * world.context_effect[block, world.category[item]]
        )
        assert value == pytest.approx(expected, abs=1e-5)
    with pytest.raises(ValueError, match="request 5 is not one of the 600 simulated"):
        truth.true_utility(np.array([5]), np.array([[0]]))


def test_oracle_beats_popularity_and_popularity_beats_random(world_root: Path, tmp_path: Path) -> None:
    data = RecFlowDataModule(root=str(world_root), cache_dir=str(tmp_path), eval_negatives=60)
    data.prepare_data()
    recalls = reference_recalls(data)
    assert recalls == reference_recalls(data)
    joint = {name: found["joint"] for name, found in recalls.items()}
    # Random: 20 of about 100 items are kept.
    assert joint["random"] == pytest.approx(0.2, abs=0.03)
    assert joint["random"] + 0.05 < joint["popularity"] < joint["oracle"] - 0.2
    assert 0.7 < joint["oracle"] < 0.99
    for found in recalls.values():
        assert found["joint"] == found["recall@10@20"] < found["recall@10@30"]


def test_recalls_equal_values_by_hand() -> None:
    labels = np.array([[29, 28, 7, 0, 0], [7, 0, 0, 0, 0], [29, 0, 0, 0, 0]])
    mask = np.array([[1, 1, 1, 1, 0], [1, 1, 1, 1, 1], [1, 1, 1, 1, 1]], dtype=bool)
    scores = np.array([[1.0, 4, 3, 2, 99], [5, 4, 3, 2, 1], [1, 1, 0, 0, 0]])
    # List 1: order b c d a without padding. List 2 has no positive. List 3: the negative wins the tie.
    assert _recalls(scores, labels, mask, (3, 1), 10, 7).tolist() == [[0.5, 0.5, 0.5], [0.0, 1.0, 0.0]]
    assert _recalls(scores, labels, mask, (4, 2), 10, 7).tolist() == [[0.5, 1.0, 0.5], [1.0, 1.0, 1.0]]


@pytest.mark.slow
def test_large_catalogue_is_simulated(tmp_path: Path) -> None:
    config = WorldConfig(users=20_000, items=200_000, days=1, requests=2000)
    root = simulate(tmp_path / "large", config)
    assert GroundTruth.load(root).request_id.size == 2000


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> dict[str, RecFlowDataModule]:
    """A world with a strong retrieval, and the control: a weak retrieval, all else equal."""
    folder = tmp_path_factory.mktemp("worlds")
    strong = WorldConfig(
        users=40, items=3000, days=3, requests=80, popularity=1.0, retrieved=100, searched=1000, retrieval_noise=0.3
    )
    made = {}
    for name, config in {"strong": strong, "weak": replace(strong, retrieval_noise=None)}.items():
        root = simulate(folder / name, config)
        made[name] = RecFlowDataModule(str(root), cache_dir=str(folder / "cache"))
        made[name].prepare_data()
    return made


def test_logged_negatives_are_harder_than_random_items_only_with_a_strong_retrieval(
    worlds: dict[str, RecFlowDataModule],
) -> None:
    found = {name: group_auc(data) for name, data in worlds.items()}
    for aucs in found.values():
        assert sorted(aucs.values(), reverse=True) == list(aucs.values())
    assert found["weak"]["prerank_neg"] < 0.55 < 0.6 < found["strong"]["prerank_neg"]


def test_group_auc_equals_a_loop(worlds: dict[str, RecFlowDataModule]) -> None:
    data = worlds["strong"]
    truth = GroundTruth.load(data.cache.files.folder.parent)
    wins: list[float] = []
    for day_batch in data.test_dataloader():
        batch = data.add_negatives(day_batch)
        for row in range(batch.size):
            ids = (batch.item_id[batch.candidates[row]] % VARIANT).numpy()
            utility = truth.true_utility(batch.request_id[row : row + 1].numpy(), ids[None])[0]
            group = batch.group[row].tolist()
            drawn = [utility[i] for i, one in enumerate(group) if one == 4]
            for i, one in enumerate(group):
                if one == 1:
                    wins.append(sum(utility[i] > other for other in drawn) / len(drawn))
    assert group_auc(data)["rank_neg"] == pytest.approx(sum(wins) / len(wins))


def test_description_names_sizes_groups_and_oracles(worlds: dict[str, RecFlowDataModule]) -> None:
    size, groups, oracles = (rows for _, rows in describe_world(worlds["strong"]))
    assert {row[""]: row["RecFlow"] for row in size}["days"] == 37
    assert set(groups[0]) == {"rank_pos", "rank_neg", "coarse_neg", "prerank_neg"}
    joint = {row["ranker"]: row["joint"] for row in oracles}
    assert joint["random"] < joint["taste"] < joint["taste and appeal"] < joint["oracle"]


def test_author_quality_is_the_share_of_the_variance_between_authors() -> None:
    config = replace(SMALL, items=20_000)
    for share in (0.0, 0.6, 1.0):
        world = World.make(replace(config, author_quality=share))
        totals, counts = np.bincount(world.author, world.appeal), np.bincount(world.author)
        rest = world.appeal - (totals / np.maximum(counts, 1))[world.author]
        within = (rest**2).sum() / (len(rest) - np.count_nonzero(counts))
        assert within == pytest.approx(1 - share, abs=0.05)
        assert world.appeal.var() == pytest.approx(1.0, abs=0.1)
    assert World.make(config).appeal.tobytes() == World.make(replace(config, author_quality=0.0)).appeal.tobytes()


def test_new_items_are_uploaded_each_day() -> None:
    world = World.make(replace(SMALL, items=20_000, new_items=1000))
    start = 1705075200
    days = np.floor((world.upload_s - start) / 86400)
    assert [int((days == day).sum()) for day in range(4)] == pytest.approx([1000] * 4, rel=0.15)


@pytest.mark.parametrize("name", PRESETS)
def test_presets_have_names(name: str) -> None:
    assert WorldConfig(**world_options(name)) == PRESETS[name]
    changed = {"class_path": name, "init_args": {"users": 7}}
    assert WorldConfig(**world_options(changed)) == replace(PRESETS[name], users=7)


def test_unknown_preset_raises() -> None:
    with pytest.raises(ValueError, match="unknown world 'recflow'; did you mean 'recflow-like'"):
        world_options("recflow")
