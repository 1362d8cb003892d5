"""The search space of a tuning: options of `fit` and the values that they may take."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

from recsys_topk.registry import suggest
from recsys_topk.trust.documents import read_yaml, read_yaml_file

Kind: TypeAlias = Literal["log", "float", "int", "logint", "choice"]
KINDS: tuple[Kind, ...] = ("log", "float", "int", "logint", "choice")
FORMS = "log(1e-4,1e-2), float(0,1), int(1,5), logint(8,512) or choice(a,b,c)"


@dataclass(frozen=True)
class Dimension:
    """The values of one option.

    Attributes:
        kind: ``log`` and ``float`` are uniform in the logarithm and in the value, ``int`` and ``logint`` the same for
            integers, ``choice`` is one of several values.
        values: The lower and the upper bound (inclusive), or the choices.

    Example:
        >>> Dimension.parse("model.lr", "log(1e-4, 1e-2)")
        Dimension(kind='log', values=(0.0001, 0.01))
        >>> Dimension.parse("data.batch_size", [256, 1024])
        Dimension(kind='choice', values=(256, 1024))
    """

    kind: Kind
    values: tuple[Any, ...]

    @classmethod
    def parse(cls, option: str, given: Any) -> Dimension:
        """Return the dimension of an option, from text such as ``log(1e-4,1e-2)`` or a list of choices."""
        if isinstance(given, Sequence) and not isinstance(given, str):
            return cls._checked(option, "choice", list(given))
        parts = re.fullmatch(r"\s*(\w+)\s*\((.*)\)\s*", str(given), re.DOTALL)
        if not parts:
            raise ValueError(f"the space of {option} must be {FORMS}, got {given!r}")
        kind, values = parts[1], read_yaml(f"[{parts[2]}]", f"the space of {option}")
        if kind not in KINDS:
            raise ValueError(f"the space of {option}: unknown {kind!r}; {suggest(kind, KINDS)}give {FORMS}")
        return cls._checked(option, kind, [_number(value) for value in values])

    @classmethod
    def _checked(cls, option: str, kind: Kind, values: list[Any]) -> Dimension:
        if kind == "choice":
            if not values:
                raise ValueError(f"the space of {option} has no choices")
            return cls(kind, tuple(values))
        number = int if kind.endswith("int") else (int, float)
        if len(values) != 2 or not all(isinstance(value, number) for value in values) or not values[0] < values[1]:
            raise ValueError(f"the space of {option} must be {kind}(LOW,HIGH) with LOW below HIGH, got {values}")
        if kind.startswith("log") and values[0] <= 0:
            raise ValueError(f"the space of {option}: the lower bound of {kind} must be above 0, got {values[0]}")
        return cls(kind, tuple(values))

    def draw(self, trial: Any, option: str) -> Any:
        """Return the value of an option in an Optuna trial; the trial draws it if it has none yet."""
        if self.kind == "choice":  # Optuna stores numbers and text only
            texts = [json.dumps(value) for value in self.values]
            return json.loads(trial.suggest_categorical(option, texts))
        suggest_value = trial.suggest_int if self.kind.endswith("int") else trial.suggest_float
        return suggest_value(option, *self.values, log=self.kind.startswith("log"))


Space: TypeAlias = dict[str, Dimension]


def parse_spaces(given: Sequence[str | Mapping[str, Any]], labels: Sequence[str]) -> dict[str, Space]:
    """Return the search space of each competitor.

    A space is given as text ``OPTION=VALUES`` or ``LABEL:OPTION=VALUES``, as a YAML file, or as a mapping of the same
    form as a file: values by option, and under ``variants`` further ones by competitor. Later ones replace earlier
    ones.

    Example:
        >>> spaces = parse_spaces(["model.lr=log(1e-4,1e-2)", "b:loss.tau=float(1,2)"], ["a", "b"])
        >>> list(spaces["a"]), list(spaces["b"])
        (['model.lr'], ['model.lr', 'loss.tau'])
    """
    spaces: dict[str, Space] = {label: {} for label in labels}

    def add(label: str | None, values: Mapping[str, Any]) -> None:
        if label is not None and label not in spaces:
            raise ValueError(f"--space: no competitor {label!r}; {suggest(label, labels)}there are {', '.join(labels)}")
        for option, text in values.items():
            for name in labels if label is None else [label]:
                spaces[name][str(option)] = Dimension.parse(str(option), text)

    for one in given:
        if isinstance(one, str) and "=" in one:
            key, _, text = one.partition("=")
            label, colon, option = key.rpartition(":")
            add(label if colon else None, {option: text})
            continue
        if isinstance(one, str) and not Path(one).is_file():
            raise ValueError(f"--space must be OPTION=VALUES or a YAML file, got {one!r}; e.g. model.lr=log(1e-4,1e-2)")
        content = read_yaml_file(Path(one)) if isinstance(one, str) else one
        variants = content.get("variants", {}) if isinstance(content, Mapping) else None
        if not isinstance(variants, Mapping) or not all(isinstance(part, Mapping) for part in variants.values()):
            raise ValueError(
                f"--space {one!r:.80} must be a mapping of options to values, e.g. model.lr: log(1e-4,1e-2)"
            )
        add(None, {key: value for key, value in content.items() if key != "variants"})
        for label, part in variants.items():
            add(str(label), part)
    empty = next((label for label in labels if not spaces[label]), None)
    if empty is not None:
        raise ValueError(f"there is nothing to tune for {empty!r}; give --space, e.g. 'model.lr=log(1e-4,1e-2)'")
    return spaces


def as_text(space: Space) -> dict[str, str]:
    """Return a space as text by option; equal spaces have equal texts."""
    return {option: f"{one.kind}{json.dumps(one.values)}" for option, one in sorted(space.items())}


def draw(study: Any, trial: Any, space: Space, seed: int) -> dict[str, Any]:
    """Return the options of an Optuna trial; values that it already has are kept.

    The random generator of each value depends only on `seed`, the number of the trial and the option, so that the
    values do not depend on whether the process was killed and started again.
    """
    from optuna.samplers import TPESampler

    options = {}
    for option, dimension in space.items():
        digest = hashlib.blake2b(f"{seed}/{trial.number}/{option}".encode(), digest_size=4).digest()
        study.sampler = TPESampler(seed=int.from_bytes(digest, "little"), n_startup_trials=8, multivariate=False)
        options[option] = dimension.draw(trial, option)
    return options


def _number(value: Any) -> Any:
    """Return text such as ``1e-4``, which YAML does not read as a number, as a number."""
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value
