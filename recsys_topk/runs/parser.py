"""The parser of a run's config: it checks the type of every option and fills in the defaults."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, cast

import lightning.pytorch as pl
import yaml
from jsonargparse import Namespace
from lightning.pytorch.cli import LightningArgumentParser
from lightning.pytorch.strategies import StrategyRegistry

from recsys_topk.cascades.module import CascadeModule
from recsys_topk.cascades.objectives.base import CascadeObjective
from recsys_topk.cascades.stage import StageConfig
from recsys_topk.datamodules import CascadeDataModule
from recsys_topk.losses.base import RankingLoss
from recsys_topk.options import options_of
from recsys_topk.registry import suggest
from recsys_topk.runs.config import KEYS, named_in, registry_of
from recsys_topk.runs.wandb.environment import WANDB_OPTIONS
from recsys_topk.strategies.torchrec import TorchRecStrategy
from recsys_topk.trust.allowed import what_to_trust
from recsys_topk.trust.source import UntrustedError

TorchRecStrategy.register_strategies(StrategyRegistry)
TRAINER_DEFAULTS = {"max_epochs": 1, "log_every_n_steps": 10, "num_sanity_val_steps": 0, "enable_model_summary": False}
# Options of a run besides those of trainer, model and data: type, default, help.
OPTIONS: dict[str, tuple[Any, Any, str]] = {
    "seed_everything": (bool | int, 42, "seed of the random generators; true = a random seed"),
    "ckpt_path": (str | None, None, "checkpoint to load"),
    "weights_only": (bool | None, None, "false: allow code in the checkpoint; only typed, never in a file"),
    "out": (str, "runs", "folder of the run directories"),
    "name": (str | None, None, "name of the run; derived from its options if not given"),
    "logger": (Literal["csv", "wandb", "mlflow", "tensorboard"], "csv", "metrics.csv is always written"),
    "log_checkpoints": (bool, False, "upload the weights of best and last to W&B after fit"),
    "baselines": (bool, True, "measure random order and popularity beside the result"),
    "save_every_minutes": (float, 5.0, "how often last.ckpt is saved inside an epoch"),
    "save_every_n_steps": (int | None, None, "save last.ckpt also at every n-th step"),
    **{f"wandb.{name}": (str | None, None, f"{name} of the W&B run") for name in WANDB_OPTIONS},
    "wandb.tags": (list[str] | str | None, None, "tags of the W&B run, separated by commas"),
    "wandb.mode": (Literal["online", "offline", "disabled"] | None, None, "disabled: no W&B run"),
}
# What other programs call these options; an option is also found by the last part of its name (lr -> model.lr).
ALIASES = {"epochs": "trainer.max_epochs", "seed": "seed_everything", "gpus": "trainer.devices"}
ALIASES |= {"device": "trainer.accelerator", "learning_rate": "model.lr", "workers": "data.num_workers"}
ALIASES["epoch"] = ALIASES["epochs"]


def cascade(
    schema: Any,
    loss: RankingLoss,
    stages: list[StageConfig] | None = None,
    objective: Callable[[RankingLoss, int], CascadeObjective] | None = None,
    **options: Any,
) -> CascadeModule:
    """Build the module.

    Args:
        schema: The features; taken from the data.
        loss: The loss; `--loss NAME` for short.
        stages: The stages, first to last; None = what the features of the data can feed.
        objective: How the stages are trained together; `--objective NAME` for short.
        options: Options of `CascadeModule`.
    """
    return CascadeModule(schema, stages=stages, loss=loss, objective=objective, **options)


def make_parser() -> LightningArgumentParser:
    """Return the parser of LightningCLI with the options of a run."""
    parser = LightningArgumentParser(exit_on_error=False)
    for name, (kind, default, text) in OPTIONS.items():
        parser.add_argument(f"--{name}", type=kind, default=default, help=text)
    parser.add_lightning_class_args(pl.Trainer, "trainer")
    parser.set_defaults({f"trainer.{name}": value for name, value in TRAINER_DEFAULTS.items()})
    parser.add_lightning_class_args(cascade, "model")
    parser.add_lightning_class_args(CascadeDataModule, "data", subclass_mode=True)
    parser.link_arguments("data.schema", "model.schema", apply_on="instantiate")
    return parser


def parse(
    parser: LightningArgumentParser, command: str, config: Mapping[str, Any], given: Mapping[str, Any]
) -> Namespace:
    """Return all options of a config in its long form with their types; raise one line on a mistake.

    `given` is the config as it was given; the message names the file in it that has the mistake.
    """
    try:
        return cast("Namespace", parser.parse_object(dict(config)))
    except argparse.ArgumentError as error:
        text = " ".join(str(error).split())
        denied = re.search(r"Importing '([\w.]+)' is not allowed, denied by", text)
        if denied:
            raise _denied(denied[1], config) from error
        unknown = re.fullmatch(r"(?:Group '(\S+)' does not accept o|O)ption '([\w.+-]+)'(?: is not accepted)?", text)
        if not unknown:
            message = plain_error(text)
            wrong = re.match(r"--([\w.]+): ", message)
            raise ValueError(message + (named_in(given, wrong[1]) if wrong else "")) from error
        option = ".".join(filter(None, unknown.groups()))
        close = likely(option, [*parser.get_defaults().keys(), "resume", *KEYS, "lr_scheduler"], config)
        where = named_in(given, option)
        raise ValueError(f"{command} has no option --{option}{where}; {close}--help_all lists them") from error


def likely(option: str, known: Sequence[str], config: Mapping[str, Any]) -> str:
    """Return a hint for an unknown option; the options of the loss and the data in `config` are known, too.

    Example:
        >>> likely("epochs", [], {}) + likely("lr", ["model.lr"], {}) + likely("model.lrr", ["model.lr"], {})
        'did you mean --trainer.max_epochs? did you mean --model.lr? did you mean --model.lr? '
    """
    parts = {"data": config.get("data"), "loss": (config.get("model") or {}).get("loss")}
    classes = {key: registry_of(key).resolve(part["class_path"]) for key, part in parts.items() if part}
    own = [f"{key}.{name}" for key, cls in classes.items() for name in options_of(cls)]
    name = option.replace("-", "_")
    same = [key for key in (*known, *own) if key.rpartition(".")[2] == name]
    close = ALIASES.get(name) or next(iter(same), None)
    return f"did you mean --{close}? " if close else suggest(f"--{option}", [f"--{key}" for key in known], "{}")


def as_yaml(parser: LightningArgumentParser, options: Namespace) -> str:
    """Return all options as YAML, unset ones too."""
    return str(parser.dump(options, "yaml", False))  # by position: the keyword's name depends on the version


def as_dict(parser: LightningArgumentParser, options: Namespace) -> dict[str, Any]:
    """Return all options as plain values."""
    return dict(yaml.safe_load(as_yaml(parser, options)))


def _denied(path: str, config: Mapping[str, Any]) -> ValueError:
    """Return the error for a class that jsonargparse may not import."""
    # Without a class_path, jsonargparse takes the base class of the option, which the config does not name.
    implied = what_to_trust(path) == path and not re.search(rf"\b{path.rpartition('.')[2]}\b", str(config))
    if implied:
        return ValueError(
            f"class_path is missing where a {path} is expected; write {{class_path: ..., init_args: {{...}}}}"
        )
    return UntrustedError(
        f"an option or a config names {path!r}, which a file may not name; nothing of it was imported. If you know the "
        f"package, add --trust {what_to_trust(path)}"
    )


def plain_error(message: str) -> str:
    """Return what is wrong with which option, without the parser's types, unions and namespaces.

    Example:
        >>> plain_error("Parser key 'x': Expected a <class 'float'>. Got value: fast".replace("'x'", '"model.lr"'))
        '--model.lr: expected float, got fast'
    """
    text = " ".join(message.split())
    keys = re.findall(r'Parser key "([\w.+-]+)"', text)
    option = re.sub(r"^model\.(loss|objective)\b", r"\1", ".".join(keys))
    union = re.search(r"Union subtypes.*?Errors: (.*?) Given value type: .*? Given value: (.*)$", text)
    items, given = [text], ""
    if union is not None:
        items, given = f" {union[1]}".split(" - "), re.split(" Given value| - Expected", union[2])[0]
    items = [re.sub(r"Problem with given class_path '[^']*': |Parser key \"[^\"]*\": ", "", item) for item in items]
    items = [item.strip() for item in items if item.strip() and "NoneType" not in item and not item.endswith("Errors:")]
    told = [item for item in items if not item.startswith("Expected a ") or "Got value" in item]
    if told or not items:
        text = re.sub(r"\.? Got value: ", ", got ", told[0] if told else text)
    else:
        text = f"{' or '.join(items).replace(' or Expected a ', ' or ')}, got {given}"
    text = re.sub(r"<class '(?:[\w.]+\.)?(\w+)'>", r"\1", text).replace("Expected a ", "expected ", 1)
    text = re.sub(r"(?:typing\.)?Literal\[([^],]*)\]", r"\1", text)
    text = re.sub(r"(?:typing\.)?Literal\[(.*?)\]", r"one of \1", text)
    text = text.replace("' or one of '", "', '")
    return f"--{option}: {text}" if option else text
