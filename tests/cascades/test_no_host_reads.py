"""Metrics, negatives, steps, optimizers and flat lists read no values on the host, so they never wait.

The contract suite checks losses, operators, objectives and stages. Tables with fused optimizers are checked except for
FBGEMM's kernels, which do not run on the test device.
"""

from __future__ import annotations

import copy
import importlib
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torchrec.modules.fused_embedding_modules import FusedEmbeddingBagCollection
from torchrec.sparse import jagged_tensor

from recsys_topk import losses, operators
from recsys_topk.cascades import layers
from recsys_topk.cascades.features import FeatureEmbedding
from recsys_topk.cascades.layers import MLP
from recsys_topk.cascades.learning_check import LearningCheck
from recsys_topk.cascades.module import CascadeModule
from recsys_topk.cascades.objectives import base
from recsys_topk.cascades.objectives.base import registry as objectives
from recsys_topk.cascades.optimizers import OPTIMIZERS, fused_optimizer
from recsys_topk.cascades.stage import StageConfig
from recsys_topk.cascades.tables import FUSED, configs_of, is_fused
from recsys_topk.datamodules.base import CascadeDataModule
from recsys_topk.datamodules.batch import CascadeBatch
from recsys_topk.metrics.mean import registry as metrics
from recsys_topk.testing.host_reads import DEVICE, HostReadError, no_host_reads
from tests.cascades.batches import mixed_schema, random_batch, recflow_like_schema
from tests.datamodules.in_memory import InMemory

READS = {
    "item": lambda x: x.sum().item(),
    "truth": lambda x: bool((x > 0).any()),
    "copy": lambda x: x.cpu(),
    "numpy": lambda x: x.numpy(),
    "list": lambda x: x.tolist(),
    "mask": lambda x: x[x > 0],
    "assignment": lambda x: x.__setitem__(x > 0, x[0, 0].expand(6)),
    "nonzero": lambda x: x.nonzero(),
    "indices": lambda x: x[[0, 1]],
    "host indices": lambda x: x[torch.tensor([0, 1])],
    "upload": lambda x: x + torch.tensor([1.0, 2.0, 3.0], device=x.device),
    "scalar": lambda x: x + torch.as_tensor(1.0, device=x.device),
    "equal": lambda x: torch.equal(x, x),
    "unique": lambda x: x.unique(),
    "bincount": lambda x: torch.bincount(x[0].long()),
    "repeat": lambda x: x.repeat_interleave(x[:, 0].long(), 0),
    "backward": lambda x: x.clone().requires_grad_().prod(1).sum().backward(),
}


@pytest.mark.parametrize("kind", READS)
def test_device_detects_host_reads(kind: str) -> None:
    READS[kind](torch.ones(2, 3))
    with no_host_reads(), pytest.raises(HostReadError):
        READS[kind](torch.ones(2, 3, device=DEVICE))


@pytest.mark.parametrize("schema", [mixed_schema(), recflow_like_schema()], ids=["mixed", "recflow"])
@pytest.mark.parametrize("history", ["rows", "mean"])
def test_embedding_reads_no_values(schema: Any, history: Any) -> None:
    batch, embedding = random_batch(schema).to(DEVICE), FeatureEmbedding(schema, 4, device=DEVICE)
    with no_host_reads():
        found = embedding(batch, history=history)
        (found.request.sum() + found.items.sum() + found.history.sum()).backward()


@pytest.mark.parametrize("name", metrics.available())
def test_metrics_read_no_values(name: str) -> None:
    batch, cls = random_batch(recflow_like_schema()).to(DEVICE), metrics.resolve(name)
    options = {"k": 3, "m": 4, "quotas": (5, 4), "operator": operators.get("dftopk")}
    accepted = cls.__init__.__annotations__
    metric = cls(**{key: value for key, value in options.items() if key in accepted}).to(DEVICE)
    scores = torch.zeros(batch.labels.shape, device=DEVICE)
    with no_host_reads():
        metric.update([scores, scores] if cls.whole_cascade else scores, batch.labels, batch.mask)


def device_batch(data: CascadeDataModule, *, training: bool) -> CascadeBatch:
    """Return a batch on the device with its negatives, as Lightning makes it; the catalogue is moved before."""
    split = "train" if training else "val"
    batch = next(iter(data.loader([split], training=training))).to(DEVICE)
    data.catalogue(split, DEVICE)
    with no_host_reads():
        return data.on_after_batch_transfer(batch, 0)


STEPS = [("joint", number, source) for number in (2, 3) for source in ("in_batch", "uniform")]
STEPS += [("joint", 2, "popularity"), ("joint", 2, {"in_batch": 10, "popularity": 15})]
STEPS += [(name, 3, "uniform") for name in objectives.available() if name != "joint"]


@pytest.mark.parametrize(("objective", "number", "source"), STEPS)
def test_training_and_validation_steps_read_no_values(
    objective: str, number: int, source: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = InMemory(train_negatives=25, negative_source=source)
    chosen = [StageConfig("two_tower", "a", 9), StageConfig("din", "b", 6), StageConfig("mlp", "c", 5)][:number]
    data.sampling_probabilities = objective == "quota"
    loss = "sigmoid" if objective == "quota" else "dftopk"
    model = CascadeModule(data.schema, chosen, loss, objective, k=3, validate=True).to(DEVICE)
    model.trainer = pl.Trainer(logger=False, enable_checkpointing=False, accelerator="cpu", enable_progress_bar=False)
    monkeypatch.setattr(model, "log", lambda *_, **__: None)
    model._check = LearningCheck(0.0, [3], [9, 6, 5])
    for step in range(2):
        batch = device_batch(data, training=True)
        assert batch.candidates.shape == (16, 8 + 25)
        with no_host_reads():
            model.training_step(batch, step).backward()
    evaluated = device_batch(data, training=False)
    with no_host_reads(), torch.no_grad():
        model.eval().validation_step(evaluated, 0)


@pytest.fixture
def fused_optimizers_on_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let optimizers use fused kernels on the device; foreach kernels where torch has no fake fused ones."""
    module = importlib.import_module("torch.optim.optimizer")
    known = module._get_fused_kernels_supported_devices()
    monkeypatch.setattr(module, "_get_fused_kernels_supported_devices", lambda: [*known, DEVICE.type])
    for name in ("adagrad", "sgd"):
        kind: Any = OPTIMIZERS[name]
        monkeypatch.setitem(
            OPTIMIZERS, name, lambda given, fused, kind=kind, **options: kind(given, foreach=fused, **options)
        )


@pytest.mark.usefixtures("fused_optimizers_on_device")
@pytest.mark.parametrize("clip", ["norm", "value"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizer_schedule_and_clipping_read_no_values(name: Any, clip: str, monkeypatch: pytest.MonkeyPatch) -> None:
    data = InMemory()
    chosen = [StageConfig("two_tower", "a", 9), StageConfig("mlp", "b", 5)]
    model = CascadeModule(data.schema, chosen, k=3, optimizer=name, warmup_steps=2).to(DEVICE)
    model.trainer = pl.Trainer(logger=False, enable_checkpointing=False, accelerator="cpu", enable_progress_bar=False)
    monkeypatch.setattr(model, "log", lambda *_, **__: None)
    made = model.configure_optimizers()
    optimizer, schedule = made["optimizer"], made["lr_scheduler"]["scheduler"]
    batch = device_batch(data, training=True)
    for step in range(2):
        with no_host_reads():
            optimizer.zero_grad()
            model.training_step(batch, step).backward()
            model.configure_gradient_clipping(optimizer, 1.0, clip)
            optimizer.step()
            schedule.step()
    assert len(optimizer.state) == len(list(model.parameters())) or name == "sgd"


def without_kernel(common: Any, *_: Any, **__: Any) -> torch.Tensor:
    """Return zeros with the shape and the graph of the result of an FBGEMM kernel."""
    bags = (common.offsets.numel() - 1) // (common.D_offsets.numel() - 1)
    return common.placeholder_autograd_tensor.sum() + common.indice_weights.new_zeros(bags, common.total_D)


def given_length_per_key(*_: Any, length_per_key: list[int] | None, **__: Any) -> list[int]:
    """Replace a function of TorchRec that invents lengths on this device, and reads them on other devices."""
    if length_per_key is None:
        raise HostReadError("TorchRec reads the lengths on the host")
    return length_per_key


def fuse_on_device(model: CascadeModule, rule: Any) -> None:
    """Replace the tables of a model on the device, which are plain, by tables with a fused optimizer."""
    fused = fused_optimizer(rule, 0.1)
    assert fused is not None
    for embedding in (part for part in model.modules() if isinstance(part, FeatureEmbedding)):
        for name, plain in embedding.collections.items():
            made = FusedEmbeddingBagCollection(
                configs_of(plain), fused.optimizer, dict(fused.options), is_weighted=True, device=DEVICE
            )
            for kernel in made._emb_modules:
                # At the first step of a process FBGEMM reads a counter of steps that may come from a checkpoint.
                kernel._emb_module.iter_cpu.fill_(1)
            embedding.collections[name], embedding._weighted[name] = made, True


@pytest.mark.usefixtures("fused_optimizers_on_device")
@pytest.mark.parametrize("source", ["in_batch", "uniform"])
@pytest.mark.parametrize("rule", FUSED)
def test_tables_with_a_fused_optimizer_read_no_values(rule: Any, source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = "fbgemm_gpu.split_embedding_codegen_lookup_invokers.lookup_"
    monkeypatch.setattr(importlib.import_module(kernels + rule), "invoke", without_kernel)
    monkeypatch.setattr(jagged_tensor, "_maybe_compute_length_per_key", given_length_per_key)
    data = InMemory(train_negatives=25, negative_source=source)
    chosen = [StageConfig("two_tower", "a", 9), StageConfig("din", "b", 6), StageConfig("mlp", "c", 5)]
    model = CascadeModule(data.schema, chosen, k=3, validate=True, embedding_optimizer=rule, warmup_steps=2).to(DEVICE)
    fuse_on_device(model, rule)
    model.trainer = pl.Trainer(logger=False, enable_checkpointing=False, accelerator="cpu", enable_progress_bar=False)
    monkeypatch.setattr(model, "log", lambda *_, **__: None)
    made = model.configure_optimizers()
    optimizer, schedule = made["optimizer"], made["lr_scheduler"]["scheduler"]
    for step in range(2):
        batch = device_batch(data, training=True)
        with no_host_reads():
            optimizer.sync_tables()
            optimizer.zero_grad()
            model.training_step(batch, step).backward()
            optimizer.step()
            schedule.step()
    evaluated = device_batch(data, training=False)
    with no_host_reads(), torch.no_grad():
        model.eval().validation_step(evaluated, 0)
    embeddings = [part for part in model.modules() if isinstance(part, FeatureEmbedding)]
    assert all(is_fused(part) for embedding in embeddings for part in embedding.collections.values())


@pytest.mark.parametrize("lists", [{"lengths": [3, 0, 1, 4]}, {"list_ids": torch.tensor([2, 0, 2, 7, 7, 2, 7, 7])}])
@pytest.mark.parametrize("name", ["dftopk", "lapsum", "lambdaloss", "listnet"])
def test_flat_lists_with_lengths_on_the_host_read_no_values(name: str, lists: dict[str, Any]) -> None:
    scores, labels = torch.zeros(8, device=DEVICE, requires_grad=True), torch.ones(8, device=DEVICE)
    with no_host_reads():
        losses.get(name, k=2)(scores, labels, **lists).backward()
    assert scores.grad is not None


@pytest.mark.parametrize("lists", ["lengths", "list_ids"])
def test_flat_lists_with_lengths_on_the_device_are_read(lists: Any) -> None:
    x, given = torch.zeros(8, device=DEVICE), torch.zeros(8, dtype=torch.int64, device=DEVICE)
    with no_host_reads(), pytest.raises(HostReadError, match=r"flat\.py"):
        losses.get("dftopk", k=2)(x, x, **{lists: given})


def set_bias(model: CascadeModule, value: float) -> None:
    with torch.no_grad():
        model.cascade.stages["b"].mlp.last.bias.fill_(value)


def test_non_finite_scores_raise_one_step_later(monkeypatch: pytest.MonkeyPatch) -> None:
    data = InMemory()
    chosen = [StageConfig("two_tower", "a", 5), StageConfig("mlp", "b", 4)]
    model = CascadeModule(data.schema, chosen, k=3)
    model.trainer = pl.Trainer(logger=False, enable_checkpointing=False, accelerator="cpu", enable_progress_bar=False)
    monkeypatch.setattr(model, "log", lambda *_, **__: None)
    batch = data.add_negatives(next(iter(data.loader(["train"], training=True))))
    set_bias(model, torch.inf)
    with pytest.raises(ValueError, match=r"valid scores are not finite; the first is scores\[") as now:
        model.training_step(batch, 0)
    monkeypatch.setattr(base, "may_read", lambda _: False)  # as on devices other than the CPU
    model.training_step(batch, 0)
    set_bias(model, 0.0)
    with pytest.raises(ValueError, match="one step later") as later:
        model.training_step(batch, 1)
    assert str(later.value).startswith(str(now.value))
    model.training_step(batch, 2)
    model.on_train_epoch_end()
    set_bias(model, torch.nan)
    model.training_step(batch, 3)
    with pytest.raises(ValueError, match="= nan"):
        model.on_train_epoch_end()


def test_batch_norm_without_reading_the_mask_equals_batch_norm_of_real_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = torch.Generator().manual_seed(0)
    x, mask = torch.randn(4, 6, 3, generator=draw) * 5 + 100, torch.rand(4, 6, generator=draw) < 0.6
    one = MLP([3], [8, 5, 1], batch_norm=0.9)
    other = copy.deepcopy(one)
    expected = one(x.requires_grad_(), mask)
    monkeypatch.setattr(layers, "may_read", lambda _: False)
    found = other(x, mask)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    weights = torch.randn(found.shape, generator=draw)
    for a, b in zip(*(torch.autograd.grad((y * weights).sum(), x) for y in (found, expected)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)
    for name, value in one.state_dict().items():
        torch.testing.assert_close(other.state_dict()[name], value, rtol=1e-5, atol=1e-5)
