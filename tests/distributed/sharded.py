"""Run in several processes: a group of `training.cases`; the quick one with saving, resuming and `means`."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.distributed import means
from tests.distributed.training import CASES, cases, make, train, trainer_of

# The case that is trained by one process, then two, then one; FIRST and SECOND are the steps of the changes.
RELAY = next(case for case in CASES if case.name == "row_wise adagrad")
FIRST, SECOND = 17, 33


def relay(folder: Path, processes: int) -> dict[str, Any]:
    """Resume a run of one process to the end, once directly and once with another resume in between."""
    compared = {"state_dict", "optimizer_states", "lr_schedulers"}
    part = train(RELAY, processes, folder, resume=folder / "first.ckpt", save=folder / "second.ckpt", steps=SECOND)
    again = train(RELAY, processes, folder, resume=folder / "second.ckpt", save=folder / "again.ckpt", steps=40)
    whole = train(RELAY, processes, folder, resume=folder / "first.ckpt", save=folder / "whole.ckpt", steps=40)
    files = [torch.load(folder / f"{name}.ckpt", weights_only=True) for name in ("again", "whole")]
    equal = all(same(*(file[key] for file in files)) for key in compared)
    return {"losses": part["losses"], "exact": whole["losses"][SECOND - FIRST :] == again["losses"] and equal}


def same(a: Any, b: Any) -> bool:
    """Return whether nested values are equal bit by bit."""
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else bool(a == b)


def error_messages(folder: Path, processes: int) -> dict[str, str]:
    """Return the error messages of unsupported options."""
    found = {}
    by_name = {case.name: case for case in CASES}
    for name, changes in {
        "same": {"tables": "same"},
        "ddp": {"strategy": "ddp"},
        "column_wise": {"strategy": "column_wise", "tables": "rowwise_adagrad"},
    }.items():
        case = type(RELAY)(**{**vars(by_name["row_wise sgd"]), **changes})
        module, data = make(case, processes)
        try:
            trainer_of(case, processes, folder, 1).fit(module, data)
        except ValueError as error:
            found[name] = str(error)
    return found


def meta_difference(folder: Path, processes: int) -> float:
    """Return the largest difference between tables built on the meta device under two shardings."""
    drawn = []
    for name in ("row_wise adagrad", "column_wise adagrad"):
        case = next(case for case in CASES if case.name == name)
        module, data = make(case, processes, on_meta=True)
        trainer = trainer_of(case, processes, folder, 1)
        trainer.validate(module, data, verbose=False)
        weights = trainer.strategy.lightning_module_state_dict()
        drawn.append({key: value for key, value in weights.items() if "collections" in key})
    return max((float((drawn[0][key] - drawn[1][key]).abs().max()) for key in drawn[0]), default=0.0)


def main(folder: Path, group: str) -> None:
    rank, processes = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    found: dict[str, Any] = {"cases": {}}
    for case in cases(processes, group):
        result = train(case, processes, folder)
        if rank == 0:
            torch.save(result["weights"], folder / f"{case.name}.pt")
        found["cases"][case.name] = {key: result[key] for key in ("losses", "metrics", "digest")}
    if group == "quick":
        found["means"] = means.differences()
        found["relay"] = relay(folder, processes)
        found["errors"] = error_messages(folder, processes)
        found["meta"] = meta_difference(folder, processes)
    (folder / f"{rank}.json").write_text(json.dumps(found))
    dist.barrier()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
