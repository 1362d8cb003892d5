"""`recsys-topk losses`: the losses and operators there are, those of installed plug-ins included."""

from __future__ import annotations

import argparse
import inspect
import json
from collections.abc import Sequence

from recsys_topk.cli.console import echo
from recsys_topk.losses.base import RankingLoss
from recsys_topk.losses.base import registry as losses
from recsys_topk.operators.base import TopKOperator
from recsys_topk.operators.base import registry as operators
from recsys_topk.runs.text import table


def loss_row(name: str, cls: type[RankingLoss]) -> dict[str, object]:
    """Return what the table says about a loss; what only a top-k loss has is None for the others."""
    operator = operators.classes().get(name) if cls.family == "top-k" else None
    return {
        "name": name,
        "class": cls.__name__,
        "family": cls.family,
        "labels": cls.label_kind,
        "cost": cls.cost,
        "needs k": _yes(cls.requires_k),
        "sums to k": None if operator is None else _yes(operator.sums_to_k),
        "paper": cls.paper,
        "options": options(cls),
    }


def operator_row(name: str, cls: type[TopKOperator]) -> dict[str, object]:
    """Return what the table says about an operator: its cost and what it declares."""
    return {
        "name": name,
        "class": cls.__name__,
        "cost": cls.cost,
        "sums to k": _yes(cls.sums_to_k),
        "equivariant": _yes(cls.equivariant),
        "tie fair": _yes(cls.tie_fair),
        "deterministic": _yes(cls.deterministic),
        "exact gradient": _yes(cls.exact_gradient),
        "paper": cls.paper,
        "options": options(cls),
    }


def options(cls: type) -> dict[str, object]:
    """Return the constructor's arguments with their defaults, as the command line takes them."""
    found = inspect.signature(cls).parameters.values()
    return {p.name: None if p.default is inspect.Parameter.empty else p.default for p in found}


def _yes(fact: bool) -> str:
    return "yes" if fact else "no"


def main(argv: Sequence[str]) -> int:
    """Print the table; return the exit status."""
    parser = argparse.ArgumentParser(prog="recsys-topk losses", description="List the losses and operators.")
    parser.add_argument("--operators", action="store_true", help="the top-k operators instead of the losses")
    parser.add_argument("--json", action="store_true", help="as JSON, with the options of each")
    arguments = parser.parse_args(list(argv))
    if arguments.operators:
        rows = [operator_row(name, cls) for name, cls in operators.classes().items()]
    else:
        rows = [loss_row(name, cls) for name, cls in losses.classes().items()]
    if arguments.json:
        echo(json.dumps(rows, indent=1))
    else:
        echo(table(rows, [column for column in rows[0] if column not in ("class", "options")]))
    return 0
