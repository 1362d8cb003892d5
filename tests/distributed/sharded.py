"""Run in several processes: a group of `training.cases`, the quick one with resuming and `means`; or sharded files."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments import LightningEnvironment
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
from torchrec.distributed import DistributedModelParallel

from recsys_topk.callbacks.resume_point import WholeFileIO
from recsys_topk.strategies.sharding import Sharder, plan_tables
from recsys_topk.strategies.torchrec import TorchRecStrategy
from tests.distributed import means
from tests.distributed.training import CASES, cases, full_weights, make, train, trainer_of

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


def several_files(folder: Path, processes: int, *names: str) -> dict[str, bool]:
    """Save the run of `relay` as shards; resume it with the shardings of cases from one file and from the shards.

    Return per case whether both give the same losses and weights, bit by bit.
    """
    parts = replace(RELAY, single_file="1B")
    for saved, case in {"one": RELAY, "parts": parts}.items():
        train(case, processes, folder, resume=folder / "first.ckpt", save=folder / f"{saved}.ckpt", steps=SECOND)
    found = {}
    for name in names:
        case = replace(next(case for case in CASES if case.name == name), dense=RELAY.dense)
        one, two = (
            train(case, processes, folder, resume=folder / f"{saved}.ckpt", steps=SECOND + 2)
            for saved in ("one", "parts")
        )
        found[name] = (one["losses"], one["digest"]) == (two["losses"], two["digest"]) and len(one["losses"]) == 2
    return found


def memory_to_save(folder: Path, rows: int, **forms: str) -> dict[str, float]:
    """Return the peak growth of this process while it saves, as a share of the tables of all processes."""
    config = EmbeddingBagConfig(name="item", embedding_dim=32, num_embeddings=rows, feature_names=["item"])
    tables = EmbeddingBagCollection(tables=[config], device=torch.device("meta"))
    plan, _ = plan_tables(tables, ["row_wise"], dist.get_world_size(), "cpu", group=dist.group.WORLD)
    module = DistributedModelParallel(tables, device=torch.device("cpu"), plan=plan, sharders=[Sharder()])
    weights = dict(module.state_dict())
    for shard in (shard for value in weights.values() for shard in value.local_shards()):
        shard.tensor.detach().fill_(1.0)  # the kernel gives memory that is written to
    found = {}
    for form, largest in forms.items():
        strategy = TorchRecStrategy(single_file=largest)
        strategy.accelerator, strategy.cluster_environment = pl.accelerators.CPUAccelerator(), LightningEnvironment()
        strategy.parallel_devices, strategy._checkpoint_io = (
            [torch.device("cpu")] * dist.get_world_size(),
            WholeFileIO(),
        )
        strategy.set_world_ranks()
        Path("/proc/self/clear_refs").write_text("5")  # the peak of the memory begins anew
        before = memory("VmRSS")
        strategy.save_checkpoint({"state_dict": weights}, folder / form / "big.ckpt")
        found[form] = (memory("VmHWM") - before) / (rows * 32 * 4)
        dist.barrier()
    return found


def memory(kind: str) -> int:
    """Return a size of this process in bytes, from the kernel."""
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{kind}:")]
    return 1024 * int(line.split()[1])


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
        weights = full_weights(trainer)
        drawn.append({key: value for key, value in weights.items() if "collections" in key})
    return max((float((drawn[0][key] - drawn[1][key]).abs().max()) for key in drawn[0]), default=0.0)


def main(folder: Path, group: str) -> None:
    rank, processes = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    found: dict[str, Any] = {"cases": {}}
    for case in cases(processes, group) if group != "files" else ():
        result = train(case, processes, folder)
        if rank == 0:
            torch.save(result["weights"], folder / f"{case.name}.pt")
        found["cases"][case.name] = {key: result[key] for key in ("losses", "metrics", "digest")}
    if group == "quick":
        found["means"] = means.differences()
        found["relay"] = relay(folder, processes)
        found["errors"] = error_messages(folder, processes)
        found["meta"] = meta_difference(folder, processes)
    if group == "files":
        found["several files"] = several_files(folder, processes, "table_wise adagrad")
        found["memory"] = memory_to_save(folder, 800_000, shards="1B", file="1GB")
    if group == "long":
        found["several files"] = several_files(folder, processes, "row_wise adagrad", "column_wise adagrad")
        found["memory"] = memory_to_save(folder, 4_000_000, shards="1B")
    (folder / f"{rank}.json").write_text(json.dumps(found))
    dist.barrier()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
