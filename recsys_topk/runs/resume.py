"""Resuming a run: which one, from which checkpoint, and which options may change."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recsys_topk.runs.checkpoint import describe_checkpoint, read_checkpoint
from recsys_topk.runs.config import flatten_config, resolve
from recsys_topk.runs.directory import RunDirectory
from recsys_topk.trust.documents import inspect_config, read_yaml_file
from recsys_topk.trust.own_runs import recall

# Options that may change: length of training, places of files, output.
FREE = (
    "out", "name", "logger", "wandb", "log_checkpoints", "baselines", "save_every_minutes", "save_every_n_steps",
    "ckpt_path", "weights_only",
    "trainer.max_epochs", "trainer.max_steps", "trainer.max_time", "trainer.min_epochs", "trainer.min_steps",
    "trainer.enable_progress_bar", "trainer.enable_model_summary", "trainer.log_every_n_steps", "trainer.profiler",
    "trainer.default_root_dir", "data.num_workers", "data.cache_dir", "data.eval_batch_size",
)  # fmt: skip
# Options of the machine, which may change; the last digits of the results may then differ.
MACHINE = (
    "trainer.accelerator", "trainer.strategy", "trainer.devices", "trainer.num_nodes", "trainer.precision",
    "trainer.callbacks", "trainer.plugins", "trainer.deterministic", "trainer.benchmark", "data.root",
)  # fmt: skip
LONGER = ("max_epochs", "max_steps", "max_time")  # options of the trainer that extend a finished run


@dataclass(frozen=True)
class Resumption:
    """A run to resume."""

    run: RunDirectory  # the directory of the run
    checkpoint: Path  # the checkpoint to resume from
    config: dict[str, Any]  # the options of the run
    steps: int  # number of finished optimizer steps
    epochs: int  # number of finished epochs
    mid_epoch: bool  # whether the checkpoint was saved within an epoch
    lines: tuple[str, ...]  # a description of the restored state
    trust: tuple[str, ...]  # packages that the user trusted when the run started

    @property
    def finished(self) -> bool:
        """Whether the run has finished."""
        return self.run.facts.get("status") == "finished"


def find_run(wanted: str, out: Path, name: str | None = None) -> tuple[RunDirectory, Path]:
    """Return the directory of the run to resume, and its checkpoint.

    `wanted` is ``"last"`` for the newest unfinished run in the folder `out` (only those called `name`, if it is given),
    or a run's directory, its name in `out`, or a checkpoint in a run directory.
    """
    if wanted == "last":
        run, checkpoint = _newest(out, name), None
    else:
        path = next((path for path in (Path(wanted), out / wanted) if path.exists()), None)
        if path is None:
            raise FileNotFoundError(
                f"--resume {wanted!r}: no such directory or checkpoint, and no such run in {str(out)!r}; --resume last "
                f"takes the newest unfinished run there"
            )
        checkpoint = path if path.is_file() else None
        folder = path.parent if checkpoint else path
        run = RunDirectory.open(folder.parent if folder.name == "checkpoints" else folder)
        if not (run.path / "config.yaml").is_file():
            raise FileNotFoundError(
                f"--resume {wanted!r} is not a run's directory or in one: there is no {run.path / 'config.yaml'}; "
                f"`recsys-topk fit --ckpt_path` begins a new run from a checkpoint"
            )
    checkpoint = checkpoint or run.path / "checkpoints" / "last.ckpt"
    if not checkpoint.is_file():
        raise FileNotFoundError(
            f"the run in {run.path} stopped before its first checkpoint ({checkpoint}); start it again "
            f"(recsys-topk fit --config {run.path / 'config.yaml'}), or name another run"
        )
    return run, checkpoint


def plan_resumption(wanted: str, out: Path, name: str | None = None) -> Resumption:
    """Find the run, and read its config and checkpoint."""
    run, checkpoint = find_run(wanted, out, name)
    content = read_checkpoint(str(checkpoint))
    saved = read_yaml_file(run.path / "config.yaml")
    if not isinstance(saved, dict):
        raise ValueError(f"{run.path / 'config.yaml'} is not the config of a run")
    config = {name: value for name, value in saved.items() if name not in ("ckpt_path", "weights_only")}
    if isinstance(config.get("wandb"), dict):  # a file cannot choose where data are sent
        config["wandb"] = {name: value for name, value in config["wandb"].items() if name not in ("entity", "mode")}
    trust = recall(run.path)
    inspect_config(config, str(run.path / "config.yaml"), trust)
    loop = (content.get("loops") or {}).get("fit_loop")
    if "optimizer_states" not in content or not loop:
        raise ValueError(
            f"{str(checkpoint)!r} holds weights only, so training cannot be resumed from it; use last.ckpt"
        )
    epoch = loop["epoch_progress"]["current"]
    steps, epochs = int(content["global_step"]), int(epoch["processed"])
    mid_epoch = epoch["started"] > epochs
    batches = int(loop["epoch_loop.batch_progress"]["current"]["ready"])
    where = f", {batches} batches into epoch {epochs + 1}" if mid_epoch else ""
    state = f"  state      {steps} steps, {epochs} whole epochs{where}; optimizer, order of requests, generators"
    lines = (*describe_checkpoint(str(checkpoint), content), state)
    return Resumption(run, checkpoint, config, steps, epochs, mid_epoch, lines, trust)


def check_changes(resumption: Resumption, config: Mapping[str, Any], options: Mapping[str, Any]) -> list[str]:
    """Raise if an option that must not change differs from the run's; return a line per change of the machine.

    `config` is the config to resume with in its long form: that of the run, overridden by what was typed. `options` is
    the same config, parsed: numbers are numbers, and defaults are filled in.
    """
    before, merged, parsed = (flatten_config(part) for part in (resolve(resumption.config), config, options))
    after = {key: parsed.get(key, value) for key, value in merged.items() if before.get(key) != value}
    changed = [key for key, value in after.items() if before.get(key) != value]
    # With another number of processes, the batch size per process may change; the loader checks the global one.
    moved = any(_among(key, ("trainer.devices", "trainer.num_nodes")) for key in changed)
    machine_options = (*MACHINE, "data.batch_size") if moved else MACHINE
    refused = [key for key in changed if not _among(key, (*FREE, *machine_options))]
    if refused:
        chosen = next((key for key in refused if key in ("model.loss", "model.objective", "data")), refused[0])
        others = f" (and {len(refused) - 1} more)" if len(refused) > 1 and chosen == refused[0] else ""
        raise ValueError(
            f"--resume takes the options of the run in {resumption.run.path}: {chosen} is {before.get(chosen)!r} "
            f"there, and {after[chosen]!r} was given{others}; leave it out, or start a new run without --resume"
        )
    target = options["trainer"].get("max_epochs")
    if target is not None and 0 <= target <= resumption.epochs:
        raise ValueError(
            f"the run in {resumption.run.path} has trained {resumption.epochs} epochs, and --trainer.max_epochs is "
            f"{target}; give a larger number"
        )
    if not resumption.mid_epoch and options["trainer"].get("max_steps", -1) != -1:
        raise ValueError(
            f"{resumption.checkpoint} was saved between two epochs, where Lightning cannot resume with "
            f"--trainer.max_steps; give --trainer.max_steps=-1 --trainer.max_epochs N"
        )
    machine = [(key, before.get(key)) for key in changed if _among(key, machine_options)]
    return [f"{key}: {old!r} -> {after[key]!r}; the numbers may differ in the last digits" for key, old in machine]


def _newest(out: Path, name: str | None) -> RunDirectory:
    if not out.is_dir():
        raise FileNotFoundError(f"--resume last: there is no folder {str(out)!r} to look for runs in; give --out")
    named = f" named {name!r}" if name is not None else ""
    runs = [RunDirectory.open(path.parent) for path in out.glob("*/run.json") if name in (None, path.parent.name)]
    runs.sort(key=lambda run: (run.path / "run.json").stat().st_mtime)
    unfinished = [run for run in runs if run.facts.get("status") != "finished" and not run.busy]
    unfinished = [run for run in unfinished if (run.path / "checkpoints" / "last.ckpt").is_file()] or unfinished
    if unfinished:
        return unfinished[-1]
    if not runs:
        raise FileNotFoundError(f"--resume last: no run{named} in {str(out)!r}; is this the right --out?")
    raise ValueError(
        f"--resume last: no unfinished run{named} in {str(out)!r}; the newest, {runs[-1].path}, "
        + ("is being trained by another process" if runs[-1].busy else "has finished")
        + f" (--resume {runs[-1].path} --trainer.max_epochs N trains a finished one on)"
    )


def _among(key: str, names: tuple[str, ...]) -> bool:
    return any(key == name or key.startswith(f"{name}.") for name in names)
