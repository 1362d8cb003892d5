"""The options of evaluation over the whole catalogue: `--corpus`, `--corpus.k 10,20`, `--baselines als`, ..."""

from __future__ import annotations

from typing import Any

import yaml

from recsys_topk.registry import suggest

# Name after `--corpus.` -> option of `CorpusMetrics`.
OPTIONS = {"k": "cuts", "stage": "alone", "slices": "slices", "short": "short", "diversity": "diversity"}
NUMBERS = ("k", "short")


def take_corpus_options(command: str, config: dict[str, Any]) -> dict[str, Any] | None:
    """Remove the options of `CorpusMetrics` from parsed options and return them; None without `--corpus`.

    Example:
        >>> config = {"corpus": {"class_path": "true", "init_args": {"k": "10,20"}}, "out": "runs"}
        >>> take_corpus_options("test", config), config
        ({'cuts': [10, 20]}, {'out': 'runs'})
        >>> take_corpus_options("test", {"corpus": "true", "baselines": "popularity,als"})
        {'baselines': {'popularity': {}, 'als': {}}}
    """
    options: dict[str, Any] = {name: config.pop(name) for name in ("corpus", "index", "export") if name in config}
    if str(config.get("baselines", "true")).lower() not in ("true", "false"):  # names, not the switch of all runs
        options["baselines"] = _baselines(config.pop("baselines"))
    corpus = options.pop("corpus", None)
    wanted, typed = (corpus, {}) if not isinstance(corpus, dict) else (corpus.get("class_path", "true"), corpus)
    first = "corpus" if wanted else next(iter(options), None)
    if first is None or wanted == "false":
        return None
    if command not in ("test", "validate"):
        raise ValueError(f"--{first} goes with test and validate; {command} does not evaluate over the catalogue")
    if first != "corpus":
        example = "--baselines popularity,als" if first == "baselines" else "--index DIR"
        raise ValueError(f"--{first} goes with --corpus: recsys-topk {command} --corpus {example}")
    if "export" in options and "index" not in options:
        raise ValueError("--export names the export of an index; give --index DIR too")
    for name, text in typed.get("init_args", typed).items():
        if name not in OPTIONS:
            known = ["--corpus", *(f"--corpus.{one}" for one in OPTIONS)]
            close = suggest(f"--corpus.{name}", known, "{}")
            raise ValueError(f"{command} has no option --corpus.{name}; {close}it has {', '.join(known)}")
        parts = [part.strip() for part in str(text).strip("[]").split(",")]
        if name in NUMBERS and not all(part.isdigit() for part in parts):
            example = "numbers such as 10,20" if name == "k" else "a number such as 10"
            raise ValueError(f"--corpus.{name} takes {example}, got {text!r}")
        values: list[Any] = [int(part) for part in parts] if name in NUMBERS else parts
        options[OPTIONS[name]] = values[0] if name == "short" else values
    return options


def _baselines(chosen: Any) -> dict[str, dict[str, Any]]:
    """Return the options of each baseline: `--baselines popularity,als --baselines.als.factors 32`."""
    names = chosen.get("class_path", "") if isinstance(chosen, dict) else chosen
    baselines: dict[str, dict[str, Any]] = {
        name.strip(): {} for name in str(names).strip("[]").split(",") if name.strip()
    }
    typed = chosen.get("init_args", chosen) if isinstance(chosen, dict) else {}
    for name, options in typed.items():
        if name not in baselines or not isinstance(options, dict):
            example = "--baselines popularity,als --baselines.als.factors 32"
            raise ValueError(f"--baselines.{name} is an option of no baseline that is measured: {example}")
        baselines[name] = {key: yaml.safe_load(str(value)) for key, value in options.items()}
    return baselines
