"""Two and three processes train like one on the same global batches, for every sharding and optimizer."""

from __future__ import annotations

import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from recsys_topk import losses
from recsys_topk.cascades.objectives.base import registry as objectives
from tests.distributed.launch import launch
from tests.distributed.sharded import FIRST, RELAY, SECOND
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
def together(folder: Path, warm_python: list[str]) -> dict[int, Ranks]:
    """The results of two and three processes for the other cases; all cases run in the same processes."""
    places = {2: folder / "two", 3: folder / "three"}
    for place in places.values():
        place.mkdir()
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
def test_options_that_would_change_the_training_raise(quick: Ranks) -> None:
    for rank in quick:
        assert "use --model.embedding_optimizer rowwise_adagrad (or adagrad, sgd)" in rank["errors"]["same"]
        assert "use --trainer.strategy torchrec" in rank["errors"]["ddp"]
        assert "use row_wise or table_wise sharding" in rank["errors"]["column_wise"]


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_tables_built_on_the_meta_device_do_not_depend_on_the_sharding(quick: Ranks) -> None:
    assert quick[0]["meta"] == 0.0
