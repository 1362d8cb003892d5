"""Every registered data module keeps the contract, and so does one with all kinds of features."""

from pathlib import Path

import pytest
from in_memory import InMemory

from recsys_topk.datamodules import RecFlowDataModule, WorldConfig, registry, simulate
from recsys_topk.testing import check_data_module

WORLD = WorldConfig(users=30, items=250, days=4, requests=30)


@pytest.fixture(scope="module")
def recflow(tmp_path_factory):
    root = simulate(tmp_path_factory.mktemp("world") / "small", WORLD)
    shared = {"root": str(root), "cache_dir": str(root.parent / "cache"), "batch_size": 16, "eval_negatives": 10}
    return lambda **options: RecFlowDataModule(**shared, **options)


def test_every_registered_data_module_has_a_contract_test():
    checked = {"recflow": __file__, "interactions": "test_interactions.py", "lists": "test_lists.py"}
    assert set(registry.available()) == set(checked)
    for name in ("interactions", "lists"):
        text = (Path(__file__).parents[1] / "datamodules" / checked[name]).read_text()
        assert "check_data_module(" in text, name


@pytest.mark.parametrize("layout", ["two-stage", "three-stage"])
def test_recflow_keeps_the_contract(recflow, layout):
    check_data_module(lambda: recflow(layout=layout, history_length=7))


def test_data_module_with_all_kinds_of_features_keeps_the_contract():
    check_data_module(InMemory)


def test_rules_can_be_chosen():
    check_data_module(InMemory, rules=["lists are consistent"])
    with pytest.raises(ValueError, match="unknown rules"):
        check_data_module(InMemory, rules=["lists are nice"])
