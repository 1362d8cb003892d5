"""Features of the data module base class: registry, hyper-parameters, restoring from checkpoints, early errors."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np
import pytest
import torch
from hand_made import SMALL
from in_memory import InMemory
from lightning.pytorch import Trainer
from lightning.pytorch.trainer.states import TrainerFn

from recsys_topk import datamodules
from recsys_topk.datamodules import CascadeDataModule, RecFlowDataModule, WorldConfig, data_spec, restore
from recsys_topk.datamodules.base import DataOptions
from recsys_topk.datamodules.prepare.base import PreparedDataModule, PreparedOptions
from recsys_topk.registry import UnknownNameError
from recsys_topk.spec import options_of

FIXTURES = Path(__file__).parents[1] / "fixtures" / "v0_1"
RECFLOW = "recsys_topk.datamodules.recflow.datamodule.RecFlowDataModule"


def test_data_modules_are_found_by_name_class_name_and_path() -> None:
    assert "recflow" in datamodules.available()
    for name in ("recflow", "RecFlowDataModule", RECFLOW):
        assert datamodules.registry.resolve(name) is RecFlowDataModule
    assert isinstance(datamodules.get("recflow", batch_size=3), RecFlowDataModule)
    with pytest.raises(UnknownNameError, match="unknown data module 'recflw'; did you mean 'recflow'"):
        datamodules.get("recflw")


_PLUGIN = """
from recsys_topk.datamodules import RecFlowDataModule

class Logs(RecFlowDataModule):
    name = "logs"
"""
_USE = """
from recsys_topk.datamodules import available, get, restore
data = get("logs", batch_size=3)
print(available(), type(restore(data.hparams)).__name__)
"""


def test_installed_package_adds_a_data_module_that_files_can_name(tmp_path: Path) -> None:
    (tmp_path / "team_data.py").write_text(_PLUGIN)
    info = tmp_path / "team_data-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: team-data\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[recsys_topk.datamodules]\nlogs = team_data\n")
    paths = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-c", _USE], capture_output=True, text=True, env={**os.environ, "PYTHONPATH": paths}
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "('interactions', 'lists', 'logs', 'recflow') Logs"


def test_package_exports_its_public_names() -> None:
    for name in dir(datamodules):
        assert getattr(datamodules, name) is not None
    with pytest.raises(AttributeError, match="has no attribute 'Recflow'"):
        _ = datamodules.Recflow


_LIGHT = """
import sys
from recsys_topk.datamodules import Schema, WorldConfig, cache_home, data_spec
from recsys_topk.datamodules.recflow import DayCache, RecFlowFiles, select_days
print([m for m in ("torch", "lightning", "datasets") if m in sys.modules])
"""


def test_data_commands_import_no_heavy_libraries() -> None:
    found = subprocess.run([sys.executable, "-c", _LIGHT], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


def test_hyper_parameters_are_the_constructor_arguments(tmp_path: Path) -> None:
    data = RecFlowDataModule("world", SMALL, eval_negatives=7, cache_dir=str(tmp_path))
    saved = dict(data.hparams)
    assert saved["class_path"] == RECFLOW
    assert (saved["root"], saved["eval_negatives"], saved["batch_size"]) == ("world", 7, 1024)
    assert saved["world"]["users"] == SMALL.users
    torch.save(saved, tmp_path / "saved.pt")
    read = torch.load(tmp_path / "saved.pt", weights_only=True)
    again = restore(read)
    assert type(again) is RecFlowDataModule
    assert dict(again.hparams) == saved
    assert (again.world, again.eval_negatives, again.cache_dir) == (SMALL, 7, str(tmp_path))
    assert restore(read, batch_size=5).batch_size == 5


@pytest.mark.parametrize("run", ["plain", "fused", "named"])
def test_checkpoint_of_version_0_1_restores_recflow(run: str) -> None:
    content = torch.load(FIXTURES / run / "checkpoints" / "last.ckpt", weights_only=True)
    saved = content["datamodule_hyper_parameters"]
    assert "class_path" not in saved
    data = restore(saved)
    assert type(data) is RecFlowDataModule
    assert data.world == WorldConfig(**saved["world"])
    assert {name: data.hparams[name] for name in saved} == saved


def test_loader_state_of_version_0_1_resumes() -> None:
    state = torch.load(FIXTURES / "plain" / "checkpoints" / "last.ckpt", weights_only=True)["RecFlowDataModule"]
    assert "day" in state
    data = restore(
        torch.load(FIXTURES / "plain" / "checkpoints" / "last.ckpt", weights_only=True)["datamodule_hyper_parameters"]
    )
    data.prepare_data()
    data.load_state_dict(state)
    loader = data.train_dataloader()
    expected = {"seed": 42, "epoch": 1, "shard": state["day"], "offset": state["offset"]}
    assert loader.state_dict() == {**expected, "global_batch": data.batch_size}


def test_custom_data_module_is_restored() -> None:
    data = InMemory(requests=30, batch_size=4)
    assert data_spec(data.hparams)["class_path"] == "in_memory.InMemory"
    again = restore(data.hparams, trust=("in_memory",))
    assert type(again) is InMemory
    assert dict(again.hparams) == dict(data.hparams)


class FromFrame(InMemory):
    """Takes an argument that no checkpoint can hold, and keyword options."""

    def __init__(self, frame: Any, folder: Path = Path("here"), **options: Any) -> None:
        super().__init__(**options)
        self.frame = frame


def test_arguments_that_are_not_plain_values_must_be_given_again() -> None:
    data = FromFrame(torch.zeros(3), batch_size=4)
    saved = dict(data.hparams)
    assert saved["left_out"] == ["frame"]
    assert (saved["folder"], saved["batch_size"]) == ("here", 4)
    with pytest.raises(ValueError, match=r"frame of .*FromFrame cannot be saved .*restore\(saved, frame=\.\.\.\)"):
        restore(saved, trust=(__name__,))
    again = restore(saved, trust=(__name__,), frame="other")
    assert isinstance(again, FromFrame)
    assert (again.frame, again.batch_size) == ("other", 4)


def test_restore_of_another_class_raises() -> None:
    with pytest.raises((TypeError, ValueError), match=r"Fraction|CascadeDataModule"):
        restore({"class_path": "fractions.Fraction", "numerator": 1})


def test_argument_named_class_path_raises() -> None:
    class Confused(InMemory):
        def __init__(self, class_path: str = "x") -> None:
            super().__init__()

    with pytest.raises(TypeError, match="Confused has an argument 'class_path'"):
        Confused()


@pytest.mark.parametrize("split", ["train", "val", "test"])
def test_list_length_includes_negatives(split: Any) -> None:
    data: CascadeDataModule = InMemory(train_negatives=3, eval_negatives=11)
    lengths = {data.add_negatives(batch).candidates.shape[1] for batch in getattr(data, f"{split}_dataloader")()}
    assert lengths == {data.list_length(split)}
    recflow = RecFlowDataModule(layout="three-stage", train_negatives=3, eval_negatives=11)
    assert recflow.list_length(split) == 50 + (3 if split == "train" else 11)


@pytest.mark.parametrize("source", ["uniform", "popularity", "in_batch"])
def test_evaluation_negatives_come_from_their_source(source: Any) -> None:
    data = InMemory(eval_negatives=6, eval_negative_source=source, eval_batch_size=4)
    batch = next(iter(data.test_dataloader()))
    expanded = data.add_negatives(batch)
    width = batch.candidates.shape[1]
    pool = set(batch.item_id[batch.candidates[batch.mask]].tolist())
    seen, frequent, drawn = set(), [], expanded.item_id[expanded.candidates[:, width:]]
    for row in range(batch.size):
        own = set(batch.item_id[batch.candidates[row][batch.mask[row]]].tolist())
        negatives = set(drawn[row][expanded.mask[row, width:]].tolist())
        assert len(negatives) == 6
        assert not negatives & own
        seen |= negatives
    catalogue = data.catalogue("test")
    frequent = catalogue.count[catalogue.rows(drawn.flatten())].float().mean()
    assert (seen <= pool) == (source == "in_batch")
    assert data.lists_text("test") == f"lists of {width + 6} with 6 {source} negatives"
    assert frequent >= 1
    with pytest.raises(ValueError, match="must be one of uniform, popularity, in_batch, got 'slots'"):
        InMemory(eval_negative_source="slots")


def test_validation_without_validation_shards_raises(tmp_path: Path) -> None:
    class NoValidation(InMemory):
        @property
        def splits(self) -> dict[str, tuple[str, ...]]:
            return {"train": ("train",), "val": (), "test": ("test",)}

    data = NoValidation()
    trainer = Trainer(logger=False, default_root_dir=tmp_path, enable_progress_bar=False)
    trainer.state.fn = TrainerFn.VALIDATING
    data.trainer = trainer
    with pytest.raises(ValueError, match=r"^the data have nothing for validation; use test$"):
        data.val_dataloader()


def test_invalid_options_raise() -> None:
    with pytest.raises(ValueError, match=r"negative_source must be one of in_batch, .*popularity.*, got 'hard'"):
        InMemory(negative_source="hard")
    with pytest.raises(ValueError, match="eval_batch_size must be at least 1, got 0"):
        InMemory(eval_batch_size=0)
    with pytest.raises(ValueError, match="num_workers must not be negative, got -1"):
        InMemory(num_workers=-1)


@pytest.mark.parametrize(("cls", "options"), [(CascadeDataModule, DataOptions), (PreparedDataModule, PreparedOptions)])
def test_passed_on_options_are_those_of_the_base_class(cls: type, options: type) -> None:
    declared, hints = options_of(cls), get_type_hints(cls.__init__)
    passed_on = get_type_hints(options)
    assert set(passed_on) <= set(declared)
    for home in cls.__mro__:
        hints = {**get_type_hints(home.__init__), **hints} if "__init__" in vars(home) else hints
    assert {name: hints[name] for name in passed_on} == passed_on
    if cls is CascadeDataModule:
        assert set(passed_on) == set(declared)


def test_options_of_the_base_class_are_checked_and_saved(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"InteractionsDataModule has no option 'sead'; did you mean 'seed'\?"):
        datamodules.get("interactions", root=str(tmp_path), sead=1)
    saved = datamodules.get("interactions", root=str(tmp_path), seed=7).hparams
    assert (saved["seed"], saved["batch_size"], saved["train_negatives"], saved["shuffle"]) == (7, 256, 100, True)
    assert "options" not in saved
    assert restore(saved).seed == 7


def test_newest_requests_are_left_out_of_training_in_every_epoch_and_are_the_last() -> None:
    def ids(batches: Any) -> list[int]:
        return [one for batch in batches for one in batch.request_id.tolist()]

    data = InMemory(requests=41)
    every = ids(data.loader(["train"], training=False))
    order = np.random.default_rng([42, 0, data.shard("train").order_key]).permutation(41)
    assert ids(data.loader(["train"], training=True)) == [every[at] for at in order]
    data.newest = 0.1
    loader = data.train_dataloader()
    assert loader.requests == 37
    first, second = ids(loader), ids(loader)
    assert sorted(first) == sorted(second) == sorted(every[:37])
    assert first != second
    assert ids(data.newest_requests("train")) == every[37:]
    assert ids(data.loader(["train"], training=False)) == every
