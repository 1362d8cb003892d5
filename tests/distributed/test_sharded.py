"""Two and three processes train like one on the same global batches, for every sharding and optimizer."""

from __future__ import annotations

import functools
import os
import pickle
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from recsys_topk import losses
from recsys_topk.callbacks.resume_point import WholeFileIO
from recsys_topk.cascades.module import CascadeModule
from recsys_topk.cascades.objectives.base import registry as objectives
from recsys_topk.cascades.shards import ShardsError, StoredTensor, load_stored, remove_unused
from tests.distributed.launch import launch
from tests.distributed.sharded import FIRST, RELAY, SECOND, same
from tests.distributed.training import CASES, SHIFTS, Case, cases, train

Ranks = list[dict[str, Any]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sharded")


@pytest.fixture(scope="module")
def alone(folder: Path) -> Callable[[str], dict[str, Any]]:
    """A function that trains a case in one process, once."""
    by_name = {case.name: case for case in CASES}
    return functools.cache(lambda name: train(by_name[name], 1, folder))


@pytest.fixture(scope="module")
def quick(folder: Path, warm_python: list[str]) -> Ranks:
    """The results of two processes; one process starts the run that they resume."""
    train(RELAY, 1, folder, save=folder / "first.ckpt", steps=FIRST)
    return launch(warm_python, "tests.distributed.sharded", 2, folder, 1000.0, "quick")


@pytest.fixture(scope="module")
def files(folder: Path, warm_python: list[str]) -> Ranks:
    """The results of two processes that save their shards; ``files/parts.ckpt`` is their checkpoint."""
    place = folder / "files"
    place.mkdir()
    train(RELAY, 1, folder, save=place / "first.ckpt", steps=FIRST)
    return launch(warm_python, "tests.distributed.sharded", 2, place, 1000.0, "files")


@pytest.fixture(scope="module")
def together(folder: Path, warm_python: list[str]) -> dict[int, Ranks]:
    """The results of two and three processes for the other cases; all cases run in the same processes."""
    places = {2: folder / "two", 3: folder / "three"}
    for place in places.values():
        place.mkdir()
        train(RELAY, 1, folder, save=place / "first.ckpt", steps=FIRST)
    with ThreadPoolExecutor() as pool:
        running = {
            n: pool.submit(launch, warm_python, "tests.distributed.sharded", n, places[n], 1000.0, "long")
            for n in places
        }
        return {n: one.result() for n, one in running.items()}


def assert_trains_like_one(case: Case, one: dict[str, Any], ranks: Ranks, folder: Path) -> None:
    found = [rank["cases"][case.name] for rank in ranks]
    assert len(one["losses"]) == case.steps
    for rank in found:
        assert rank["losses"] == pytest.approx(one["losses"], abs=1e-5)
        assert rank["metrics"] == pytest.approx(one["metrics"], abs=1e-5, nan_ok=True)
        assert (rank["losses"], rank["digest"]) == (found[0]["losses"], found[0]["digest"])
    weights = torch.load(folder / f"{case.name}.pt", weights_only=True)
    assert weights.keys() == one["weights"].keys()
    free = SHIFTS if case.dense == "adam" else ()
    apart = {key: float((weights[key] - one["weights"][key]).abs().max()) for key in weights if not key.endswith(free)}
    assert max(apart.values()) < 1e-5, max(apart.items(), key=lambda pair: pair[1])


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("case", cases(2, "quick"), ids=lambda case: case.name)
def test_two_processes_train_like_one(
    case: Case, alone: Callable[[str], dict[str, Any]], quick: Ranks, folder: Path
) -> None:
    assert_trains_like_one(case, alone(case.name), quick, folder)


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("processes", [2, 3])
def test_several_processes_train_like_one(
    processes: int, alone: Callable[[str], dict[str, Any]], together: dict[int, Ranks], folder: Path
) -> None:
    for case in cases(processes, "long"):
        place = folder / {2: "two", 3: "three"}[processes]
        assert_trains_like_one(case, alone(case.name), together[processes], place)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_parts_of_a_batch_give_the_mean_and_gradient_of_the_whole(quick: Ranks) -> None:
    for found in [rank["means"] for rank in quick]:
        assert not {case: apart for case, apart in found.items() if not apart < 2e-5}
        for name in (*losses.available(), *objectives.available()):
            assert name == "perturbed" or any(name in case.split() for case in found), name


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_run_resumes_from_one_to_two_to_one_processes(
    alone: Callable[[str], dict[str, Any]], quick: Ranks, folder: Path
) -> None:
    relay = quick[0]["relay"]
    assert relay["exact"], "resuming on the same layout must give the same bits"
    last = train(RELAY, 1, folder, resume=folder / "second.ckpt")
    assert len(relay["losses"]) == SECOND - FIRST
    expected = alone(RELAY.name)["losses"]
    assert [*expected[:FIRST], *relay["losses"], *last["losses"]] == pytest.approx(expected, abs=1e-4)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_shards_of_processes_hold_what_one_file_holds(files: Ranks, folder: Path) -> None:
    assert [rank["several files"] for rank in files] == [{"table_wise adagrad": True}] * 2
    one, parts = (WholeFileIO().load_checkpoint(folder / "files" / f"{name}.ckpt") for name in ("one", "parts"))
    for key in ("state_dict", "optimizer_states", "lr_schedulers"):
        assert same(one[key], parts[key])
    model = CascadeModule.load_from_checkpoint(folder / "files" / "parts.ckpt")
    assert same(dict(model.state_dict()), dict(one["state_dict"]))
    written = load_stored(folder / "files" / "parts.ckpt")["state_dict"]
    last = [
        train(RELAY, 1, folder, resume=folder / "files" / f"{name}.ckpt", steps=SECOND + 2) for name in ("one", "parts")
    ]
    assert last[0]["losses"] == last[1]["losses"]
    assert len(last[0]["losses"]) == 2
    stored = {key for key, value in written.items() if isinstance(value, StoredTensor)}
    assert stored == {key for key in written if "collections" in key}
    assert stored


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_saving_shards_needs_no_memory_for_the_tables(files: Ranks) -> None:
    assert max(rank["memory"]["shards"] for rank in files) < 0.2
    assert files[0]["memory"]["file"] > 0.9  # process 0 gathers


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("processes", [2, 3])
def test_other_shardings_resume_from_shards(processes: int, together: dict[int, Ranks]) -> None:
    for rank in together[processes]:
        assert rank["several files"] == {"row_wise adagrad": True, "column_wise adagrad": True}
        assert rank["memory"]["shards"] < 0.2


def damaged(folder: Path, place: Path) -> tuple[Path, Path]:
    """Copy the sharded checkpoint; return it and its folder of shards."""
    (shards,) = {load_entry(folder / "files" / "parts.ckpt")["folder"]}
    shutil.copytree(folder / "files" / shards, place / shards)
    return Path(shutil.copy(folder / "files" / "parts.ckpt", place)), place / shards


def load_entry(path: Path) -> dict[str, Any]:
    return dict(torch.load(path, weights_only=True)["shards"])


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_damaged_shards_are_named(files: Ranks, folder: Path, tmp_path: Path) -> None:
    path, shards = damaged(folder, tmp_path)
    written = sorted(file for file in shards.iterdir() if file.name != ".metadata")  # which is not read
    assert [file.name for file in written] == ["__0_0.distcp", "__1_0.distcp"]
    for file in written:
        content = file.read_bytes()
        middle = len(content) // 2
        file.write_bytes(content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :])
        with pytest.raises(ShardsError, match=rf"{file.name}' of a sharded checkpoint is damaged"):
            WholeFileIO().load_checkpoint(path)
        file.unlink()
        with pytest.raises(ShardsError, match=rf"{file.name}' of a sharded checkpoint is missing; copy"):
            WholeFileIO().load_checkpoint(path)
        file.write_bytes(content)
    WholeFileIO().load_checkpoint(path)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("attack", ["folder", "file", "gigabytes", "no tensors", "type", "metadata"])
def test_hostile_shards_run_no_code(attack: str, files: Ranks, folder: Path, tmp_path: Path) -> None:
    path, shards = damaged(folder, tmp_path)
    content = torch.load(path, weights_only=True)
    entry = content["shards"]
    first = next(iter(entry["tensors"].values()))
    if attack == "metadata":  # a pickle of torch's, for other programs
        (shards / ".metadata").write_bytes(pickle.dumps(Code(tmp_path / "ran")))
        WholeFileIO().load_checkpoint(path)
    elif attack == "folder":
        entry["folder"] = "../secret"
    elif attack == "file":
        first["pieces"][0][2] = "../../secret"
    elif attack == "gigabytes":
        first["size"] = [1 << 40, 4]
    elif attack == "type":
        first["dtype"] = "load"
    else:
        del entry["tensors"]
    torch.save(content, path)
    if attack != "metadata":
        with pytest.raises(ShardsError, match=r"shards|secret|claims"):
            WholeFileIO().load_checkpoint(path)
    assert not (tmp_path / "ran").exists()


class Code:
    """Runs a command when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.marker}",)


def test_folders_of_shards_without_a_checkpoint_are_removed(tmp_path: Path) -> None:
    for name in ("shards-aa", "shards-bb", "shards-cc", "shards-mine"):
        (tmp_path / name).mkdir()
    for name, shards in {"last.ckpt": "shards-aa", ".last.ckpt.pending": "shards-bb"}.items():
        torch.save({"shards": {"folder": shards, "files": {}}}, tmp_path / name)
    broken = tmp_path / "broken.ckpt"
    broken.write_bytes((tmp_path / "last.ckpt").read_bytes().replace(b"shards-aa", b"shards\x80aa"))
    (tmp_path / "notes.txt").write_text("no checkpoint")
    remove_unused(tmp_path)
    assert (tmp_path / "shards-cc").is_dir()  # a file that cannot be read may refer to it
    broken.unlink()
    remove_unused(tmp_path)
    assert {path.name for path in tmp_path.iterdir() if path.is_dir()} == {"shards-aa", "shards-bb", "shards-mine"}


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_options_that_would_change_the_training_raise(quick: Ranks) -> None:
    for rank in quick:
        assert "use --model.embedding_optimizer rowwise_adagrad (or adagrad, sgd)" in rank["errors"]["same"]
        assert "use --trainer.strategy torchrec" in rank["errors"]["ddp"]
        assert "use row_wise or table_wise sharding" in rank["errors"]["column_wise"]


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_tables_built_on_the_meta_device_do_not_depend_on_the_sharding(quick: Ranks) -> None:
    assert quick[0]["meta"] == 0.0
