"""The commands fit, validate, test and predict on a tiny simulated world."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pyarrow.parquet as pq
import pytest
import torch
import yaml

from recsys_topk.cli.main import main
from recsys_topk.datamodules import WorldConfig
from recsys_topk.datamodules.simulator.embedded import embedded_root
from recsys_topk.runs.config import packaged_configs
from tests.conftest import TINY_WORLD, Result

Command = Callable[..., Result]


def one_line(text: str) -> str:
    # The first command with a new cache prints that it simulates or prepares data; that line is not part of the error.
    lines = [line for line in text.splitlines() if line.strip() and not line.endswith("(once)")]
    assert len(lines) == 1, text
    return lines[0]


def metrics(folder: Path) -> dict[str, float]:
    """Return the last value of every column of metrics.csv, without timings."""
    with (folder / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    found = {name: float(value) for row in rows for name, value in row.items() if value}
    assert found.pop("train/requests_per_second", 1.0) > 0.0
    return found


@pytest.fixture(scope="module")
def trained(made_once: Callable[..., Path]) -> Path:
    """A folder with one finished run, made with the command of the README."""
    options = ("--loss", "dftopk", "--loss.tau", "2", "--trainer.max_epochs", "1", "--trainer.accelerator", "cpu")
    return made_once("trained", "fit", *options, *TINY_WORLD)


def test_fit_writes_checkpoint_config_and_metrics_and_prints_their_paths(trained: Path) -> None:
    run = trained / "runs" / "dftopk-tau2-neg0-s42"
    output = (trained / "stdout.txt").read_text()
    for name in ("checkpoints/best.ckpt", "checkpoints/last.ckpt", "config.yaml", "metrics.csv"):
        assert (run / name).is_file()
        assert str(Path("runs") / run.name / name) in output
    assert re.search(
        r"^val 2024-01-15: lists of 80 with 40 uniform negatives; baselines on 120 requests$", output, re.MULTILINE
    )
    assert re.search(r"^metric +random +popularity +this run +oracle$", output, re.MULTILINE)
    assert re.search(r"^joint_recall@10@20( +0\.\d{4}){4}$", output, re.MULTILINE)
    found = metrics(run)
    assert 0.0 < found["val/joint_recall@10@20"] <= 1.0
    assert {"train/loss", "train/loss_retrieval", "train/loss_ranking", "train/loss_joint"} <= set(found)
    assert "train/requests_per_second" in (run / "metrics.csv").read_text().splitlines()[0]
    line = [line for line in output.splitlines() if line.startswith("epoch 1/1")][
        -1
    ]  # a slow machine prints more lines
    assert re.search(
        r"batch 4/4  loss \d\.\d+  val recall \(80\) 0\.\d+  train recall \(40\) 0\.\d+  requests/s [\d,]+"
        r"  \d:\d\d:\d\d left$",
        line,
    )
    facts = json.loads((run / "run.json").read_text())
    assert facts == {"status": "finished", "steps": 4, "epochs": 1, "monitor": "joint_recall@10@20"}


def test_fit_announces_that_a_world_is_simulated(recsys_topk: Command, environment: dict[str, str]) -> None:
    done = recsys_topk("fit", *TINY_WORLD, "--data.world.users=39", "--trainer.limit_train_batches=1")
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in (done.stdout + done.stderr).splitlines() if "simulating" in line]
    assert environment["RECSYS_TOPK_CACHE"] in line
    assert "GPU available" not in done.stderr


def test_checkpoint_holds_plain_data(trained: Path) -> None:
    path = trained / "runs" / "dftopk-tau2-neg0-s42" / "checkpoints" / "best.ckpt"
    content = torch.load(path, weights_only=True)
    assert content["hyper_parameters"]["loss"]["class_path"] == "recsys_topk.losses.DFTopKLoss"
    assert content["hyper_parameters"]["loss"]["init_args"]["tau"] == 2.0
    assert content["datamodule_hyper_parameters"]["eval_negatives"] == 40


def test_test_command_restores_loss_and_data_from_the_checkpoint(
    trained: Path, in_process: Command, tmp_path: Path
) -> None:
    checkpoint = trained / "runs" / "dftopk-tau2-neg0-s42" / "checkpoints" / "best.ckpt"
    done = in_process(tmp_path, "test", "--ckpt_path", str(checkpoint))
    assert done.returncode == 0, done.stderr
    assert "DFTopKLoss(tau=2.0" in done.stdout
    assert "eval_negatives=40" in done.stdout
    assert re.search(
        r"^test 2024-01-16: lists of 80 with 40 uniform negatives; baselines on 120 requests$",
        done.stdout,
        re.MULTILINE,
    )


def test_typed_options_override_the_checkpoint(trained: Path, in_process: Command, tmp_path: Path) -> None:
    checkpoint = trained / "runs" / "dftopk-tau2-neg0-s42" / "checkpoints" / "best.ckpt"
    options = ["--data.eval_negatives", "10", "--data.eval_negative_source", "in_batch", "--name", "other"]
    done = in_process(tmp_path, "test", "--ckpt_path", str(checkpoint), *options)
    assert done.returncode == 0, done.stderr
    assert "test 2024-01-16: lists of 50 with 10 in_batch negatives;" in done.stdout
    (metrics,) = tmp_path.rglob("metrics.csv")
    assert "test/joint_recall@10@20/50-in_batch" in metrics.read_text().splitlines()[0]


def test_validate_gives_the_metric_of_fit(trained: Path, in_process: Command, tmp_path: Path) -> None:
    run = trained / "runs" / "dftopk-tau2-neg0-s42"
    done = in_process(tmp_path, "validate", "--ckpt_path", str(run / "checkpoints" / "last.ckpt"), "--name", "check")
    assert done.returncode == 0, done.stderr
    again = metrics(tmp_path / "runs" / "validate-check")["val/joint_recall@10@20"]
    assert again == pytest.approx(metrics(run)["val/joint_recall@10@20"], abs=1e-7)


def test_predict_writes_scores_ranks_and_labels_to_parquet(
    trained: Path,
    recsys_topk: Command,
    tmp_path: Path,
    environment: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    checkpoint = trained / "runs" / "dftopk-tau2-neg0-s42" / "checkpoints" / "best.ckpt"
    done = recsys_topk("predict", "--ckpt_path", str(checkpoint), "--name", "p")
    assert done.returncode == 0, done.stderr
    rows = pq.read_table(tmp_path / "runs" / "predict-p" / "predictions.parquet").to_pandas()
    scores = ["score_retrieval", "score_ranking"]
    named = ["shard", "request_id", "user_id", "item_id", "group", "label"]
    assert list(rows.columns) == [*named, *scores, "kept", "rank", "dropped_by"]
    assert rows.groupby("request_id")["kept"].sum().eq(20).all()
    assert rows["request_id"].nunique() == 120
    assert not rows.duplicated(["request_id", "item_id"]).any()
    assert rows["rank"].notna().eq(rows["kept"]).all()
    assert rows["dropped_by"].isna().eq(rows["kept"]).all()
    for _, request in rows.groupby("request_id"):
        first = request.nlargest(30, "score_retrieval")
        assert (request.drop(first.index)["dropped_by"] == "retrieval").all()
        shown = first.nlargest(20, "score_ranking")
        assert shown["rank"].tolist() == list(range(1, 21))
        assert (first.drop(shown.index)["dropped_by"] == "ranking").all()
    assert rows["shard"].unique().tolist() == ["2024-01-16"]
    monkeypatch.setenv("RECSYS_TOPK_CACHE", environment["RECSYS_TOPK_CACHE"])
    root = embedded_root(WorldConfig(users=40, items=300, days=4, requests=120), print)
    logged = pd.read_feather(next(root.rglob("all_stage/2024-01-16.feather")))
    users = dict(zip(logged["request_id"], logged["user_id"], strict=True))
    assert rows["user_id"].eq(rows["request_id"].map(users)).all()
    labels = {"rank_neg": 7, "coarse_neg": 6, "prerank_neg": 5, "sampled": 0}
    for group, label in labels.items():
        assert rows[rows["group"] == group]["label"].eq(label).all()
    assert rows[rows["group"] == "rank_pos"]["label"].gt(7).all()
    assert set(rows["group"]) == {"rank_pos", *labels}


def test_three_stages_and_a_custom_layout_are_restored(in_process: Command, tmp_path: Path) -> None:
    (tmp_path / "own.yaml").write_text(
        "data:\n  layout:\n    groups: {rerank_pos: null, rank_neg: 7, prerank_neg: 5}\n    positive_above: 7\n"
    )
    options = ["--trainer.max_epochs=1", "--trainer.limit_train_batches=1", "--name=own"]
    done = in_process(tmp_path, "fit", "--config", "simulated-3stage", "--config", "own.yaml", *TINY_WORLD, *options)
    assert done.returncode == 0, done.stderr
    assert "\npreranking_recall@10@30 " in done.stdout
    done = in_process(tmp_path, "predict", "--ckpt_path", "runs/own/checkpoints/last.ckpt")
    assert done.returncode == 0, done.stderr
    rows = pq.read_table(next((tmp_path / "runs").glob("predict-*/*.parquet"))).to_pandas()
    assert set(rows["group"]) == {"rerank_pos", "rank_neg", "prerank_neg", "sampled"}
    assert rows[rows["group"] == "rank_neg"]["label"].eq(7).all()
    dropped = rows.groupby(["request_id", "dropped_by"]).size().unstack()
    assert dropped["preranking"].eq(10).all()
    assert dropped["ranking"].eq(10).all()


def test_run_from_a_saved_config_gives_identical_weights(trained: Path, recsys_topk: Command, tmp_path: Path) -> None:
    first = trained / "runs" / "dftopk-tau2-neg0-s42"
    done = recsys_topk("fit", "--config", str(first / "config.yaml"))
    assert done.returncode == 0, done.stderr
    second = tmp_path / "runs" / "dftopk-tau2-neg0-s42"
    assert metrics(second) == metrics(first)
    one, two = (torch.load(run / "checkpoints" / "last.ckpt", weights_only=True) for run in (first, second))
    assert all(torch.equal(one["state_dict"][name], two["state_dict"][name]) for name in one["state_dict"])


@pytest.mark.parametrize("loss", ["listnet", "lambdaloss"])
def test_other_losses_run_with_the_same_command(loss: str, in_process: Command, tmp_path: Path) -> None:
    for number in ("", "-2"):
        done = in_process(
            tmp_path, "fit", "--loss", loss, "--trainer.max_epochs", "1", "--trainer.accelerator", "cpu", *TINY_WORLD
        )
        assert done.returncode == 0, done.stderr
        assert f"{loss} under independent" in done.stdout
        assert (f"NOTE: runs/{loss}-neg0-s42 exists already" in done.stdout) == bool(number)
        assert (tmp_path / "runs" / f"{loss}-neg0-s42{number}" / "checkpoints" / "best.ckpt").is_file()


def test_yaml_config_may_use_short_names(in_process: Command, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(
        yaml.safe_dump({"loss": {"class_path": "lapsum", "init_args": {"tau": 5.0}}, "objective": "independent"})
    )
    done = in_process(tmp_path, "fit", "--config", "mine.yaml", "--loss.tau", "3", *TINY_WORLD)
    assert done.returncode == 0, done.stderr
    assert "lapsum under independent" in done.stdout
    saved = yaml.safe_load((tmp_path / "runs" / "lapsum-tau3-independent-neg0-s42" / "config.yaml").read_text())
    assert saved["model"]["loss"]["class_path"] == "recsys_topk.losses.LapSumLoss"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["fit", "--loss", "dftpk"], ["unknown loss 'dftpk'", "did you mean 'dftopk'", "listnet"]),
        (["fit", "--loss", "nope"], ["unknown loss 'nope'", "available:", "lambdaloss"]),
        (["fit", "--loss", "no.such.Loss"], ["no.such.Loss", "available:"]),
        (["fit", "--objective", "jont"], ["unknown objective 'jont'", "did you mean 'joint'"]),
        (["fit", "--trainer.accelerator", "gpu", *TINY_WORLD], ["no GPU is visible", "--trainer.accelerator cpu"]),
        (["fit", "--trainer.max_epoch", "1"], ["--trainer.max_epoch", "did you mean --trainer.max_epochs?"]),
        (["fit", "--loss", "bce", "--loss.tau", "3"], ["BCELoss has no option 'tau'", "it has: "]),
        (["fit", "--loss.tua=3", "--loss", "dftopk"], ["has no option 'tua'", "did you mean --loss.tau?"]),
        (["fit", "--data.batch_size", "many"], ["batch_size", "many"]),
        (["fit", "--data", "recflo"], ["unknown data", "did you mean 'recflow'"]),
        (["fit", "--data.rot", "x"], ["RecFlowDataModule has no option 'rot'", "did you mean --data.root?"]),
        (["fit", "--name", "../elsewhere"], ["--name must be a plain name", "'../elsewhere'", "--out"]),
        (["fit", "--model.k", "0", *TINY_WORLD], ["the number of items wanted", "must be at least 1, got 0"]),
        (["fit", "--model.dim", "0", *TINY_WORLD], ["dimensions must be at most 65536 and at least 1"]),
        (["fit", "--model.k", "40", *TINY_WORLD], ["nothing is learned", "at most 40 items", "quotas [30, 20]"]),
        (["fit", "--name", ".."], ["--name must be a plain name"]),
        (["demo", "--name", "a/b"], ["--name must be a plain name"]),
        (["fit", "--config", "simulate"], ["no config file 'simulate'", "did you mean 'simulated'"]),
        (["test"], ["needs a trained model", "--ckpt_path"]),
        (["test", "--ckpt_path", "none.ckpt"], ["no checkpoint 'none.ckpt'"]),
        (["ftt"], ["unknown command 'ftt'", "did you mean 'fit'"]),
    ],
)
def test_mistakes_exit_with_status_2_and_one_line(
    arguments: list[str], words: list[str], in_process: Command, tmp_path: Path
) -> None:
    done = in_process(tmp_path, *arguments)
    assert done.returncode == 2, done.stdout
    line = one_line(done.stderr)
    for word in words:
        assert word in line
    assert not list(tmp_path.glob("runs/*/checkpoints/*"))


def test_help_is_short_and_lists_the_commands(recsys_topk: Command) -> None:
    done = recsys_topk("--help")
    assert done.returncode == 0
    assert len(done.stdout.splitlines()) <= 45
    for command in ("fit", "test", "predict", "simulate", "losses", "doctor"):
        assert f"\n  {command} " in done.stdout


@pytest.mark.parametrize("command", ["fit", "validate", "test", "predict"])
def test_help_of_a_command_is_short_and_names_existing_options(command: str, recsys_topk: Command) -> None:
    short = recsys_topk(command, "--help")
    assert short.returncode == 0
    assert len(short.stdout.splitlines()) <= 55
    if command == "fit":
        full_help = recsys_topk("fit", "--help_all").stdout
        for option in re.findall(r"--(?:data|model|trainer)\.\w+", short.stdout):
            assert f"{option} " in full_help, option


def test_help_of_a_loss_shows_its_options(in_process: Command, tmp_path: Path) -> None:
    assert "--loss.tau (default: 1.0)" in in_process(tmp_path, "fit", "--loss.help", "lapsum").stdout
    assert "dftopk" in in_process(tmp_path, "fit", "--loss.help").stdout
    assert "stage_k" in in_process(tmp_path, "fit", "--objective.help", "joint").stdout


def test_packaged_configs_parse(capsys: pytest.CaptureFixture[str]) -> None:
    for name in packaged_configs():
        assert main(["fit", "--config", name, "--print_config"]) == 0
        shown = capsys.readouterr()
        assert "class_path: recsys_topk.losses" in shown.out


def test_corpus_option_reports_metrics_over_the_whole_catalogue(
    trained: Path, in_process: Command, tmp_path: Path
) -> None:
    checkpoint = trained / "runs" / "dftopk-tau2-neg0-s42" / "checkpoints" / "best.ckpt"
    options = ["--ckpt_path", str(checkpoint), "--name", "all", "--corpus", "--corpus.k", "5,20"]
    done = in_process(tmp_path, "test", *options)
    assert done.returncode == 0, done.stderr
    assert re.search(r"^metric +random +popularity +this run$", done.stdout, re.MULTILINE)
    folder = tmp_path / "runs" / "test-all"
    found = metrics(folder)
    written = json.loads((folder / "corpus.json").read_text())["metrics"]
    assert {name: found[f"test/{name}"] for name in written} == pytest.approx(written, abs=1e-6)
    assert {"recall@5/corpus", "ndcg@20/popularity", "lost_ranking/corpus"} <= written.keys()
    share = sum(written[name] for name in ("lost_retrieval/corpus", "lost_ranking/corpus", "kept/corpus"))
    assert share == pytest.approx(1.0, abs=1e-6)


def test_invalid_corpus_options_exit_with_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, text in (
        (["fit", "--corpus"], "--corpus goes with test and validate"),
        (["test", "--corpus.stages", "x"], "did you mean --corpus.stage"),
        (["test", "--corpus.k", "ten"], "--corpus.k takes numbers such as 10,20, got 'ten'"),
        (["test", "--corpus.short", "ten"], "--corpus.short takes a number such as 10, got 'ten'"),
        (["test", "--baselines", "als"], "--baselines goes with --corpus: recsys-topk test --corpus --baselines"),
        (["test", "--corpus", "--baselines.als.factors", "3"], "--baselines.als is an option of no baseline"),
    ):
        assert main(arguments) == 2
        assert text in one_line(capsys.readouterr().err)
