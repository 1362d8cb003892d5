"""`recsys-topk fit|validate|test|predict`: names and checkpoints are checked before Lightning is imported."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from recsys_topk.cli.console import echo
from recsys_topk.cli.help import class_help, command_help
from recsys_topk.runs.config import from_checkpoint, option_value, registries, rewrite, trusted_by, without_option
from recsys_topk.runs.resume import LONGER, Resumption, plan
from recsys_topk.trust import reading

if TYPE_CHECKING:
    from recsys_topk.runs.lightning_cli import CascadeCLI

MODEL_COMMANDS = ("validate", "test", "predict")


def main(argv: list[str]) -> int:
    """Run a training command; `argv` starts with its name."""
    text = wanted_help(argv)
    if text is not None:
        echo(text)
        return 0
    resumption = wanted_resumption(argv)
    if resumption is not None and resumption.finished and not _goes_further(argv):
        done = f"has finished ({resumption.epochs} epochs, {resumption.steps} steps); nothing is left to do"
        echo(f"the run in {resumption.run.path} {done}. To train on, give --trainer.max_epochs N with a larger N")
        return 0
    run(argv, resumption)
    return 0


def wanted_resumption(argv: list[str]) -> Resumption | None:
    """Return the run that `--resume` names, if it is given."""
    command, *rest = argv
    if not any(argument.partition("=")[0] == "--resume" for argument in rest):
        return None
    wanted = option_value(rest, "--resume")
    if command != "fit":
        raise ValueError(f"--resume goes with fit; {command} takes --ckpt_path FILE")
    if not wanted or wanted.startswith("--"):
        raise ValueError("--resume needs a value: last, a run's directory, or a checkpoint")
    if option_value(rest, "--ckpt_path") is not None:
        raise ValueError("--resume says where to go on from; leave --ckpt_path out")
    with reading(trusted_by(rest)):
        return plan(wanted, Path(option_value(rest, "--out") or "runs"), option_value(rest, "--name"))


def _goes_further(argv: list[str]) -> bool:
    return any(option_value(argv, f"--{option}") is not None for option in LONGER)


def wanted_help(argv: list[str]) -> str | None:
    """Return the help that the arguments ask for, if they do."""
    command, *rest = argv
    if "-h" in rest or "--help" in rest:
        return command_help(command)
    for short, table in registries().items():
        option = f"--{short}.help"
        if any(argument.partition("=")[0] == option for argument in rest):
            return class_help(table, option_value(rest, option) or option_value(rest, f"--{short}"))
    return None


def run(argv: list[str], resumption: Resumption | None = None, execute: bool = True) -> CascadeCLI:
    """Run a training command and return its parts: trainer, model, data and run directory.

    Args:
        argv: The command and its options.
        resumption: The run to go on with; None = a new one.
        execute: False = only build the parts.
    """
    with reading((*trusted_by(argv), *(resumption.trust if resumption is not None else ()))):
        return _run(without_option(argv, "--resume"), resumption, execute)


def _run(argv: list[str], resumption: Resumption | None, execute: bool) -> CascadeCLI:
    command, *rest = argv
    for registry in registries().values():
        registry.discover()
    everything = "--help_all" in rest
    arguments = ["--help" if argument == "--help_all" else argument for argument in rewrite(argv)]
    if command in MODEL_COMMANDS and not everything:
        checkpoint = option_value(rest, "--ckpt_path")
        if checkpoint is None:
            example = f"recsys-topk {command} --ckpt_path runs/NAME/checkpoints/best.ckpt"
            raise ValueError(f"{command} needs a trained model: {example}")
        config, lines = from_checkpoint(checkpoint)
        arguments.insert(1, f"--config={config}")
        for line in lines:
            echo(line)
    if resumption is not None:
        arguments[1:1] = resumption.arguments()
        for line in resumption.lines:
            echo(line)

    from recsys_topk.runs.lightning_cli import run_cli

    return run_cli(arguments, resumption, execute)
