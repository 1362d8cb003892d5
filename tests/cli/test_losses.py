"""`recsys-topk losses` lists all registered losses and operators with their properties."""

import json

import pytest

from recsys_topk import losses, operators
from recsys_topk.cli.losses import main


@pytest.fixture(autouse=True)
def wide_terminal(monkeypatch):
    """Cells of a table are not folded."""
    monkeypatch.setenv("COLUMNS", "300")


def test_table_lists_every_loss(capsys):
    assert main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[2:]] == list(losses.available())
    listnet = next(line for line in lines if line.startswith("listnet"))
    assert "listwise" in listnet
    assert "graded" in listnet
    assert "Cao et al. 2007" in listnet


def test_table_lists_every_operator(capsys):
    assert main(["--operators"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[2:]] == list(operators.available())


def test_json_holds_options_and_operator_properties(capsys):
    assert main(["--json"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows["lambdaloss"]["options"]["variant"] == "ndcg2pp"
    assert rows["lambdaloss"]["options"]["gain"] is None
    assert rows["lambdaloss"]["sums to k"] is None
    assert rows["dftopk"]["sums to k"] == "no"
    assert rows["dftopk"]["needs k"] == "yes"
    assert rows["bce"]["needs k"] == "no"


def test_json_of_operators_holds_their_properties(capsys):
    assert main(["--operators", "--json"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows["dftopk"] == {
        "name": "dftopk",
        "class": "DFTopK",
        "cost": "n",
        "sums to k": "no",
        "equivariant": "yes",
        "tie fair": "yes",
        "deterministic": "yes",
        "exact gradient": "yes",
        "paper": "Zhu et al. 2025, arXiv 2510.11472",
        "options": {"tau": 1.0, "alpha": 0.5, "validate": False},
    }
