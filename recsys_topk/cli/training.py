"""`recsys-topk fit|validate|test|predict`: names and checkpoints are checked before Lightning is imported."""

from __future__ import annotations

from typing import TYPE_CHECKING

from recsys_topk.cli.arguments import from_checkpoint, option_value, registries, rewrite
from recsys_topk.cli.console import echo
from recsys_topk.cli.help import class_help, command_help

if TYPE_CHECKING:
    from recsys_topk.cli.lightning_cli import CascadeCLI

MODEL_COMMANDS = ("validate", "test", "predict")


def main(argv: list[str]) -> int:
    """Run a training command; `argv` starts with its name."""
    text = wanted_help(argv)
    if text is not None:
        echo(text)
        return 0
    run(argv)
    return 0


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


def run(argv: list[str], execute: bool = True) -> CascadeCLI:
    """Run a training command and return its parts: trainer, model, data and run directory.

    Args:
        argv: The command and its options.
        execute: False = only build the parts.
    """
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

    from recsys_topk.cli.lightning_cli import run_cli

    return run_cli(arguments, execute)
