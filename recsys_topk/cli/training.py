"""`recsys-topk fit|validate|test|predict`: names and checkpoints are checked before Lightning is imported."""

from __future__ import annotations

from typing import TYPE_CHECKING

from recsys_topk.cli.arguments import from_checkpoint, option_value, registries, rewrite
from recsys_topk.cli.console import echo

if TYPE_CHECKING:
    from recsys_topk.cli.lightning_cli import CascadeCLI

MODEL_COMMANDS = ("validate", "test", "predict")


def main(argv: list[str]) -> int:
    """Run a training command; `argv` starts with its name."""
    run(argv)
    return 0


def run(argv: list[str]) -> CascadeCLI:
    """Run a training command and return its parts: trainer, model, data and run directory."""
    command, *rest = argv
    for registry in registries().values():
        registry.discover()
    arguments = rewrite(argv)
    asks_help = any(argument in ("-h", "--help") or argument.endswith(".help") for argument in rest)
    if command in MODEL_COMMANDS and not asks_help:
        checkpoint = option_value(rest, "--ckpt_path")
        if checkpoint is None:
            example = f"recsys-topk {command} --ckpt_path runs/NAME/checkpoints/best.ckpt"
            raise ValueError(f"{command} needs a trained model: {example}")
        config, lines = from_checkpoint(checkpoint)
        arguments.insert(1, f"--config={config}")
        for line in lines:
            echo(line)

    from recsys_topk.cli.lightning_cli import run_cli

    return run_cli(arguments)
