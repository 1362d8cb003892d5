"""Two and three processes train like one on the same global batches, for every sharding and optimizer."""

from __future__ import annotations

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

Results = dict[int, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sharded")


@pytest.fixture(scope="module")
def alone(folder: Path) -> dict[str, dict[str, Any]]:
    """The results of one process, which also starts the run that others resume."""
    train(RELAY, 1, folder, save=folder / "first.ckpt", steps=FIRST)
    return {case.name: train(case, 1, folder) for case in CASES}


@pytest.fixture(scope="module")
def together(folder: Path, alone: dict[str, Any]) -> Results:
    """The results of two and three processes; all cases run in the same processes."""
    places = {2: folder, 3: folder / "three"}
    places[3].mkdir()
    with ThreadPoolExecutor() as pool:
        running = {n: pool.submit(launch, "tests.distributed.sharded", n, places[n], 1000.0) for n in places}
        return {n: one.result() for n, one in running.items()}


PAIRS = [pytest.param(n, case, id=f"{n} {case.name}") for n in (2, 3) for case in cases(n)]


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("processes", "case"), PAIRS)
def test_several_processes_train_like_one(
    processes: int, case: Case, alone: dict[str, dict[str, Any]], together: Results, folder: Path
) -> None:
    one, found = alone[case.name], [rank["cases"][case.name] for rank in together[processes]]
    assert len(one["losses"]) == case.steps
    for rank in found:
        assert rank["losses"] == pytest.approx(one["losses"], abs=1e-5)
        assert rank["metrics"] == pytest.approx(one["metrics"], abs=1e-5, nan_ok=True)
        assert (rank["losses"], rank["digest"]) == (found[0]["losses"], found[0]["digest"])
    weights = torch.load(folder / ("." if processes == 2 else "three") / f"{case.name}.pt", weights_only=True)
    assert weights.keys() == one["weights"].keys()
    free = SHIFTS if case.dense == "adam" else ()
    apart = {key: float((weights[key] - one["weights"][key]).abs().max()) for key in weights if not key.endswith(free)}
    assert max(apart.values()) < 1e-5, max(apart.items(), key=lambda pair: pair[1])


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_parts_of_a_batch_give_the_mean_and_gradient_of_the_whole(together: Results) -> None:
    for found in [rank["means"] for rank in together[2]]:
        assert not {case: apart for case, apart in found.items() if not apart < 2e-5}
        for name in (*losses.available(), *objectives.available()):
            assert name == "perturbed" or any(name in case.split() for case in found), name


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_run_resumes_from_one_to_two_to_one_processes(
    alone: dict[str, dict[str, Any]], together: Results, folder: Path
) -> None:
    relay = together[2][0]["relay"]
    assert relay["exact"], "resuming on the same layout must give the same bits"
    last = train(RELAY, 1, folder, resume=folder / "second.ckpt")
    assert len(relay["losses"]) == SECOND - FIRST
    expected = alone[RELAY.name]["losses"]
    assert [*expected[:FIRST], *relay["losses"], *last["losses"]] == pytest.approx(expected, abs=1e-4)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_options_that_would_change_the_training_raise(together: Results) -> None:
    for rank in together[2]:
        assert "use --model.embedding_optimizer rowwise_adagrad (or adagrad, sgd)" in rank["errors"]["same"]
        assert "use --trainer.strategy torchrec" in rank["errors"]["ddp"]
        assert "use row_wise or table_wise sharding" in rank["errors"]["column_wise"]


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_tables_built_on_the_meta_device_do_not_depend_on_the_sharding(together: Results) -> None:
    assert together[2][0]["meta"] == 0.0
