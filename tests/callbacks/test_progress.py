"""Progress shows the rate, and the recall of the batch, compared with the metric on the same scores."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback

from recsys_topk.callbacks import progress as progress_module
from recsys_topk.callbacks.progress import Pace, Progress, progress_line
from recsys_topk.metrics import JointRecall
from recsys_topk.runs.metrics_file import MetricsFile, read_rows
from tests.cascades.test_module import batches, module, trainer


def test_train_recall_is_measured_before_the_update(tmp_path: Path) -> None:
    pace = Pace(every=0.0)
    data = batches(1)
    (batch,) = data
    with torch.no_grad():
        expected = JointRecall(3, (8, 5), 7.0)
        expected.update(module()(batch), batch.labels, batch.mask)
    trainer(tmp_path, callbacks=[pace]).fit(module(), data)
    assert pace.train_recall == pytest.approx(float(expected.compute()), abs=1e-6)


def test_train_recall_is_measured_at_intervals_and_does_not_change_the_training(tmp_path: Path) -> None:
    ends = []
    for pace, measurements in ((Pace(every=None), 0), (Pace(every=3600.0), 1), (Pace(every=0.0), 5)):
        seen: list[float] = []
        look = pace._measure

        def count(*args: Any, look: Any = look, seen: list[float] = seen) -> None:
            look(*args)
            seen.append(1.0)

        pace._measure = count  # type: ignore[method-assign]
        pace._measured = -3600.0 * 10
        model = module()
        trainer(tmp_path, callbacks=[pace]).fit(model, batches(5))
        assert len(seen) == measurements
        ends.append(model.state_dict())
    assert all(torch.equal(ends[0][name], end[name]) for end in ends for name in end)


def test_rate_excludes_validation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slow validation does not lower the rate; slow steps do. The clock stands still otherwise."""
    model = module()
    step, validate = model.training_step, model.validation_step
    clock = [100.0]
    monkeypatch.setattr(progress_module, "time", SimpleNamespace(monotonic=lambda: clock[0]))

    def slow_step(*args: Any) -> Any:
        clock[0] += 0.1
        return step(*args)

    def slow_validation(*args: Any) -> None:
        clock[0] += 0.5
        validate(*args)

    model.training_step, model.validation_step = slow_step, slow_validation  # type: ignore[method-assign]
    logger = MetricsFile(tmp_path)
    options: dict[str, Any] = {"logger": logger, "log_every_n_steps": 2, "val_check_interval": 3}
    trainer(tmp_path, callbacks=[Pace()], **options).fit(model, batches(6), batches(1))
    rates = [float(row["train/requests_per_second"]) for row in read_rows(logger.path) if row["train/loss"]]
    assert len(rates) == 3
    assert rates == pytest.approx([16 / 0.1] * 3)


def test_plain_progress_writes_lines_for_a_log(tmp_path: Path) -> None:
    lines: list[str] = []
    pace = Pace(every=0.0)
    run = trainer(tmp_path, callbacks=[pace, Progress(pace, lines.append, every=0.0)], enable_progress_bar=True)
    run.fit(module(), batches(2), batches(1))
    run.test(module(), batches(2), verbose=False)
    assert lines[0].startswith("epoch 1/1  batch 1/2  loss ")
    assert "requests/s" in lines[0]
    assert "train recall (12)" in lines[0]
    assert lines[2] == "validation  batch 1/1"
    assert "val recall (12) 0." in lines[3]
    assert lines[-1] == "test  batch 2/2"


@pytest.mark.parametrize("width", [60, 100, 130])
def test_terminal_keeps_one_line_per_epoch_and_shows_the_total_time_left(
    width: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What a terminal shows: text after the last carriage return of each line."""
    monkeypatch.setenv("COLUMNS", str(width))
    pace, lines = Pace(every=0.0), list[str]()
    progress = Progress(pace, lines.append, terminal=True)
    progress.every = 0.0
    model = module()
    trainer(tmp_path, callbacks=[pace, progress], max_epochs=3, enable_progress_bar=True).fit(
        model, batches(4), batches(1)
    )
    assert [line.partition("  ")[0] for line in lines] == ["epoch 1/3", "epoch 2/3", "epoch 3/3"]
    assert all(re.search(r"val recall \(12\) [01]\.\d{3}", line) and len(line) <= width for line in lines)
    assert len(lines[-1].partition("val recall (12) ")[2].split()[1]) == 3  # a bar per epoch
    drawn = [part for part in capsys.readouterr().out.split("\r\x1b[K") if "epoch" in part]
    assert len(drawn) == 12
    assert all(len(line) < width for line in drawn)
    assert all(line.endswith(" left") for line in drawn[1:])  # from the second step to the last


@pytest.mark.parametrize("width", [60, 80, 100, 130])
@pytest.mark.parametrize("epochs", ["epoch 1/3", "epoch 100/1000"])
def test_progress_line_fits_the_width_and_shows_values_in_order(width: int, epochs: str) -> None:
    values = {"loss": "10.912", "val recall (200)": "0.301", "train recall (65)": "0.777", "requests/s": "12,345"}
    line = progress_line(width, epochs, 812, 1234, values, 1234.5)
    assert len(line) <= width
    assert line.startswith(epochs)
    assert "812/1234  loss 10.912" in line
    shown = [name for name in values if f"{name} {values[name]}" in line]
    assert shown == list(values)[: len(shown)]
    assert line.endswith("  0:20:34 left")
    assert len(shown) >= {60: 1, 80: 1, 100: 2, 130: 3}[width]


def test_a_value_is_shown_without_its_sparkline_if_that_does_not_fit() -> None:
    values = {"loss": "1.000", "val recall (200)": "0.301 ▁▂▃▄▅▆▇█▁▂▃▄"}
    assert progress_line(80, "epoch 9/9", 1, 8, values).endswith("1/8  loss 1.000  val recall (200) 0.301 ▁▂▃▄▅▆▇█▁▂▃▄")
    assert progress_line(65, "epoch 9/9", 1, 8, values).endswith("1/8  loss 1.000  val recall (200) 0.301")


def test_shown_loss_is_the_unweighted_sum_of_the_terms(tmp_path: Path) -> None:
    """Learned weights can make the total negative; the shown loss is not."""
    pace, model = Pace(every=None), module(objective="joint")
    with torch.no_grad():
        for parameter in model.objective.parameters():
            parameter.fill_(-20.0)
    run = trainer(tmp_path, callbacks=[pace])
    run.fit(model, batches(1))
    terms = [float(value) for name, value in run.callback_metrics.items() if name.startswith("train/loss_")]
    assert len(terms) == 3
    assert pace.values(run)["loss"] == f"{sum(terms):.3f}"


def test_shown_loss_is_the_mean_of_the_steps_that_have_a_term(tmp_path: Path) -> None:
    """A stage may train in some steps only; the last step of an epoch must not decide what is shown."""
    pace, model, logged = Pace(every=None), module(objective="joint"), list[list[float]]()
    step = model.training_step

    def second_step_without_a_term(batch: Any, batch_idx: int) -> Any:
        total = step(batch, batch_idx)
        if batch_idx == 1:
            model.newest_terms[0] = 0.0
        logged.append(model.newest_terms.tolist())
        return total

    model.training_step = second_step_without_a_term  # type: ignore[method-assign]
    run = trainer(tmp_path, callbacks=[pace])
    run.fit(model, batches(2))
    (first, *others), (_, *second) = logged
    expected = first + sum((a + b) / 2 for a, b in zip(others, second, strict=True))
    assert float(pace.values(run)["loss"]) == pytest.approx(expected, abs=6e-4)


def test_a_monitored_metric_over_the_catalogue_is_shown(tmp_path: Path) -> None:
    pace, model = Pace(every=None), module()
    model.monitor = "recall@20/corpus"
    run = trainer(tmp_path, callbacks=[pace])
    run.fit(model, batches(1))
    run.callback_metrics["val/recall@20/corpus"] = torch.tensor(0.25)
    pace._recalls = [0.1, 0.25]
    assert pace.values(run)["val recall@20 (all items)"] == "0.250 ▁█"


def test_terminal_removes_the_line_of_the_test_before_other_lines_follow(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Says(Callback):  # type: ignore[misc]  # lightning is untyped here
        def on_test_epoch_end(self, *_: Any) -> None:
            sys.stdout.write("scoring all items")

    pace = Pace(every=None)
    progress = Progress(pace, lambda line: None, terminal=True)
    progress.every = 0.0
    trainer(tmp_path, callbacks=[pace, progress, Says()], enable_progress_bar=True).test(
        module(), batches(1), verbose=False
    )
    assert "\r\x1b[Kscoring all items" in capsys.readouterr().out
