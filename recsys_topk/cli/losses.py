"""List the losses and operators, those of installed plug-ins included."""

from __future__ import annotations

import inspect
import json
from collections.abc import Sequence

from recsys_topk.cli.console import echo, make_parser
from recsys_topk.losses.base import registry as losses
from recsys_topk.operators.base import registry as operators
from recsys_topk.options import options_of
from recsys_topk.text import table

LOSS_FACTS = ("family", "label_kind", "cost", "requires_k", "takes_item_weights", "sums_to_k", "paper")
OPERATOR_FACTS = ("cost", "sums_to_k", "equivariant", "tie_fair", "deterministic", "exact_gradient", "paper")
COLUMNS = {"label_kind": "labels", "requires_k": "needs k", "takes_item_weights": "item weights"}


def row(name: str, cls: type, facts: Sequence[str]) -> dict[str, object]:
    """Return the row of a class: its declared attributes and its options."""
    shown = {COLUMNS.get(fact, fact.replace("_", " ")): _text(getattr(cls, fact, None)) for fact in facts}
    parameters = options_of(cls).values()
    options = {p.name: None if p.default is inspect.Parameter.empty else p.default for p in parameters}
    return {"name": name, "class": cls.__name__, **shown, "options": options}


def _text(fact: object) -> object:
    return {True: "yes", False: "no"}[fact] if isinstance(fact, bool) else fact


def main(argv: Sequence[str]) -> int:
    """Print the table; return the exit status."""
    parser = make_parser("losses", __doc__)
    parser.add_argument("--operators", action="store_true", help="the top-k operators instead of the losses")
    parser.add_argument("--json", action="store_true", help="as JSON, with the options of each")
    arguments = parser.parse_args(list(argv))
    if arguments.operators:
        rows = [row(name, cls, OPERATOR_FACTS) for name, cls in operators.classes().items()]
    else:
        rows = [row(name, cls, LOSS_FACTS) for name, cls in losses.classes().items()]
        for one in rows:  # None for losses without an operator
            operator = operators.classes().get(str(one["name"])) if one["family"] == "top-k" else None
            one["sums to k"] = None if operator is None else _text(operator.sums_to_k)
    if arguments.json:
        echo(json.dumps(rows, indent=1))
    else:
        echo(table(rows, [column for column in rows[0] if column not in ("class", "options")]))
    return 0
