"""The options of evaluation over the whole catalogue: `--corpus`, `--corpus.k 10,20`, `--index DIR`, ..."""

from __future__ import annotations

from typing import Any

from recsys_topk.registry import suggest

# Name after `--corpus.` -> option of `CorpusMetrics`.
OPTIONS = {"k": "cuts", "stage": "alone"}


def take_corpus_options(command: str, config: dict[str, Any]) -> dict[str, Any] | None:
    """Remove the options of `CorpusMetrics` from parsed options and return them; None without `--corpus`.

    Example:
        >>> config = {"corpus": {"class_path": "true", "init_args": {"k": "10,20"}}, "out": "runs"}
        >>> take_corpus_options("test", config), config
        ({'cuts': [10, 20]}, {'out': 'runs'})
    """
    found: dict[str, Any] = {name: config.pop(name) for name in ("corpus", "index", "export") if name in config}
    asked = found.pop("corpus", None)
    wanted, typed = (asked, {}) if not isinstance(asked, dict) else (asked.get("class_path", "true"), asked)
    first = "corpus" if wanted else next(iter(found), None)
    if first is None or wanted == "false":
        return None
    if command not in ("test", "validate"):
        raise ValueError(f"--{first} goes with test and validate; {command} does not evaluate over the catalogue")
    if first != "corpus":
        raise ValueError(f"--{first} goes with --corpus: recsys-topk {command} --corpus --index DIR")
    if "export" in found and "index" not in found:
        raise ValueError("--export names the export of an index; give --index DIR too")
    options = dict(found)
    for name, text in typed.get("init_args", typed).items():
        if name not in OPTIONS:
            known = ["--corpus", *(f"--corpus.{one}" for one in OPTIONS)]
            close = suggest(f"--corpus.{name}", known, "{}")
            raise ValueError(f"{command} has no option --corpus.{name}; {close}it has {', '.join(known)}")
        parts = [part.strip() for part in str(text).strip("[]").split(",")]
        if name == "k" and not all(part.isdigit() for part in parts):
            raise ValueError(f"--corpus.k takes numbers such as 10,20, got {text!r}")
        options[OPTIONS[name]] = [int(part) for part in parts] if name == "k" else parts
    return options
