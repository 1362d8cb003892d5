"""The scripts of examples/peers that need no other environment: the exported split, ranks, results and the table."""

import importlib
import json
import math
import runpy
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch

from recsys_topk import CascadeModule, StageConfig
from recsys_topk.datamodules import InteractionsDataModule
from recsys_topk.evaluation import evaluate_corpus

FOLDER = Path(__file__).parents[2] / "examples" / "peers"
NAMES = ("protocol", "export_split", "baselines", "own", "table")


@pytest.fixture
def peers(monkeypatch):
    """The scripts as modules."""
    monkeypatch.syspath_prepend(str(FOLDER))
    for name in NAMES:
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield {name: importlib.import_module(name) for name in NAMES}
    for name in NAMES:
        sys.modules.pop(name)


@pytest.fixture(scope="module")
def clicks(tmp_path_factory):
    """A log with many equal times, as a CSV."""
    generator = np.random.default_rng(0)
    rows = {(int(u), int(i)): int(t) for u, i, t in generator.integers(0, [40, 60, 9], (900, 3))}
    path = tmp_path_factory.mktemp("log") / "clicks.csv"
    lines = [f"{user},{item},{1_700_000_000 + time}" for (user, item), time in rows.items()]
    path.write_text("user_id,item_id,timestamp\n" + "\n".join(lines))
    return path


def data_of(clicks, **options):
    data = InteractionsDataModule(str(clicks), split="leave_last", cache_dir=str(clicks.parent / "cache"), **options)
    data.prepare_data()
    return data


def test_the_exported_split_is_that_of_a_loop_over_the_log(peers, clicks):
    """Each user's items are in training once, but for two targets; tied items are excluded, not in the history."""
    data = data_of(clicks)
    split = peers["protocol"].Split(peers["export_split"].export(data))
    log = np.loadtxt(clicks, delimiter=",", skiprows=1, dtype=np.int64)
    row = {item: number for number, item in enumerate(np.unique(log[:, 1]))}
    users = data.shard("test").users(np.arange(len(data.shard("test"))))
    assert sorted(users) == sorted(set(log[:, 0]))
    assert split.items == len(row)
    assert len(split.train) == len(split.target["test"]) == len(users)
    tied = 0
    for number, user in enumerate(users):
        own = {row[item]: time for one, item, time in log if one == user}
        val, test = split.target["val"][number], split.target["test"][number]
        assert sorted([*split.train[number], val, test]) == sorted(own)
        assert max(own[item] for item in split.train[number]) <= own[val] <= own[test]
        for part, target in (("val", val), ("test", test)):
            before = {item for item, time in own.items() if time < own[target]}
            same_time = {item for item, time in own.items() if time == own[target]} - {target}
            assert set(split.history[part][number]) == before
            assert set(split.excluded[part][number]) == before | same_time
            tied += len(same_time)
    assert tied > 20
    # The digest names the split, whatever the batches are made of.
    other = peers["protocol"].Split(peers["export_split"].export(data_of(clicks, every_position=True)))
    assert other.digest == split.digest
    changed = peers["protocol"].Split(peers["export_split"].export(data_of(clicks, split_seed=1)))
    assert changed.digest != split.digest


def test_ranks_are_those_of_a_sorted_list_with_ties_against_the_target(peers, clicks):
    protocol = peers["protocol"]
    split = protocol.Split(peers["export_split"].export(data_of(clicks)))
    scores = np.random.default_rng(1).integers(0, 9, (len(split.target["test"]), split.items)).astype(np.float32)
    scores[:, 5] = -np.inf
    found = protocol.ranks(split, "test", lambda some: scores[some], step=7)
    for number, target in enumerate(split.target["test"]):
        candidates = set(range(split.items)) - set(split.excluded["test"][number]) - {target}
        better = sum(scores[number, item] >= scores[number, target] for item in candidates)
        assert found[number] == (0 if target == 5 else 1 + better)
    for k in (1, 10, 20):
        values = [1 / math.log2(1 + rank) if 0 < rank <= k else 0.0 for rank in found]
        assert protocol.metrics(found, k) == pytest.approx(
            {f"recall@{k}": np.mean([value > 0 for value in values]), f"ndcg@{k}": np.mean(values)}, abs=1e-12
        )


def test_trials_begin_with_the_defaults_and_use_all_values_equally(peers):
    trials = peers["protocol"].draw_trials({"a": [1, 2], "b": [0.1, 0.2, 0.3]}, 8)
    assert trials[0] == {"a": 1, "b": 0.1}
    assert sorted(trial["a"] for trial in trials) == [1] * 4 + [2] * 4
    assert sorted(trial["b"] for trial in trials) == [0.1] * 3 + [0.2] * 3 + [0.3] * 2
    assert trials == peers["protocol"].draw_trials({"a": [1, 2], "b": [0.1, 0.2, 0.3]}, 8)


def test_ranks_of_a_model_give_the_metrics_of_the_whole_catalogue(peers, clicks):
    data = data_of(clicks)
    torch.manual_seed(0)
    model = CascadeModule(data.schema, [StageConfig("two_tower", "first", 30), StageConfig("mlp", "last", 20)], k=20)
    found = evaluate_corpus(model, data, "test", cuts=[5, 20], baselines=False).compute()
    ranks = peers["own"].model_ranks(model, data)
    assert len(set(ranks)) > 10
    for k in (5, 20):
        expected = {f"{name}@{k}": found[f"{name}@{k}/corpus"] for name in ("recall", "ndcg")}
        assert peers["protocol"].metrics(ranks, k) == pytest.approx(expected, abs=1e-9)


def test_baselines_are_tuned_written_and_compared(peers, clicks, tmp_path, monkeypatch, capsys):
    """The script fails if its numpy ranks and `evaluate_baseline` differ; the table is computed from its files."""
    threads = torch.get_num_threads()
    options = ["--out", str(tmp_path), "--trials", "3", "--names", "popularity", "transitions"]
    monkeypatch.setattr(sys, "argv", ["baselines.py", str(clicks), *options])
    monkeypatch.setenv("RECSYS_TOPK_CACHE", str(tmp_path / "cache"))
    peers["baselines"].main()
    torch.set_num_threads(threads)
    results = {path.stem.rpartition("-")[2]: json.loads(path.read_text()) for path in tmp_path.glob("*.json")}
    one = results["transitions"]
    assert len(one["trials"]) == 3
    assert one["settings"] == max(one["trials"], key=lambda trial: trial["validation"]["recall@20"])["settings"]
    text = (tmp_path / "clicks-transitions.json").read_text()
    assert text.count("\n") < 100 < 3 * len(one["runs"][0]["ranks"])  # ranks are on one line
    monkeypatch.setattr(sys, "argv", ["table.py", str(tmp_path), "--data", "clicks", "--reference", "popularity"])
    capsys.readouterr()
    peers["table"].main()
    lines = [line.split(" | ") for line in capsys.readouterr().out.splitlines()]
    row = next(line for line in lines if "transitions" in line[0])
    by_user = {name: np.array(result["runs"][0]["ranks"]) for name, result in results.items()}
    hits = {name: (rank > 0) & (rank <= 20) for name, rank in by_user.items()}
    assert float(row[1]) == pytest.approx(hits["transitions"].mean(), abs=5e-5)
    difference = hits["transitions"].mean() - hits["popularity"].mean()
    mean, low, high = (float(word.strip("[],")) for word in row[3].split())
    assert mean == pytest.approx(difference, abs=5e-5)
    assert low <= mean <= high


def test_results_of_different_splits_are_refused(peers, tmp_path):
    for name in ("a", "b"):
        run = {"ranks": [1, 0]}
        content = {"name": name, "data": "log", "split": name, "test": {"recall@20": 0.5}, "runs": [run]}
        peers["protocol"].write_json(tmp_path / f"log-{name}.json", content)
    with pytest.raises(ValueError, match="different splits"):
        peers["table"].read(tmp_path, "log")


def test_frames_and_files_have_the_same_digest(peers, clicks):
    """The digest is that of the interactions, not of the file."""
    log = np.loadtxt(clicks, delimiter=",", skiprows=1, dtype=np.int64)[::-1]
    frame = pa.table(dict(zip(("user_id", "item_id", "timestamp"), log.T, strict=True)))
    cache = str(clicks.parent / "cache")
    data = InteractionsDataModule(interactions=frame, split="leave_last", cache_dir=cache)
    data.prepare_data()
    digests = {peers["protocol"].Split(peers["export_split"].export(one)).digest for one in (data, data_of(clicks))}
    assert len(digests) == 1


def test_logs_of_other_kinds_are_what_their_names_say(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["other_logs.py", str(tmp_path)])
    runpy.run_path(str(FOLDER / "other_logs.py"), run_name="__main__")
    logs = {path.stem: np.loadtxt(path, delimiter=",", skiprows=1, dtype=np.int64) for path in tmp_path.glob("*.csv")}
    pairs = {name: 1 - len(np.unique(log[:, :2], axis=0)) / len(log) for name, log in logs.items()}
    assert pairs["repeat"] > 0.4 > 0.1 > pairs["retail"]
    lengths = np.unique(logs["sessions"][:, 0], return_counts=True)[1]
    assert 2 <= lengths.min() <= lengths.max() <= 8
    newest = np.argsort(logs["drift"][:, 2])[-len(logs["drift"]) // 10 :]
    before = np.delete(logs["drift"][:, 1], newest)
    static = logs["noorder"][np.argsort(logs["noorder"][:, 2])]
    old, new = np.split(static[:, 1], [len(static) * 9 // 10])
    assert 1 - np.isin(logs["drift"][newest, 1], before).mean() > 0.1 > 1 - np.isin(new, old).mean()
