"""The config of a run: a plain dict, merged from packaged configs, files and options.

A config has the keys of LightningCLI (`model`, `data`, `trainer`, `seed_everything`, `ckpt_path`), the keys of a run
(`out`, `name`, `logger`, ...), and six short forms:

- `config`: a name, a file, a dict, or a list of them; merged in this order, and overridden by the other keys. If
  nothing names a data module, and `data.root` has lists or interactions, the packaged config of that name is the first;
- `trust`: packages whose classes the files may name (`recsys_topk.trust`);
- `loss`, `objective` and `lr_scheduler`: the same as `model.loss`, `model.objective` and `model.lr_scheduler`;
- `losses`: options by loss, ``{"lapsum": {"tau": 5}}``. Those of the loss that the merged config selects are used;
  options that are given for `loss` itself override them.

A loss, objective or data module is a registry name, a class name or a class path, or a dict with one of them as
`class_path` and its options next to it or in `init_args`.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from recsys_topk.options import options_of
from recsys_topk.registry import Registry, suggest
from recsys_topk.trust import class_path, from_file, reading
from recsys_topk.trust.documents import inspect_config, read_yaml, read_yaml_file
from recsys_topk.trust.source import UntrustedError
from recsys_topk.trust.typed import trusted_by

CONFIGS = "recsys_topk.runs.configs"
# Arguments of a class that are not options.
NO_OPTIONS = ("self", "loss", "stages")
KEYS = ("loss", "objective", "data")
SHORT = ("loss", "objective", "lr_scheduler")
TORCHREC = "recsys_topk.strategies.torchrec.TorchRecStrategy"
DROPPED = ("verbose", "return_predictions")  # in files of `validate`, `test` and `predict` of older versions
DEFAULTS = {"loss": "dftopk", "data": "recflow"}


def registry_of(key: str) -> Registry[Any]:
    """Return the registry of the classes that a key of a config may name; its module is imported on first use."""
    homes = {"loss": "losses.base", "objective": "cascades.objectives.base", "data": "datamodules.base"}
    table: Registry[Any] = importlib.import_module(f"recsys_topk.{homes[key]}").registry
    return table


def packaged_configs() -> list[str]:
    """Return the names of the packaged configs."""
    names = [entry.name.rpartition(".") for entry in resources.files(CONFIGS).iterdir()]
    return sorted(name for name, _, ending in names if ending == "yaml")


def read_config(name: str) -> dict[str, Any]:
    """Return the content of a config: a file, a packaged one by name, or YAML text."""
    source = f"config {name if len(name) < 40 else name[:40] + '...'!r}"
    if "\n" in name or ": " in name:
        content = read_yaml(name, source)
    elif Path(name).is_file():
        if Path(name).suffix in (".csv", ".tsv", ".parquet", ".feather"):
            raise ValueError(f"{name} is a table and no config; give it as --data.root {name}")
        content = read_yaml_file(Path(name))
    elif name in packaged_configs():
        content = read_yaml(resources.files(CONFIGS).joinpath(f"{name}.yaml").read_text(encoding="utf-8"), source)
    else:
        known = packaged_configs()
        raise FileNotFoundError(f"no config file {name!r}; {suggest(name, known)}packaged configs: {', '.join(known)}")
    content = {} if content is None else content
    if not isinstance(content, dict):
        raise ValueError(f"{source} must be a mapping of options, got {type(content).__name__}")
    for key in ("config", "trust"):
        if key in content:
            raise ValueError(f"{source} has the key {key!r}, which only the user can give; remove it")
    inspect_config(content, source)
    _check_shape(content, source)
    for key, value in flatten_config(content).items():
        if key in ("wandb.entity", "wandb.mode") and value not in (None, "offline", "disabled"):
            raise UntrustedError(
                f"{source} sets {key} to {value!r}, but a file cannot choose where data are sent; remove it, and give "
                f"--{key} or {key.upper().replace('.', '_')} if you want it"
            )
    return {key: value for key, value in content.items() if key not in DROPPED}


def typed_options(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a config that were typed or written in a program, without those of files that it names.

    Example:
        >>> typed_options({"config": ["simulated", {"logger": "wandb"}], "name": "a"})
        {'logger': 'wandb', 'name': 'a'}
    """
    merged: dict[str, Any] = {}
    for below in as_list(config.get("config")):
        merged = merge(merged, typed_options(below)) if isinstance(below, Mapping) else merged
    return merge(merged, {key: value for key, value in config.items() if key != "config"})


def _check_shape(content: Mapping[Any, Any], source: str) -> None:
    """Raise if a part of a config is not a mapping where `resolve` expects one."""
    kinds: dict[str, tuple[type, ...]] = dict.fromkeys(("model", "losses", "init_args"), (Mapping,))
    kinds |= dict.fromkeys((*KEYS, "trainer", "lr_scheduler"), (Mapping, str))
    losses = content.get("losses")
    inner = (content.get("model"), losses, content.get("trainer"))
    parts = [content, *(part for part in inner if isinstance(part, Mapping))]
    parts += [value for part in parts for key, value in part.items() if key in KEYS and isinstance(value, Mapping)]
    for part in parts:
        for key, value in part.items():
            expected = (Mapping,) if part is losses else kinds.get(key)
            if not isinstance(key, str):
                raise ValueError(f"{source}: the name of an option must be text, got {key!r}")
            if expected and value is not None and not isinstance(value, expected):
                named = " or a name" if str in expected else ""
                raise ValueError(f"{source}: {key} must be a mapping of options{named}, got {value!r:.40}")


def merge(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Return `below` overridden by `above`, dict by dict.

    A dict with another `class_path` replaces the dict below it, so that a class never gets the options of another one.
    A key that ends in ``+`` appends to the list below it.

    Example:
        >>> merge({"a": {"x": 1, "y": [2]}, "b": 3}, {"a": {"x": 4, "y+": 5}})
        {'a': {'x': 4, 'y': [2, 5]}, 'b': 3}
        >>> merge({"class_path": "A", "init_args": {"tau": 1}}, {"class_path": "B"})
        {'class_path': 'B'}
    """
    merged = dict(below)
    if "class_path" in below and above.get("class_path", below["class_path"]) != below["class_path"]:
        merged = {}
    for key, value in above.items():
        appends = isinstance(key, str) and key.endswith("+")
        before = merged.get(key[:-1] if appends else key)
        if appends:
            merged[key[:-1]] = [*as_list(before), *as_list(value)]
        elif isinstance(value, Mapping):
            merged[key] = merge(before if isinstance(before, Mapping) else {}, value)
        else:
            merged[key] = value
    return merged


def resolve(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config in its long form: configs merged, names replaced by class paths, names of options checked.

    Example:
        >>> resolve({"loss": "lapsum", "losses": {"lapsum": {"tau": 5}}})["model"]["loss"]
        {'class_path': 'recsys_topk.losses.LapSumLoss', 'init_args': {'tau': 5}}
    """
    if not from_file():  # called outside of `TrainingRun`, which knows the trusted packages
        with reading(trusted_by(config)):
            return resolve(config)
    by_loss: dict[type, dict[str, Any]] = {}
    merged: dict[str, Any] = {}
    for layer in _with_recipe(list(layers(config))):
        for name, options in (layer.pop("losses", None) or {}).items():
            by_loss.setdefault(registry_of("loss").resolve(name), {}).update(options)
        merged = merge(merged, _long_form(layer))
    model = merged.setdefault("model", {})
    for key in KEYS:
        holder = merged if key == "data" else model
        chosen = holder.get(key) or {}
        if not chosen and key not in DEFAULTS:
            continue
        named = chosen.get("class_path") or DEFAULTS.get(key) or _default_objective(model["loss"])
        cls = registry_of(key).resolve(named)
        given = {**(by_loss.get(cls, {}) if key == "loss" else {}), **chosen.get("init_args", {})}
        check_options(key, cls, given, config)
        holder[key] = {"class_path": class_path(cls), "init_args": given}
    if model.get("lr_scheduler") is not None:
        from recsys_topk.cascades.schedules import describe_schedule

        model["lr_scheduler"] = describe_schedule(model["lr_scheduler"])
    return merged


def named_in(config: Mapping[str, Any], option: str) -> str:
    """Return " (in FILE)" for the last config file that has an option; empty if it was typed, or no file has it."""
    typed = flatten_config({key: value for key, value in config.items() if key != "config"})
    found = ""
    for below in as_list(config.get("config")) if option not in typed else ():
        if isinstance(below, Mapping):
            found = named_in(below, option) or found
        elif any(f".{key}".endswith(f".{option}") for key in flatten_config(read_config(str(below)))):
            found = f" (in {below})"
    return found


def check_options(key: str, cls: type, given: Mapping[str, Any], config: Mapping[str, Any]) -> None:
    """Raise if a class does not have one of the given options of `config`; suggest the nearest one."""
    parameters = options_of(cls)
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return
    known = [name for name in parameters if name not in NO_OPTIONS]
    for option in given:
        if option not in known:
            close = suggest(option, known, f"--{key}.{{}}")
            raise ValueError(
                f"{cls.__name__} has no option {option!r} (--{key}.{option}){named_in(config, f'{key}.{option}')}; "
                f"{close}it has: {', '.join(known)}"
            )


def flatten_config(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return a config as a flat dict with dotted keys; the level of `init_args` is omitted.

    Example:
        >>> flatten_config({"loss": {"class_path": "dftopk", "init_args": {"tau": 1}}, "model": {"lr": 0.1}})
        {'loss': 'dftopk', 'loss.tau': 1, 'model.lr': 0.1}
    """
    flat: dict[str, Any] = {}
    for name, value in config.items():
        key = prefix if name in ("class_path", "init_args") and prefix else f"{prefix}.{name}".lstrip(".")
        if isinstance(value, Mapping) and value:
            flat |= flatten_config(value, key)
        elif not (name == "init_args" and prefix):
            flat[key] = value
    return flat


def set_option(config: dict[str, Any], key: str, value: Any) -> None:
    """Set the option with a dotted key; options of a class go to its `init_args`.

    Example:
        >>> config = {"loss": "dftopk"}
        >>> set_option(config, "loss.tau", 2)
        >>> config
        {'loss': {'class_path': 'dftopk', 'init_args': {'tau': 2}}}
    """
    name, _, rest = key.partition(".")
    before = config.get(name)
    if rest:
        name = f"{name}+" if before is None and f"{name}+" in config else name
        current = config.get(name)
        last = current[-1] if isinstance(current, list) else current
        inner: Any = {"class_path": last, "init_args": {}} if isinstance(last, str) else last or {}
        config[name] = [*current[:-1], inner] if isinstance(current, list) else inner
        set_option(inner.get("init_args", inner), rest, value)
    elif name.endswith("+"):
        config[name] = [*config.get(name, []), value]
    elif isinstance(before, dict) and isinstance(value, str):
        config[name] = {"class_path": value, "init_args": before.get("init_args", before)}
    else:
        config[name] = value


def as_options(config: Mapping[str, Any]) -> list[str]:
    """Return a config as command-line options.

    Example:
        >>> as_options({"config": "simulated", "loss": {"class_path": "dftopk", "tau": 9}})
        ['--config', 'simulated', '--loss', 'dftopk', '--loss.tau', '9']
    """
    return [
        part
        for key, value in flatten_config(config).items()
        for one in as_list(value)
        for part in (f"--{key}", str(one))
    ]


def as_list(value: Any) -> list[Any]:
    """Return a list as it is, None as an empty list, and any other value as a list with one element."""
    return [] if value is None else list(value) if isinstance(value, (list, tuple)) else [value]


def layers(config: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the layers of a config, lowest first: the configs that it names, then its other keys."""
    for below in as_list(config.get("config")):
        if isinstance(below, Mapping):
            yield from layers(below)
        elif isinstance(below, (str, Path)):
            yield read_config(str(below))
        else:
            raise ValueError(f"config must be a name, a file, a mapping or a list of them, got {below!r:.40}")
    layer = {key: value for key, value in config.items() if key not in ("config", "trust")}
    _check_shape(layer, "the config")
    yield layer


def _with_recipe(given: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return layers above the packaged config for the files at `data.root`, if no layer names the data module."""
    parts = [layer["data"] for layer in given if layer.get("data")]
    if not parts or any(isinstance(part, str) or part.get("class_path") for part in parts):
        return given
    options = {name: value for part in parts for name, value in {**part, **(part.get("init_args") or {})}.items()}
    if options.get("root") is None:
        return given
    from recsys_topk.runs.data_kind import guess_kind

    kind = guess_kind(options["root"], options)
    return given if kind is None else [read_config(kind), *given]


def _long_form(layer: Mapping[str, Any]) -> dict[str, Any]:
    """Return a layer with its short forms moved to `model`, and every class as `class_path` and `init_args`."""
    short = {key: layer[key] for key in SHORT if layer.get(key) is not None}
    long = {key: value for key, value in layer.items() if key not in SHORT}
    if short or long.get("model"):
        from recsys_topk.cascades.upgrade import upgrade

        long["model"] = upgrade({**(long.get("model") or {}), **short})
    trainer = long.get("trainer")
    if isinstance(trainer, Mapping) and isinstance(trainer.get("strategy"), Mapping):
        strategy = dict(trainer["strategy"])
        if strategy.get("class_path") == "torchrec":  # Lightning's parser accepts class names only
            long["trainer"] = {**trainer, "strategy": {**strategy, "class_path": TORCHREC}}
    for key in (*KEYS, "lr_scheduler"):
        holder = long if key == "data" else long.get("model", {})
        part = holder.get(key)
        if part is None:
            continue
        part = {"class_path": part} if isinstance(part, str) else dict(part)
        name, options = part.pop("class_path", None), {**(part.pop("init_args", None) or {}), **part}
        if key == "data" and "world" in options:
            from recsys_topk.datamodules.simulator.world import world_options

            options["world"] = world_options(options["world"])
        holder[key] = {"init_args": options}
        if name is not None and key == "lr_scheduler":
            holder[key]["class_path"] = str(name).removeprefix("torch.optim.lr_scheduler.")
        elif name is not None:
            holder[key]["class_path"] = class_path(registry_of(key).resolve(str(name)))
    return long


def _default_objective(loss: Mapping[str, Any]) -> str:
    """Return the objective that a module takes for a loss if none is named."""
    from recsys_topk.cascades.objectives.base import default_objective
    from recsys_topk.losses.base import registry as losses

    return default_objective(losses.resolve(loss["class_path"])())
