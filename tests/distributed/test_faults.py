"""A killed process ends the run with a one-line error; torchrun resumes it to the same metrics."""

from __future__ import annotations

import csv
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import TINY_WORLD
from tests.distributed.launch import ROOT, free_port

Result = subprocess.CompletedProcess[str]

KILLER = """
import os, signal
from lightning.pytorch.callbacks import Callback

class Killer(Callback):
    def on_train_batch_start(self, trainer, *_):
        if os.environ.get("KILLED_RANK") == str(trainer.global_rank) and trainer.global_step == 2:
            os.kill(os.getpid(), signal.SIGKILL)
"""
OPTIONS = [
    *TINY_WORLD, "--model.embedding_optimizer=adagrad", "--trainer.accelerator=cpu", "--save_every_n_steps=1",
    "--data.train_negatives=10", "--data.negative_source=uniform", "--trainer.enable_progress_bar=false",
]  # fmt: skip


def logged_values(run: Path, column: str) -> list[float]:
    with (run / "metrics.csv").open(newline="") as file:
        return [float(row[column]) for row in csv.DictReader(file) if row[column]]


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_killed_process_ends_the_run_and_torchrun_resumes_it(
    tmp_path: Path, environment: dict[str, str], in_process: Callable[..., Result]
) -> None:
    (tmp_path / "killer.py").write_text(KILLER)
    local = {
        **environment, "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)]),
    }  # fmt: skip
    run = tmp_path / "runs" / "two"

    def start(*command: str, **extra: str) -> Result:
        return subprocess.run(
            ["timeout", "-s", "KILL", "500", sys.executable, "-m", *command], cwd=tmp_path, env={**local, **extra},
            capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL,
        )  # fmt: skip

    alone = in_process(tmp_path, "fit", *OPTIONS, "--name=one")
    assert alone.returncode == 0, alone.stderr
    killed = start(
        "recsys_topk", "fit", *OPTIONS, "--name=two", "--data.batch_size=30", "--trainer.devices=2",
        "--trainer.strategy=torchrec", "--trainer.strategy.sharding=row_wise", "--trainer.strategy.single_file=1B",
        "--trainer.callbacks+=killer.Killer",
        KILLED_RANK="1",
    )  # fmt: skip
    assert killed.returncode == 1, killed.stderr
    messages = [line for line in killed.stderr.splitlines() if line.startswith("recsys-topk fit:")]
    assert len(messages) == 1
    assert "process 1 of 2 (0 to 1) was killed by SIGKILL; training stopped after step 2" in messages[0]
    assert "Traceback" not in killed.stderr
    assert json.loads((run / "run.json").read_text())["status"] == "failed"

    launcher = ["torch.distributed.run", "--nproc-per-node=2", f"--master-port={free_port()}", "-m"]
    resumed = start(*launcher, "recsys_topk", "fit", "--resume", str(run))
    assert resumed.returncode == 0, resumed.stderr
    (_,) = [
        line
        for line in resumed.stdout.splitlines()
        if "lists of 80 with 40 uniform negatives; baselines on 60 requests" in line
    ]
    assert re.search(r"^metric +random +popularity +this run +oracle$", resumed.stdout, re.MULTILINE)
    assert json.loads((run / "run.json").read_text())["status"] == "finished"
    assert [path.name for path in (tmp_path / "runs").iterdir() if path.name.startswith("two")] == ["two"]
    # Sums of two processes are rounded differently, which may swap two items: 1 / 1200 of the recall.
    for column, tolerance in (("train/loss", 2e-4), ("val/joint_recall@10@20", 5e-3)):
        alone_values = logged_values(tmp_path / "runs" / "one", column)
        assert logged_values(run, column) == pytest.approx(alone_values, abs=tolerance)

    # A checkpoint of sharded tables can be exported; the command compares the export with the checkpoint.
    served = in_process(
        tmp_path, "export", "--ckpt_path", str(run / "checkpoints" / "last.ckpt"), "--out", "served", "--no-programs"
    )
    assert served.returncode == 0, served.stderr
    assert (tmp_path / "served" / "manifest.json").is_file()
