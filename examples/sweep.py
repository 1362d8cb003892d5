"""A small sweep without a server, with W&B's own search: `python examples/sweep.py FOLDER`.

`wandb sweep` and `wandb agent` do the same on many machines, and need an account (docs/wandb.md).
"""

import os
import sys
import warnings

import wandb
import yaml

import sweeps
from recsys_topk.cli.sweep import sweeps as packaged
from recsys_topk.runs import TrainingRun
from recsys_topk.runs.config import set_option

os.environ["WANDB_SILENT"] = "true"
warnings.simplefilter("ignore", DeprecationWarning)  # from the pydantic models of W&B's search
sweep = yaml.safe_load(packaged()["learning-rates"])  # or your own file; `recsys-topk sweep` lists the packaged ones
metric = sweep["metric"]["name"]
tiny = {
    "data": {"world": {"users": 40, "items": 300, "days": 4, "requests": 120}, "batch_size": 60, "eval_negatives": 40},
    "trainer": {"max_epochs": 1, "accelerator": "cpu", "enable_progress_bar": False},
    "logger": "wandb",
    "wandb": {"mode": "offline", "group": sweep["name"], "job_type": "sweep"},
    "out": sys.argv[1],
}
finished: list[sweeps.SweepRun] = []
while len(finished) < 3:
    drawn = sweeps.next_run(sweep, finished)  # a Bayesian search uses the results of earlier runs
    config = dict(tiny)
    for option, chosen in drawn.config.items():
        set_option(config, option, chosen["value"] if isinstance(chosen["value"], str) else float(chosen["value"]))
    run = TrainingRun(config)
    reached = run.fit()
    wandb.finish()
    drawn.state, drawn.summary_metrics = sweeps.RunState.finished, reached
    finished.append(drawn)
    print(f"{run.directory.path.name}  {metric} {reached[metric]:.4f}")
best = max(finished, key=lambda one: one.summary_metrics[metric])
print("best:", " ".join(f"--{option} {chosen['value']}" for option, chosen in best.config.items()))
