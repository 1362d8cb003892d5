"""Training speed: positives per CPU second of RecTools' SASRec and of our transformer, at equal width and length.

    python examples/peers/speed.py path/to/ml-1m-tail ml-1m-tail.npz --peer path/to/rectools/bin/python --out speed.json

Both train next items at all positions with the full softmax over the catalogue, on ids only: width 64, 2 blocks, 4
heads, sequences of 50, batches of 128 sequences, dropout 0.2, Adam, one thread. Each is a process with its own
environment and the whole training loop of its library, the data loader included; the parent lets them train `--batches`
batches in turn. CPU time is compared, so a busy machine changes little. The first round is not counted.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

from protocol import cpu_model

WIDTH, BLOCKS, HEADS, LENGTH, BATCH, DROPOUT, LR = 64, 2, 4, 50, 128, 0.2, 1e-3


def callback_of(base, positives):
    """Return a callback that trains one epoch per line of standard input, and prints positives and CPU seconds."""

    class Rounds(base):
        """Waits before each epoch; the time of waiting is not counted."""

        def on_train_epoch_start(self, trainer, module):
            """Wait for the parent."""
            sys.stdin.readline()
            self.start, self.positives = time.process_time(), 0

        def on_train_batch_end(self, trainer, module, outputs, batch, number):
            """Count."""
            self.positives += positives(batch)

        def on_train_epoch_end(self, trainer, module):
            """Report."""
            spent = time.process_time() - self.start
            print(json.dumps({"positives": self.positives, "cpu_seconds": spent}), flush=True)

        def __deepcopy__(self, memo):
            return self

    return Rounds()


def rectools(split, rounds, batches):
    """Train RecTools' SASRec, as it is."""
    import pytorch_lightning as pl
    import torch
    from protocol import Split
    from rectools.models import SASRecModel
    from sasrec import dataset_of

    torch.set_num_threads(1)
    model = SASRecModel(
        n_factors=WIDTH, n_blocks=BLOCKS, n_heads=HEADS, session_max_len=LENGTH, dropout_rate=DROPOUT, lr=LR,
        batch_size=BATCH,
    )  # fmt: skip
    model._trainer = pl.Trainer(
        max_epochs=rounds, limit_train_batches=batches, accelerator="cpu", logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
        callbacks=[callback_of(pl.Callback, lambda batch: int((batch["y"] > 0).sum()))],
    )  # fmt: skip
    model.fit(dataset_of(Split(split)))


def ours(root, rounds, batches):
    """Train the stage `two_tower` with the history encoder `transformer`, by the trainer of the toolkit."""
    import torch
    from lightning.pytorch.callbacks import Callback

    from recsys_topk.runs.run import TrainingRun

    torch.set_num_threads(1)
    encoder = {"kind": "transformer", "blocks": BLOCKS, "heads": HEADS, "feedforward": 1, "dropout": DROPOUT}
    data = {
        "root": root, "split": "leave_last", "every_position": True, "negative_source": "catalogue",
        "history_length": LENGTH, "batch_size": BATCH,
        "features": {"items": {"item_id": "categorical"}, "history": ["item_id"]},
    }  # fmt: skip
    options = {"hidden": [], "history": encoder}
    stage = {"kind": "two_tower", "name": "only", "quota": 20, "options": options}
    run = TrainingRun(
        {
            "data": {"class_path": "interactions", "init_args": data},
            "loss": "softmax",
            "model": {"k": 20, "dim": WIDTH, "lr": LR, "init_std": 0.02, "stages": [stage]},
            "trainer": {
                "max_epochs": rounds, "limit_train_batches": batches, "limit_val_batches": 0, "logger": False,
                "num_sanity_val_steps": 0, "enable_checkpointing": False, "enable_progress_bar": False,
                "accelerator": "cpu",
            },
        },
        log_line=lambda line: None,
    )  # fmt: skip
    run.trainer.callbacks.append(callback_of(Callback, lambda batch: int((batch.labels > 0).sum())))
    run.fit()


class Worker:
    """A process that trains one round when it is asked to."""

    def __init__(self, python, name, path, rounds, batches):
        command = [python, __file__, name, path, str(rounds), str(batches)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        if name != "ours":
            environment.pop("PYTHONPATH", None)
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment)

    def round(self):
        """Train a round; return positives per CPU second."""
        self.process.stdin.write("go\n")
        self.process.stdin.flush()
        for line in self.process.stdout:
            if line.startswith('{"positives"'):
                found = json.loads(line)
                return found["positives"] / found["cpu_seconds"]
        raise RuntimeError("the process ended before its last round")


def main():
    """Alternate the two processes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("root")
    parser.add_argument("split")
    parser.add_argument("--peer", required=True)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batches", type=int, default=20)
    parser.add_argument("--out", required=True)
    given = parser.parse_args()
    number = given.rounds + 1
    workers = {
        "rectools": Worker(given.peer, "rectools", given.split, number, given.batches),
        "ours": Worker(sys.executable, "ours", given.root, number, given.batches),
    }
    speeds = {name: [] for name in workers}
    for _ in range(number):
        for name, worker in workers.items():
            speeds[name].append(round(worker.round(), 1))
            print(name, speeds[name][-1], "positives per CPU second", flush=True)
    ratios = [own / peer for own, peer in zip(speeds["ours"][1:], speeds["rectools"][1:], strict=True)]
    median = {name: statistics.median(values[1:]) for name, values in speeds.items()}
    result = {
        "positives_per_cpu_second": speeds, "median": median, "ratio": statistics.median(ratios), "cpu": cpu_model(),
        "rounds": given.rounds, "batches": given.batches, "width": WIDTH, "blocks": BLOCKS, "heads": HEADS,
        "length": LENGTH, "batch_size": BATCH,
    }  # fmt: skip
    Path(given.out).write_text(json.dumps(result, indent=1) + "\n")
    print(f"median ratio {result['ratio']:.2f} ({min(ratios):.2f} to {max(ratios):.2f})")


if __name__ == "__main__":
    if sys.argv[1] in ("ours", "rectools"):
        {"ours": ours, "rectools": rectools}[sys.argv[1]](sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
    else:
        main()
