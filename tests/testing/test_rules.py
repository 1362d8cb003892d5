"""The rules are found by the annotation of their first argument; these numbers change only with the rules."""

import importlib
import inspect

from recsys_topk.testing import data_rules, loss_rules, objective_rules, operator_rules, stage_rules
from recsys_topk.testing.comparison import rules_for, title

SHARED = "recsys_topk.testing.shared_rules"


def test_every_rule_is_found():
    for module, on_lists, once in ((loss_rules, 9, 13), (operator_rules, 9, 12), (objective_rules, 5, 6)):
        assert (len(module.ON_LISTS), len(module.ONCE)) == (on_lists, once), module.__name__
    assert (len(data_rules.RULES), len(stage_rules.RULES)) == (14, 12)


def test_rules_of_functions_do_not_apply_to_objectives():
    names = {title(rule) for rule in (*objective_rules.ON_LISTS, *objective_rules.ONCE)}
    assert "masked items have no effect" in names
    assert "gradient matches finite differences" not in names
    assert names <= {title(rule) for module in (SHARED, objective_rules.__name__) for rule in functions(module)}


def functions(module):
    return [value for value in vars(importlib.import_module(module)).values() if inspect.isfunction(value)]


def test_helpers_are_no_rules():
    on_lists, once = rules_for(loss_rules.LossSubject, SHARED)
    assert not {"require_stored", "_draws"} & {rule.__name__ for rule in (*on_lists, *once)}
