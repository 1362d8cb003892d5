"""The examples run as a user would run them."""

import argparse
import ast
import json
import os
import runpy
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch

from recsys_topk.losses import DFTopKLoss
from tests import wandb_files

ROOT = Path(__file__).parents[2]


def run(*command, **environment):
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH"), environment.pop("extra", None)]))
    done = subprocess.run(
        [sys.executable, *command],
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "PYTHONPATH": paths, **environment},
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def run_example(script, argument, monkeypatch, capsys):
    """Run an example in this process as `python script argument`; return its output."""
    monkeypatch.setattr(sys, "argv", [script, argument])
    threads = torch.get_num_threads()
    try:
        runpy.run_path(str(ROOT / "examples" / script), run_name="__main__")
    finally:
        torch.set_num_threads(threads)
    return capsys.readouterr().out


@pytest.mark.parametrize("loss", ["dftopk", "lambdaloss"])
def test_own_training_loop_learns(loss, monkeypatch, capsys):
    lines = run_example("own_training_loop.py", loss, monkeypatch, capsys).splitlines()
    values = [float(line.split()[-1]) for line in lines]
    assert values[-1] < 0.7 * values[0]


def test_flat_lists_give_the_same_loss_in_both_forms(monkeypatch, capsys):
    words = run_example("flat_lists.py", "", monkeypatch, capsys).replace(",", "").split()
    assert words[1] == words[2]
    assert float(words[1]) > 0.0
    assert words[-1] == "0"


def test_inverse_propensities_beat_naive_training_for_five_seeds(monkeypatch, capsys):
    lines = run_example("position_bias.py", "5", monkeypatch, capsys).splitlines()[1:]
    values = [[float(word) for word in line.split()[1:]] for line in lines]
    assert len(values) == 5
    assert all(weighted > naive for naive, weighted in values)


def test_users_of_the_closed_loop_see_and_click_what_is_logged():
    example = runpy.run_path(str(ROOT / "examples" / "closed_loop.py"))
    config = example["WorldConfig"](users=30, items=400, days=2, new_items=50, seed=1)
    world = example["World"].make(config)
    best, random, later = (example["Population"](world, seed=3) for _ in range(3))
    rng = np.random.default_rng(0)
    assert 50 < len(best.items(1)) - len(best.items(0)) + 30 < 110

    def oracle(users):
        there, noon = best.items(1), np.full(len(users), best.start * 1000 + 36 * 3_600_000)
        everything = np.broadcast_to(there, (len(users), len(there)))
        utility = world.utility(np.array([one["user"] for one in users]), noon, everything)
        return there[np.argsort(-utility, axis=1)][:, :39].tolist()

    table, high = best.visit(1, 200, oracle)
    _, low = random.visit(1, 200, lambda users: [rng.permutation(random.items(1))[:39].tolist() for _ in users])
    assert high > low + 1
    rows = table.to_pandas()
    stages = rows.groupby("request")["stage"].value_counts().unstack(fill_value=0)
    assert len(stages) == 200
    assert set(stages["clicked"] + stages["shown"]) == {6}
    assert set(stages["ranked"]) == {4}
    assert set(stages["retrieved"]) <= {29, 30}  # the item that is shown at random may be in the list already
    assert sum(map(len, best.clicked.values())) == stages["clicked"].sum()
    assert rows["history"].map(len).max() <= 20
    later.remember(table)
    assert later.clicked == best.clicked
    told = example["answered"](table, world, seed=0).to_pandas()["stage"]
    shown = rows["stage"].isin(["clicked", "shown"])
    assert (told[shown] == rows["stage"][shown]).all()
    unshown = rows[~shown]
    utility = world.utility(*(unshown[name].to_numpy() for name in ("user", "time")), unshown[["item"]].to_numpy())
    assert abs((told[~shown] == "clicked").mean() - (1 / (1 + np.exp(1.5 - utility))).mean()) < 0.02


def test_closed_loop_resumes_with_the_same_result(tmp_path):
    """tests/experiments/test_online_page.py runs the command, with exports."""
    example = runpy.run_path(str(ROOT / "examples" / "closed_loop.py"))
    options = argparse.Namespace(
        folder=str(tmp_path), days=3, requests=100, window=2, epochs=1, batch_size=64, negatives=10, dim=4, lr=0.01,
        loss="bce", export=False,
    )  # fmt: skip
    days = tmp_path / "days"
    days.mkdir()

    def utilities(arm):
        example["run"](0, arm, options)
        return [json.loads((days / f"0-{arm}-{day}.json").read_text()) for day in range(3)]

    results = {arm: utilities(arm) for arm in example["ARMS"]}
    assert len({days[0] for days in results.values()}) == 1  # the first day is the same for all
    assert results["frozen"][:2] == results["funnel"][:2]
    assert results["frozen"][2] != results["funnel"][2]
    assert results["clicks"][1] != results["funnel"][1]
    for arm, day in (("frozen", 2), ("clicks", 2)):  # as if the process had been killed on that day
        (days / f"0-{arm}-{day}.json").unlink()
        (days / f"0-{arm}-{day}.parquet").write_bytes(b"half a file")
        assert utilities(arm) == results[arm]


def test_differences_of_the_closed_loop_are_those_of_the_second_half():
    example = runpy.run_path(str(ROOT / "examples" / "closed_loop.py"))
    zero, rising = [0.0] * 4, [0.0, 9.0, 1.0, 2.0]
    results = [dict.fromkeys(example["ARMS"], zero) | {"funnel": rising} for _ in range(2)]
    found = example["summary"](results)["funnel - clicks"]
    assert found["mean"] == 1.5
    assert found["seeds"] == [1.5, 1.5]
    assert found["interval"] == [1.0, 2.0]


class StandInTrainer:
    """Calls `compute_loss` as the Trainer of transformers does; transformers is not installed here."""

    def __init__(self, model, batches):
        self.model, self.batches = model, batches

    def train(self):
        optimizer = torch.optim.Adam(self.model.parameters(), lr=0.05)
        losses = []
        for batch in self.batches:
            loss = self.compute_loss(self.model, dict(batch), num_items_in_batch=len(batch["labels"]))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses


class Scorer(torch.nn.Linear):
    def forward(self, features):
        return SimpleNamespace(logits=super().forward(features).squeeze(-1))


def test_hugging_face_trainer_learns(monkeypatch):
    module = ModuleType("transformers")
    module.Trainer = StandInTrainer
    monkeypatch.setitem(sys.modules, "transformers", module)
    trainer_class = runpy.run_path(str(ROOT / "examples" / "hugging_face_trainer.py"))["RankingTrainer"]
    torch.manual_seed(0)
    features, mask = torch.randn(60, 16, 12, 3), torch.rand(60, 16, 12) > 0.1
    labels = (features[..., 0] > 0.5).float()
    batches = [{"features": x, "labels": y, "mask": m} for x, y, m in zip(features, labels, mask, strict=True)]
    trainer = trainer_class(Scorer(3, 1), batches)
    losses = trainer.train()
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])
    loss, outputs = trainer.compute_loss(trainer.model, dict(batches[0]), return_outputs=True)
    expected = DFTopKLoss(k=5)(outputs.logits, labels[0], mask[0])
    assert torch.equal(loss, expected)


@pytest.mark.parametrize("name", ["own_training_loop.py", "flat_lists.py", "hugging_face_trainer.py"])
def test_examples_have_at_most_15_statements(name):
    body = ast.parse((ROOT / "examples" / name).read_text()).body
    lines = {node.lineno for one in body for node in ast.walk(one) if isinstance(node, ast.stmt)}
    imports = sum(isinstance(one, (ast.Import, ast.ImportFrom)) for one in body)
    assert len(lines) - imports - 1 <= 15  # statements, without imports and the docstring


def parsed_metrics(text):
    return {line.split()[0]: float(line.split()[-1]) for line in text.splitlines() if line.startswith("test/")}


def test_own_lightning_module_learns(monkeypatch, capsys):
    words = run_example("lightning_module.py", "", monkeypatch, capsys).split()
    assert float(words[-1]) > 0.9 > float(words[-3])


def test_cascade_trained_on_a_csv_beats_random_order(tmp_path, monkeypatch, capsys):
    measured = parsed_metrics(run_example("own_csv.py", str(tmp_path), monkeypatch, capsys))
    (joint,) = (name for name in measured if "joint_recall@10@20/" in name)
    assert measured[joint] > 2 * 20 / int(joint.split("/")[-1])  # twice the recall of a random order


def test_three_stages_trains_and_reports_recall_per_stage(tmp_path, monkeypatch, capsys, environment):
    monkeypatch.setenv("RECSYS_TOPK_CACHE", environment["RECSYS_TOPK_CACHE"])
    measured = parsed_metrics(run_example("three_stages.py", str(tmp_path), monkeypatch, capsys))
    names = [name.split("/")[1] for name in measured]
    assert names == ["joint_recall@10@20", "retrieval_recall@10@40", "preranking_recall@10@30", "ranking_recall@10@20"]
    joint, retrieval, *_ = measured.values()
    assert 0.0 < joint <= retrieval  # later stages cannot restore items that retrieval drops


def test_sweep_runs_without_a_server(tmp_path, monkeypatch, capsys, environment):
    for name, value in {**environment, "WANDB_MODE": "offline", "WANDB_SILENT": "true"}.items():
        monkeypatch.setenv(name, value)  # also restores the last two, which the script and Lightning change
    import wandb

    lines = run_example("sweep.py", str(tmp_path), monkeypatch, capsys).splitlines()
    wandb.teardown()  # completes the files
    printed_recalls = [float(line.split()[-1]) for line in lines if "val/joint_recall@10@20" in line]
    assert len(printed_recalls) == 3
    found = [wandb_files.records(file) for file in sorted(tmp_path.glob("*/wandb/offline-run-*/*.wandb"))]
    assert sorted(wandb_files.summary(one)["val/joint_recall@10@20"] for one in found) == pytest.approx(
        sorted(printed_recalls), abs=1e-4
    )
    runs = [next(record.run for record in one if record.HasField("run")) for one in found]
    assert {(one.run_group, one.job_type) for one in runs} == {("learning-rates", "sweep")}
    best = max(found, key=lambda one: wandb_files.summary(one)["val/joint_recall@10@20"])
    assert f"--model.lr {wandb_files.config(best)['model']['lr']}" in lines[-1]


def test_serving_gives_the_same_answer_in_process_and_over_http(tmp_path, monkeypatch, capsys, environment):
    monkeypatch.setenv("RECSYS_TOPK_CACHE", environment["RECSYS_TOPK_CACHE"])
    lines = run_example("serving.py", str(tmp_path), monkeypatch, capsys).splitlines()
    assert "recall of the index 1.00" in lines[0]
    inside, over_http = (line.partition(": ")[2].split() for line in lines[-2:])
    assert inside == over_http
    assert len(set(inside)) == 5


def test_every_kind_of_use_has_an_example_that_a_test_runs():
    """Each example is run by a test in this file; `test_peers.py` runs the folder `peers`."""
    here = {path.name for path in (ROOT / "examples").iterdir() if path.suffix == ".py" or path.name == "plugin"}
    uses = {"own_training_loop.py", "lightning_module.py", "plugin", "own_csv.py", "three_stages.py", "sweep.py"}
    assert uses | {"serving.py"} <= here
    tests = Path(__file__).read_text()
    assert [name for name in here if f'"{name}"' not in tests.replace("examples/plugin", "plugin")] == []


def test_pair_memory_reports_time_and_memory(monkeypatch, capsys):
    text = run_example("pair_memory.py", "ranknet", monkeypatch, capsys)
    assert text.startswith("ranknet (recflow): loss 0.90")
    assert text.endswith(" MB\n")


PLUGIN_IN_USE = """
from recsys_topk import losses, operators
from recsys_topk.cli.losses import main
from recsys_topk.spec import build
from recsys_topk.testing import check_loss, check_operator
import torch

loss = losses.get("margin", margin=0.5)
scores = torch.tensor([[2.0, 0.0, 1.0]], requires_grad=True)
value = loss(scores, torch.tensor([[0.0, 1.0, 0.0]]))
expected = 0.5 + torch.logsumexp(torch.tensor([2.0, 1.0]), 0)
assert torch.allclose(value, expected), value
value.backward()
assert scores.grad[0, 1] == -1

p = operators.get("cauchy", tau=0.1)(scores, k=1).p
assert p[0, 0] > 0.9 > p[0, 2]
assert "margin" in losses.available()
described = {"class_path": "recsys_topk_extras.margin.MarginLoss", "init_args": {"margin": 0.5}}  # as in a checkpoint
assert build(described, base=losses.RankingLoss).name == "margin"
assert "cauchy" in operators.available()
main([])
check_loss(losses.registry.resolve("margin"))
check_operator(operators.registry.resolve("cauchy"))
"""


def test_plugin_installs_is_found_by_name_and_keeps_the_contract(tmp_path):
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check"]
    run("-m", "pip", "install", *options, "--target", str(tmp_path), "examples/plugin")
    assert "margin" in run("-c", PLUGIN_IN_USE, extra=str(tmp_path), OMP_NUM_THREADS="1")


@pytest.mark.long  # it exports a cascade
def test_funnel_log_load_counts_every_request(tmp_path):
    options = ["--requests=40", "--rounds=2", "--connections=4", "--items=300", f"--folder={tmp_path}"]
    out = run(str(Path("examples") / "funnel_log_load.py"), *options)
    assert "with the log: 40 answers, 0 errors" in out
    assert "rows: {'written': 90, 'dropped': 0} of 90" in out
