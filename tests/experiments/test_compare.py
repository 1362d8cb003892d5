"""Comparisons: the summary of given numbers, and a comparison that is interrupted and resumed."""

from __future__ import annotations

import csv
import json
import math
import os
import shutil
import sys
import xml.etree.ElementTree as ET
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

import pytest
import torch

from recsys_topk.cli.arguments import parse_options
from recsys_topk.files import write_whole
from recsys_topk.runs.run import TrainingRun
from recsys_topk.runs.statistics import paired_p_value, summarise
from recsys_topk.runs.trials import Competition, by_name
from tests import wandb_files
from tests.conftest import TINY_WORLD, Result

JOINT = "test/joint_recall@10@20/80"


def results_with_joint(*joint: float) -> list[dict[str, object]]:
    return [{"metrics": {JOINT: value, "test/ranking_recall@10@20/80": 0.5}, "seconds": 1.0} for value in joint]


def student_t_two_sided(t: float, n: int) -> float:
    """Return the two-sided p-value, by the trapezoidal rule on the density."""
    steps = 20000
    constant = math.gamma((n + 1) / 2) / (math.sqrt(n * math.pi) * math.gamma(n / 2))
    heights = [constant * (1 + (t * i / steps) ** 2 / n) ** (-(n + 1) / 2) for i in range(steps + 1)]
    return 1 - 2 * (sum(heights) - (heights[0] + heights[-1]) / 2) * t / steps


@pytest.mark.parametrize("differences", [[0.1, 0.3], [1.0, 2.0, 3.5], [0.2, -0.1, 0.3, 0.4], [1, 2, 1, 3, 2.5, 0]])
def test_p_value_equals_numerical_integration(differences: list[float]) -> None:
    n = len(differences)
    mean = sum(differences) / n
    spread = math.sqrt(sum((d - mean) ** 2 for d in differences) / (n - 1))
    expected = student_t_two_sided(abs(mean) / (spread / math.sqrt(n)), n - 1)
    assert paired_p_value(differences) == pytest.approx(expected, abs=1e-6)


def test_summary_holds_mean_spread_and_p_value() -> None:
    rows = summarise({"a": results_with_joint(0.5, 0.6, 0.7), "b": results_with_joint(0.6, 0.71, 0.79)})
    assert rows[0]["joint"] == pytest.approx(0.6)
    assert rows[0]["+-"] == pytest.approx(0.1)
    assert rows[0]["p"] is None
    assert rows[1]["p"] == pytest.approx(paired_p_value([0.1, 0.11, 0.09]))
    assert summarise({"a": results_with_joint(0.5)})[0]["+-"] is None


# Writes digests of the initial weights and of every training batch with its negatives.
WITNESS = """
import hashlib
from pathlib import Path
from lightning.pytorch import Callback

def digest(tensors):
    return hashlib.sha256(b"".join(tensor.detach().numpy().tobytes() for tensor in tensors)).hexdigest()

class Witness(Callback):
    def write(self, trainer, text):
        with (Path(trainer.default_root_dir) / "witness.txt").open("a") as file:
            file.write(text + "\\n")

    def on_fit_start(self, trainer, module):
        self.write(trainer, "weights " + digest(module.cascade.state_dict().values()))

    def on_train_batch_start(self, trainer, module, batch, index):
        parts = [batch.request_id, batch.item_id[batch.candidates], batch.labels, batch.mask.byte()]
        self.write(trainer, f"batch {tuple(batch.mask.shape)} " + digest(parts))
"""
OPTIONS = [*TINY_WORLD, "--data.train_negatives=5", "--trainer.callbacks=witness.Witness"]
COMMAND = ["compare", "--losses", "dftopk", "--variant", "list net=--loss listnet", "--seeds", "2", "--jobs", "2",
           "--out", "c", *OPTIONS]  # fmt: skip


@pytest.fixture(scope="module")
def compared(made_once: Callable[..., Path]) -> Path:
    """A folder with a finished comparison in `c`."""
    return made_once("compared", *COMMAND, files={"witness.py": WITNESS})


def test_runs_with_one_seed_share_weights_and_batches_for_all_losses(compared: Path) -> None:
    seen = {
        (name, seed): (compared / "c" / "runs" / f"{name}-s{seed}" / "witness.txt").read_text()
        for name in ("dftopk", "list-net")
        for seed in (0, 1)
    }
    assert seen["dftopk", 0] == seen["list-net", 0]
    assert seen["dftopk", 1] == seen["list-net", 1]
    first, second = (seen["dftopk", seed].splitlines() for seed in (0, 1))
    assert len(first) == 1 + 4  # two days of 120 requests in batches of 60
    assert all("(60, 45)" in line for line in first[1:])
    assert not set(first) & set(second)


def test_run_of_a_comparison_equals_a_separate_run(
    compared: Path, recsys_topk: Callable[..., Result], tmp_path: Path
) -> None:
    (tmp_path / "witness.py").write_text(WITNESS)
    options = [*OPTIONS, "--loss", "listnet", "--seed_everything=1", "--data.seed=1", "--name", "alone"]
    alone = recsys_topk("fit", *options)
    assert alone.returncode == 0, alone.stderr
    folders = (compared / "c" / "runs" / "list-net-s1", tmp_path / "runs" / "alone")
    assert (folders[0] / "metrics.csv").read_text().split("\n")[0].count("test/") == 3
    one, two = (torch.load(f / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"] for f in folders)
    assert list(one) == list(two)
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_result_file_contains_command_versions_and_configs(compared: Path) -> None:
    content = json.loads((compared / "c" / "comparison.json").read_text())
    assert content["command"] == ["recsys-topk", *COMMAND]
    assert content["versions"]["torch"] == torch.__version__
    assert content["machine"]["cores"] == os.cpu_count()
    assert datetime.fromisoformat(content["started"]).tzinfo is not None
    (first, second) = content["runs"]["list net"]
    assert (first["seed"], second["seed"]) == (0, 1)
    assert (first["given"]["seed_everything"], first["given"]["data"]["init_args"]["seed"]) == (0, 0)
    assert first["config"]["data"]["init_args"]["train_negatives"] == 5
    assert first["device"] == "cpu"
    with (compared / "c" / "comparison.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["run"] for row in rows] == ["dftopk", "list net"]
    joint = [run["metrics"][JOINT] for run in (first, second)]
    assert float(rows[1][JOINT]) == pytest.approx(sum(joint) / 2)
    assert f"{sum(joint) / 2:.4f}" in (compared / "stdout.txt").read_text()


def test_plots_are_written_next_to_the_table(compared: Path) -> None:
    rows = json.loads((compared / "c" / "comparison.json").read_text())["rows"]
    for name, words in {
        "joint": ["joint recall@10@20, lists of 80", *(f"{row[JOINT]:.4f}" for row in rows)],
        "stages": ["retrieval recall@10@30", "ranking recall@10@20", "joint recall@10@20"],
        "seconds": ["seconds of training"],
    }.items():
        root = ET.parse(compared / "c" / f"comparison-{name}.svg").getroot()
        texts = {"".join(node.itertext()).strip() for node in root.iter("{http://www.w3.org/2000/svg}text")}
        assert {"dftopk", "list net", *words} <= texts


def test_comparison_resumes_and_refuses_other_options(
    compared: Path, in_process: Callable[..., Result], tmp_path: Path
) -> None:
    compared = shutil.copytree(compared, tmp_path / "copy")
    trials = compared / "c" / "trials"
    before = {path.name: path.read_text() for path in trials.glob("*.json")}
    (trials / "list-net-s0.json").unlink()
    again = in_process(compared, *COMMAND, "--logger", "wandb")
    assert again.returncode == 0, again.stderr
    assert "3 of 4 runs are finished already" in again.stdout
    after = {path.name: path.read_text() for path in trials.glob("*.json")}
    assert {name for name in before if after[name] == before[name]} == before.keys() - {"list-net-s0.json"}
    one, two = (json.loads(found["list-net-s0.json"]) for found in (before, after))
    assert one["metrics"] == two["metrics"]

    other = in_process(compared, *COMMAND, "--data.batch_size=30")
    assert other.returncode == 2
    (line,) = other.stderr.splitlines()
    assert "dftopk-s0.json was made with other options" in line
    assert "--data.batch_size was '60' and is '30' now" in line
    assert "another --out" in line
    assert {path.name: path.read_text() for path in trials.glob("*.json")} == after

    # One W&B run holds the table and the plots, another is the run that was missing.
    assert len(list((compared / "c" / "runs").glob("*/wandb/offline-run-*"))) == 1
    (file,) = (compared / "c" / "wandb").glob("offline-run-*/*.wandb")
    found = wandb_files.records(file)
    (trained,) = (compared / "c" / "runs").glob("*/wandb/offline-run-*/*.wandb")
    runs = [next(r.run for r in wandb_files.records(path) if r.HasField("run")) for path in (file, trained)]
    assert [(run.run_group, run.job_type) for run in runs] == [("c", "compare"), ("c", "train")]
    assert wandb_files.config(found)["command"] == ["recsys-topk", *COMMAND, "--logger", "wandb"]
    (row,) = wandb_files.history(found)
    assert row["comparison/nrows"] == 2
    media = file.parent / "files"
    assert (media / row["comparison/path"]).is_file()
    for name in ("joint", "stages", "seconds"):
        assert (media / row[f"comparison-{name}/path"]).read_bytes().startswith(b"\x89PNG")


def test_further_tests_measure_the_trained_weights_with_other_options(
    in_process: Callable[..., Result], tmp_path: Path
) -> None:
    study = "variants: {bce: {loss: bce}}\nseeds: 1\ntests:\n"
    further = {"logged": "eval_negatives: 0", "slots": "eval_negative_source: in_batch"}
    study += "".join(f"  {name}: {{data: {{{option}}}}}\n" for name, option in further.items())
    (tmp_path / "study.yaml").write_text(study)
    command = ["compare", "--study", "study.yaml", "--out", "c", *TINY_WORLD]
    done = in_process(tmp_path, *command)
    assert done.returncode == 0, done.stderr
    (row,) = json.loads((tmp_path / "c" / "comparison.json").read_text())["rows"]
    checkpoint = str(tmp_path / "c" / "runs" / "bce-s0" / "checkpoints" / "last.ckpt")
    for name, option in further.items():
        key, value = option.split(": ")
        run = TrainingRun({"ckpt_path": checkpoint, "out": str(tmp_path / "tests"), "data": {key: value}})
        metric, recall = next(item for item in run.test().items() if item[0].startswith("test/joint"))
        assert row[f"{name}/{metric.removeprefix('test/')}"] == pytest.approx(recall, abs=1e-6)
        assert recall != row[JOINT]

    (tmp_path / "study.yaml").write_text(study.replace("0", "7"))
    other = in_process(tmp_path, *command)
    assert "--tests.logged.data.eval_negatives was 0 and is 7 now" in other.stderr
    (tmp_path / "study.yaml").write_text(study.replace("eval_negatives", "eval_negative"))
    assert "has no option 'eval_negative'" in in_process(tmp_path, *command).stderr


def write_finished_run(folder: Path, *further: str) -> None:
    """Write the file of a run as if it were finished."""
    (trial,) = Competition(by_name(["dftopk"]), parse_options(further), seeds=1, out=folder).trials("trials")
    write_whole(trial.target, json.dumps({**trial.identity(), **results_with_joint(0.5)[0]}))


def test_comparison_without_matplotlib_writes_a_table_and_a_message(
    in_process: Callable[..., Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    write_finished_run(tmp_path / "c")
    done = in_process(tmp_path, "compare", "--losses", "dftopk", "--seeds", "1", "--out", "c")
    assert done.returncode == 0, done.stderr
    assert "0.5000" in done.stdout
    assert "plots need matplotlib: pip install 'recsys-topk[plot]'" in done.stdout
    assert sorted(path.name for path in (tmp_path / "c").glob("comparison*")) == ["comparison.csv", "comparison.json"]


def test_edited_config_does_not_resume_the_comparison(
    in_process: Callable[..., Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.yaml").write_text("data: {batch_size: 32}\n")
    write_finished_run(Path("c"), "--config", "mine.yaml")
    arguments = ["compare", "--losses", "dftopk", "--seeds", "1", "--out", "c", "--config", "mine.yaml"]
    assert in_process(tmp_path, *arguments).returncode == 0
    Path("mine.yaml").write_text("data: {batch_size: 64}\n")
    done = in_process(tmp_path, *arguments)
    assert done.returncode == 2
    assert "--data.batch_size was 32 and is 64 now" in done.stderr


def test_published_objectives_can_be_compared_by_name() -> None:
    assert by_name(["bce", "icc"]) == {"bce": {"loss": "bce"}, "icc": {"objective": "icc"}}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [(["--losses", "dftopk,lapsun"], "did you mean 'lapsum'"), ([], "nothing to compare"),
     (["--losses", "dftopk", "--seeds", "0"], "--seeds must be at least 1, got 0"),
     (["--variant", "a b=--loss dftopk", "--variant", "a-b=--loss bce"], "same file"),
     (["--variant", "x"], "LABEL=OPTIONS"), (["--variant", "k = 3=--loss dftopk"], "no = in the label")],
)  # fmt: skip
def test_mistakes_exit_before_anything_runs(
    arguments: list[str], words: str, in_process: Callable[..., Result], tmp_path: Path
) -> None:
    for command in ("compare", "stream"):
        done = in_process(tmp_path, command, *arguments)
        assert done.returncode == 2
        assert words in done.stderr
    assert not list(tmp_path.iterdir())


def test_failed_run_is_reported_with_its_reason(in_process: Callable[..., Result], tmp_path: Path) -> None:
    wrong = ["--data.root", "nowhere"]
    done = in_process(tmp_path, "compare", "--losses", "dftopk", "--seeds", "1", "--out", "c", *wrong)
    assert done.returncode == 1
    assert "dftopk, seed 0" in done.stderr
    assert "nowhere" in done.stderr
    assert "run the same command again" in done.stderr
    assert not (tmp_path / "c" / "comparison.json").exists()
