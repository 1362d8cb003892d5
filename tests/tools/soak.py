"""`make soak`: kill commands at random moments and make their writes fail; their results must equal those of an
undisturbed run.

Every command is run once undisturbed. Then it is started, killed after a random time (SIGKILL to all its processes) or
given a full disk, and started again as a user would (``--resume`` for a run), until it is complete. Results are
compared: files by their digest, checkpoints by their tensors, metrics by their values.

    python -m tests.tools.soak --kills 100 --faults 30 --out runs/soak
"""

from __future__ import annotations

import argparse
import csv
import functools
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from recsys_topk.cascades.shards import load_stored, with_full_tensors
from tests.conftest import TINY_WORLD

ROOT = Path(__file__).parents[2]
FIT = [*TINY_WORLD, "--trainer.accelerator=cpu", "--trainer.enable_progress_bar=false", "--data.train_negatives=5",
       "--save_every_n_steps=1", "--out=result"]  # fmt: skip
SHARDED = ["--trainer.devices=2", "--trainer.strategy=torchrec", "--trainer.strategy.single_file=1B",
           "--data.batch_size=30", "--model.embedding_optimizer=adagrad"]  # fmt: skip
TRIALS = ["--losses", "dftopk", "--seeds", "1", "--out", "result", *TINY_WORLD, "--trainer.accelerator=cpu"]


@dataclass(frozen=True)
class Job:
    """A command with its result in the folder ``result``.

    In it, ``{log}`` is a log of users and items, and ``{run}`` the folder of a trained and exported cascade.
    """

    command: list[str]
    resume: list[str] | None = None  # the command to continue, if it is another one


LOG = ["prepare", "--data", "interactions", "--data.root", "{log}", "--data.cache_dir", "result"]
EXPORT = ["export", "--no-programs", "--ckpt_path"]
JOBS = {
    "prepare": Job(LOG),
    "fit": Job(["fit", *FIT, "--name=run"], ["fit", "--resume", "result/run"]),
    "sharded fit": Job(["fit", *FIT, *SHARDED, "--name=run"], ["fit", "--resume", "result/run"]),
    "compare": Job(["compare", *TRIALS]),
    "stream": Job(["stream", *TRIALS]),
    "export": Job([*EXPORT, "{run}/result/run/checkpoints/last.ckpt", "--out", "result"]),
    "index": Job(["index", "--export", "{run}/export", "--out", "result"]),
}


def log_of_interactions(path: Path) -> None:
    """Write a small log of users and items."""
    chance = random.Random(0)
    rows = [f"u{chance.randrange(80)},i{chance.randrange(120)},{1_700_000_000 + 60 * i}" for i in range(4000)]
    path.write_text("\n".join(["user_id,item_id,timestamp", *rows]) + "\n")


def numbers(value: Any) -> Any:
    """Return nested values without times, names of folders and tensors, which become digests."""
    if isinstance(value, dict):
        dropped = ("second", "time", "wandb", "per_second", "path", "folder", "version", "created", "shards")
        return {str(key): numbers(part) for key, part in value.items() if not any(one in str(key) for one in dropped)}
    if isinstance(value, (list, tuple)):
        return [numbers(part) for part in value]
    if isinstance(value, torch.Tensor):
        return hashlib.sha256(value.contiguous().view(-1).view(torch.uint8).numpy().tobytes()).hexdigest()
    return value


def result(folder: Path) -> dict[str, Any]:
    """Return what the files below ``result`` say, by name."""
    found: dict[str, Any] = {}
    for file in sorted(path for path in (folder / "result").rglob("*") if path.is_file()):
        name = str(file.relative_to(folder))
        if file.suffix == ".ckpt":
            content = with_full_tensors(load_stored(file))
            found[name] = numbers({key: content[key] for key in ("state_dict", "optimizer_states", "global_step")})
        elif file.name == "metrics.csv":
            with file.open() as rows:
                found[name] = [numbers(row) for row in csv.DictReader(rows)]
        elif file.suffix == ".json":
            found[name] = numbers(json.loads(file.read_text()))
        elif file.suffix in (".arrow", ".npy", ".onnx", ".faiss", ".npz"):
            found[name] = hashlib.sha256(file.read_bytes()).hexdigest()
        elif not any(part.startswith((".", "shards-")) for part in file.relative_to(folder).parts):
            found[name] = "present"
    return found


class Soak:
    """Runs jobs in folders below ``out`` and disturbs them."""

    def __init__(self, out: Path, seed: int, names: list[str]) -> None:
        self.out, self.chance, self.jobs = out, random.Random(seed), {name: JOBS[name] for name in names}
        self.tries: list[dict[str, Any]] = []
        self.environment = {
            **os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo",
            "RECSYS_TOPK_CACHE": str(out / "cache"), "WANDB_MODE": "disabled",
        }  # fmt: skip

    @functools.cached_property
    def log(self) -> Path:
        """A log of users and items."""
        log_of_interactions(self.out / "log.csv")
        return self.out / "log.csv"

    @functools.cached_property
    def run(self) -> Path:
        """A trained and exported cascade."""
        folder = self.out / "run"
        folder.mkdir()
        self.complete(JOBS["fit"].command, folder)
        self.complete([*EXPORT, "result/run/checkpoints/last.ckpt", "--out", "export"], folder)
        return folder

    def start(self, command: list[str], folder: Path, fault: tuple[str, int] | None = None) -> subprocess.Popen[str]:
        """Start a command in a new session, so that all its processes can be killed."""
        for name in ("log", "run"):
            command = [p.replace(f"{{{name}}}", str(getattr(self, name))) if f"{{{name}}}" in p else p for p in command]
        faulty = ["tests.tools.faulty", fault[0], str(fault[1]), str(folder)] if fault else ["recsys_topk"]
        return subprocess.Popen(
            [sys.executable, "-m", *faulty, *command], cwd=folder, env=self.environment, start_new_session=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    def complete(self, command: list[str], folder: Path) -> float:
        """Run a command to its end; return its seconds. Raise if it fails."""
        begin = time.monotonic()
        process = self.start(command, folder)
        _, errors = process.communicate(timeout=1800)
        if process.returncode:
            raise RuntimeError(f"{' '.join(command)}: status {process.returncode}\n{errors[-2000:]}")
        return time.monotonic() - begin

    @functools.cache  # noqa: B019  # lives as long as the program
    def undisturbed(self, name: str) -> tuple[dict[str, Any], float]:
        """Return the result of a job, and its seconds."""
        folder = self.out / f"{name}-undisturbed"
        folder.mkdir()
        seconds = self.complete(self.jobs[name].command, folder)
        return result(folder), seconds

    def again(self, name: str, folder: Path) -> list[str]:
        """Return the command that a user gives after an interruption."""
        job = self.jobs[name]
        if job.resume is None:
            return job.command
        if (folder / "result/run/checkpoints/last.ckpt").is_file():
            return job.resume
        shutil.rmtree(folder / "result", ignore_errors=True)  # there is no checkpoint yet
        return job.command

    def disturb(self, name: str, kind: str) -> None:
        """Disturb a job once, complete it, and record what was found."""
        expected, seconds = self.undisturbed(name)
        folder = self.out / f"{name}-{len(self.tries)}"
        folder.mkdir()
        fault = None if kind == "kill" else (kind, self.chance.choice([1, 2, 5, 10, 20] if kind != "size" else SIZES))
        process, delay = self.start(self.jobs[name].command, folder, fault), self.chance.uniform(*WHEN) * seconds
        problems, errors = [], ""
        try:
            _, errors = process.communicate(timeout=delay if kind == "kill" else 1800)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
        if fault and process.returncode and "Traceback" in errors:
            problems.append(f"traceback: {errors.strip().splitlines()[-1][:200]}")
        if fault and process.returncode not in (0, 1, 2):
            problems.append(f"status {process.returncode}")
        try:
            if process.returncode:
                self.complete(self.again(name, folder), folder)
            found = result(folder)
            apart = [key for key in {**expected, **found} if expected.get(key) != found.get(key)]
            problems += [f"{key} differs" for key in apart if not key.endswith((".yaml", "run.json", ".log"))]
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            problems.append(f"not completed: {str(error)[-600:]}")
        done = {
            "job": name,
            "kind": kind,
            "fault": fault and fault[1],
            "after": round(delay, 1),
            "stopped": process.returncode,
        }
        self.tries.append({**done, "problems": problems})
        (self.out / "soak.json").write_text(json.dumps(self.tries, indent=1))
        print(json.dumps(self.tries[-1]), flush=True)  # noqa: T201
        if not problems:
            shutil.rmtree(folder)


WHEN = (0.2, 1.0)  # shares of the time of an undisturbed run
SIZES = [0, 1000, 10_000, 50_000, 200_000]


def main(argv: list[str] | None = None, say: Callable[[str], None] = print) -> int:
    parser = argparse.ArgumentParser(description="Kill commands, fill their disks, and compare their results.")
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--faults", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", nargs="+", default=list(JOBS), choices=list(JOBS), metavar="JOB")
    parser.add_argument("--out", type=Path, required=True, help="a new folder")
    options = parser.parse_args(argv)
    options.out.mkdir(parents=True)
    soak = Soak(options.out.resolve(), options.seed, options.jobs)
    kinds = ["kill"] * options.kills + [("enospc", "size", "erofs")[n % 3] for n in range(options.faults)]
    for number, kind in enumerate(kinds):
        soak.disturb(options.jobs[number % len(options.jobs)], kind)
    bad = [one for one in soak.tries if one["problems"]]
    stopped = sum(bool(one["stopped"]) for one in soak.tries)
    say(f"{len(kinds)} disturbances, {stopped} of them stopped a command; {len(bad)} with problems")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
