"""`--corpus`, `--corpus.k 10,20`, `--index DIR`, ...: evaluation over the whole catalogue, as it is typed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from recsys_topk.registry import suggest

OPTIONS = ("--corpus", "--corpus.k", "--corpus.stage")
WITH_INDEX = ("--index", "--export")


def split_corpus_options(command: str, arguments: Sequence[str]) -> tuple[list[str], dict[str, Any] | None]:
    """Return the other arguments, and the options of `CorpusMetrics`; None if it is not asked for.

    Example:
        >>> split_corpus_options("test", ["--corpus", "--corpus.k", "10,20", "--out", "runs"])
        (['--out', 'runs'], {'cuts': [10, 20]})
    """
    rest, found, wanted = list(arguments), [], {}
    others: list[str] = []
    while rest:
        option, equals, value = rest.pop(0).partition("=")
        if option.startswith("--corpus") or option in WITH_INDEX:
            if option not in (*OPTIONS, *WITH_INDEX):
                raise ValueError(
                    f"{command} has no option {option}; {suggest(option, OPTIONS, '{}')}it has {', '.join(OPTIONS)}"
                )
            if not equals and (option != "--corpus" or (rest and rest[0] in ("true", "false"))):
                value = rest.pop(0) if rest else ""
            found.append(option)
            wanted[option] = value
        else:
            others.append(f"{option}{equals}{value}")
    if not found or wanted.get("--corpus") == "false":
        return others, None
    if command not in ("test", "validate"):
        raise ValueError(f"{found[0]} goes with test and validate; {command} does not evaluate over the catalogue")
    if not any(option.startswith("--corpus") for option in found):
        raise ValueError(f"{found[0]} goes with --corpus: recsys-topk {command} --corpus --index DIR")
    if "--export" in wanted and "--index" not in wanted:
        raise ValueError("--export says what an index was built for; give --index DIR too")
    options: dict[str, Any] = {}
    if "--corpus.k" in wanted:
        cuts = [part.strip() for part in wanted["--corpus.k"].strip("[]").split(",")]
        if not all(part.isdigit() for part in cuts):
            raise ValueError(f"--corpus.k takes numbers such as 10,20, got {wanted['--corpus.k']!r}")
        options["cuts"] = [int(part) for part in cuts]
    if "--corpus.stage" in wanted:
        options["alone"] = [part.strip() for part in wanted["--corpus.stage"].strip("[]").split(",")]
    for option in WITH_INDEX:
        if option in wanted:
            if not wanted[option]:
                raise ValueError(f"{option} takes a folder")
            options[option.removeprefix("--")] = wanted[option]
    return others, options
