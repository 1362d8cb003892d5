"""From what people type to what LightningCLI reads: short options, registry names, packaged configs, checkpoints.

`--loss dftopk --loss.tau 1` becomes `--model.loss recsys_topk.losses.dftopk.DFTopKLoss --model.loss.tau 1`, and the
same in YAML (`loss: dftopk`). What is parsed, saved and stored in checkpoints is then always the plain class path.

A config may hold options for losses that are chosen by name, `losses: {lapsum: {tau: 5}}`, so that `--loss lapsum` on
top of it gets them; what is typed overrides them.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import yaml

from recsys_topk.registry import Registry, nearest
from recsys_topk.runs.documents import CONFIG_SUFFIXES, inspect_config, read_yaml, read_yaml_file
from recsys_topk.runs.own_runs import recall
from recsys_topk.trust import TEXT_KEYS, names_of_typed, reading

CONFIGS = "recsys_topk.runs.configs"
# Arguments of an objective that the module gives.
GIVEN = ("loss", "stages")

# RecFlow's labels are places in a ranking (29..20 for the best group), not grades: an exponential gain or a softmax
# over them would see the first item only.
FOR_RECFLOW_LABELS: dict[str, dict[str, Any]] = {
    "approx_ndcg": {"gain": "linear"},
    "lambdaloss": {"gain": "linear"},
    "lambdarank": {"gain": "linear"},
    "listnet": {"target": "normalised"},
}


def registries() -> dict[str, Registry[Any]]:
    """Return the tables whose names may stand on the command line, by the option that takes them."""
    from recsys_topk.cascades.objectives.base import registry as objectives
    from recsys_topk.losses.base import registry as losses

    return {"loss": losses, "objective": objectives}


def packaged_configs() -> list[str]:
    """Return the names of the configs that come with the package."""
    return sorted(
        entry.name[: -len(".yaml")] for entry in resources.files(CONFIGS).iterdir() if entry.name.endswith(".yaml")
    )


def rewrite(arguments: Sequence[str]) -> list[str]:
    """Return the arguments of a training command in the form that LightningCLI reads.

    Example:
        >>> rewrite(["fit", "--loss.tau", "2", "--loss=dftopk"])
        ['fit', '--model.loss=recsys_topk.losses.dftopk.DFTopKLoss', '--model.loss.tau', '2']
    """
    with reading(trusted_by(arguments)):
        for option, value in _typed(arguments):
            key = _key(option)
            if _is_file(value) and key not in (*TEXT_KEYS, "config", "c"):  # the path of a config for one option
                inspect_config({key: value}, option)
        return _rewrite(without_option(arguments, "--trust"))


def trusted_by(arguments: Sequence[str]) -> tuple[str, ...]:
    """Return what the user trusts by typing these arguments: `--trust`, and the packages of classes that are named.

    What a file names is not typed; a file in the directory of a run that the user started keeps that run's trust.

    Example:
        >>> trusted_by(["fit", "--loss", "mine.MyLoss", "--trust", "theirs", "--out", "runs.old", "--config", "a.yaml"])
        ('mine', 'theirs')
    """
    found: list[str] = []
    for option, value in _typed(arguments):
        key = _key(option)
        if option == "--trust":
            found += filter(None, value.split(","))
        elif option in ("-c", "--config", "--ckpt_path"):
            found += recall(value) if _is_file(value) else ()
        elif key not in (*TEXT_KEYS, "resume") and not _is_file(value):
            found += _typed_names(value)
    return tuple(dict.fromkeys(found))


def _key(option: str) -> str:
    return option.lstrip("-").rstrip("+").rpartition(".")[2]


def _typed(arguments: Sequence[str]) -> list[tuple[str, str]]:
    """Return the options with their values, empty for an option that has none."""
    found = []
    for position, argument in enumerate(arguments):
        if argument.startswith("-"):
            option, equals, value = argument.partition("=")
            following = arguments[position + 1] if not equals and position + 1 < len(arguments) else ""
            found.append((option, value if equals or following.startswith("--") else following))
    return found


def _is_file(value: str) -> bool:
    if value.endswith(CONFIG_SUFFIXES):
        return True
    return 0 < len(value) < 1024 and "\n" not in value and "\0" not in value and Path(value).is_file()


def _typed_names(value: str) -> list[str]:
    try:
        content = read_yaml(value, "an option")
    except ValueError:
        return []
    waiting: list[Any] = [content]
    found: list[str] = []
    while waiting:
        part = waiting.pop()
        if isinstance(part, str):
            found += names_of_typed(part)
        elif isinstance(part, (dict, list)):
            waiting += part.values() if isinstance(part, dict) else part
    return found


def _rewrite(arguments: Sequence[str]) -> list[str]:
    tables = registries()
    command, rest = list(arguments[:1]), list(arguments[1:])
    classes: list[str] = []
    chosen: dict[str, type] = {}
    others: list[str] = []
    configs: list[dict[str, Any]] = []
    by_loss = {name: dict(options) for name, options in FOR_RECFLOW_LABELS.items()}
    position = 0
    while position < len(rest):
        option, equals, value = rest[position].partition("=")
        following = rest[position + 1] if not equals and position + 1 < len(rest) else ""
        short = option[2:].split(".")[0] if option.startswith("--") else ""
        if option == f"--{short}" and short in tables:
            cls = chosen[short] = _named(tables[short], value if equals else following)
            position += 1 if equals else 2
            classes.append(f"--model.{short}={_path(cls)}")
            if short == "loss":
                classes += [f"--model.loss.{key}={given}" for key, given in by_loss.get(cls.name, {}).items()]
        elif short in tables:
            others.append(f"--model.{rest[position][2:]}")
            position += 1
        elif option in ("-c", "--config"):
            content = read_config(value if equals else following)
            position += 1 if equals else 2
            for name, options in (content.pop("losses", None) or {}).items():
                tables["loss"].resolve(name)
                by_loss.setdefault(name, {}).update(options)
            configs.append(resolve_names(content, tables, by_loss))
        else:
            others.append(rest[position])
            position += 1
    for short in tables:
        typed = [argument.partition("=")[2] for argument in classes if argument.startswith(f"--model.{short}=")]
        keep_last_class(configs, short, typed[-1] if typed else None)
    for short, cls in chosen.items():
        check_options(short, cls, others)
    # A class must be named before its options, and a file is overridden by what is typed.
    return [*command, *(f"--config={dump(content)}" for content in configs), *classes, *others]


def check_options(short: str, cls: type, arguments: Sequence[str]) -> None:
    """Raise if an option of a class that was named is not one of its own, with the nearest one that is.

    Args:
        short: ``"loss"`` or ``"objective"``.
        cls: The class.
        arguments: Rewritten arguments.
    """
    parameters = inspect.signature(cls).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return
    known = [parameter.name for parameter in parameters if parameter.name not in GIVEN]
    head = f"--model.{short}."
    for argument in arguments:
        option = argument.removeprefix(head).partition("=")[0].split(".")[0]
        if argument.startswith(head) and option not in (*known, "help", "class_path", "init_args"):
            close = nearest(option, known)
            hint = f"did you mean --{short}.{close}? " if close else ""
            raise ValueError(
                f"{cls.__name__} has no option {option!r} (--{short}.{option}); {hint}it has: {', '.join(known)}"
            )


def keep_last_class(configs: Sequence[dict[str, Any]], short: str, typed: str | None) -> None:
    """Remove `model.loss` (or objective) from configs that name another class than the one that counts in the end.

    The parser would hand the options of the first class on to the last wherever both have one of that name: the
    temperature of a config's DFTopK to a SigmoidTopKLoss that is asked for on the command line.
    """
    last = typed
    for content in reversed(configs):
        given = (content.get("model") or {}).get(short)
        if not isinstance(given, dict) or "class_path" not in given:
            continue
        if last is None:
            last = given["class_path"]
        elif given["class_path"] != last:
            del content["model"][short]


def _named(table: Registry[Any], name: str) -> Any:
    if not name:
        raise ValueError(f"--{table.kind} needs a name; available: {', '.join(table.available())}")
    return table.resolve(name)


def _path(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def read_config(name: str) -> dict[str, Any]:
    """Return the content of a config: a file, a packaged one by name, or YAML text."""
    path = Path(name)
    if "\n" in name or ": " in name:
        source = f"the config {name[:40]!r}..." if len(name) > 40 else f"the config {name!r}"
        content = read_yaml(name, source)
    elif path.is_file():
        source = f"config {name!r}"
        content = read_yaml_file(path)
    elif name in packaged_configs():
        source = f"config {name!r}"
        content = read_yaml(resources.files(CONFIGS).joinpath(f"{name}.yaml").read_text(encoding="utf-8"), source)
    else:
        close = nearest(name, packaged_configs())
        hint = f"did you mean {close!r}? " if close else ""
        raise FileNotFoundError(f"no config file {name!r}; {hint}packaged configs: {', '.join(packaged_configs())}")
    content = {} if content is None else content
    if not isinstance(content, dict):
        raise ValueError(f"{source} must be a mapping of options, got {type(content).__name__}")
    inspect_config(content, source)
    return content


def resolve_names(
    content: dict[str, Any], tables: Mapping[str, Registry[Any]], by_loss: Mapping[str, Mapping[str, Any]]
) -> dict[str, Any]:
    """Move `loss` and `objective` below `model`, replace names by class paths, and add the options for the loss."""
    from recsys_topk.cascades.upgrade import upgrade

    resolved = dict(content)
    model = upgrade(resolved.get("model") or {})
    for short, table in tables.items():
        given = resolved.pop(short, None) or model.get(short)
        if isinstance(given, str):
            given = {"class_path": given}
        if isinstance(given, dict) and "class_path" in given:
            cls = _named(table, str(given["class_path"]))
            options = {**(by_loss.get(cls.name, {}) if short == "loss" else {}), **(given.get("init_args") or {})}
            model[short] = {"class_path": _path(cls), **({"init_args": options} if options else {})}
    if model:
        resolved["model"] = model
    return resolved


def read_checkpoint(path: str) -> dict[str, Any]:
    """Return the content of a checkpoint that `recsys-topk fit` wrote, its tensors mapped, not read."""
    import pickle

    import torch

    if not Path(path).is_file():
        raise FileNotFoundError(f"no checkpoint {path!r}; give the path of a .ckpt file written by `recsys-topk fit`")
    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (RuntimeError, EOFError, OSError, ValueError, KeyError, pickle.UnpicklingError) as error:
        raise ValueError(
            f"{path!r} cannot be read: it is damaged, or no checkpoint ({type(error).__name__}); take another, e.g. "
            f"best.ckpt beside it"
        ) from error
    if not isinstance(content, dict) or "stages" not in (content.get("hyper_parameters") or {}):
        raise ValueError(f"{path!r} was not written by `recsys-topk fit`: it describes no cascade")
    return content


def describe_checkpoint(path: str, content: Mapping[str, Any]) -> list[str]:
    """Return lines saying what a checkpoint restores."""
    model = content["hyper_parameters"]
    data = content.get("datamodule_hyper_parameters") or {}
    stages = ", ".join(f"{stage['name']} ({stage['kind']}, {stage['quota']})" for stage in model["stages"])
    lines = [
        f"restored from {path}:",
        f"  loss       {_short(model['loss'])}",
        f"  objective  {_short(model['objective'])}",
        f"  stages     {stages}",
    ]
    if data:
        shown = ", ".join(f"{name}={value}" for name, value in data.items() if isinstance(value, (int, str, float)))
        lines.append(f"  data       {shown}")
    return lines


def from_checkpoint(path: str) -> tuple[str, list[str]]:
    """Return the config that a checkpoint was trained with, and lines saying what is restored.

    It goes before everything else on the command line, so that whatever is typed overrides it.
    """
    from recsys_topk.datamodules import data_spec

    content = read_checkpoint(path)
    model = {name: value for name, value in content["hyper_parameters"].items() if name != "schema"}
    saved = content.get("datamodule_hyper_parameters") or {}
    inspect_config({"model": content["hyper_parameters"], "data": saved}, f"checkpoint {path!r}")
    data = data_spec(saved)["init_args"]
    return dump({"model": model, **({"data": data} if data else {})}), describe_checkpoint(path, content)


def _short(spec: Mapping[str, Any]) -> str:
    left_out = ("positive_above", "reduction", "validate")  # the framework's business
    given = {name: value for name, value in spec["init_args"].items() if name not in left_out and value is not None}
    arguments = ", ".join(f"{name}={value}" for name, value in given.items())
    return f"{str(spec['class_path']).rpartition('.')[2]}({arguments})"


def dump(content: Mapping[str, Any]) -> str:
    """Return a config as YAML text that cannot be mistaken for a file name."""
    return "\n" + yaml.safe_dump(dict(content), sort_keys=False)


def option_value(arguments: Sequence[str], option: str) -> str | None:
    """Return the value given to `option`, as `--option value` or `--option=value`, or None."""
    for position, argument in enumerate(arguments):
        if argument == option and position + 1 < len(arguments):
            return arguments[position + 1]
        if argument.startswith(f"{option}="):
            return argument.partition("=")[2]
    return None


def without_option(arguments: Sequence[str], option: str) -> list[str]:
    """Return the arguments without `option` and its value.

    Example:
        >>> without_option(["--a", "1", "--b=2", "--c"], "--a"), without_option(["--a", "1", "--b=2"], "--b")
        (['--b=2', '--c'], ['--a', '1'])
    """
    kept: list[str] = []
    skip = False
    for argument in arguments:
        if skip:
            skip = False
        elif argument == option:
            skip = True
        elif not argument.startswith(f"{option}="):
            kept.append(argument)
    return kept
