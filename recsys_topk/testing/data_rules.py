"""The rules for all data modules. They use only the interface of `CascadeDataModule`."""

from __future__ import annotations

import json
import os
import pickle
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from recsys_topk.datamodules.batch import CascadeBatch
from recsys_topk.tabular.schema import PARTS, VARIANT, Schema
from recsys_topk.testing.comparison import require, rules_for

if TYPE_CHECKING:
    from recsys_topk.datamodules.base import CascadeDataModule

Split = Literal["train", "val", "test"]
SPLITS: tuple[Split, ...] = ("train", "val", "test")
NEGATIVES = 3
LARGEST_GRADE = 30.0
"""Largest label that is accepted as a grade: graded losses use the gain 2^label - 1."""


class DataSubject:
    """A data module under test; `make` returns it, or is its class."""

    def __init__(self, make: Callable[[], CascadeDataModule]) -> None:
        self._make = make
        self.name = type(make()).__name__

    def build(self, *, rank: int = 0, processes: int = 1, **settings: Any) -> CascadeDataModule:
        """Return a new, prepared data module with the given attributes, as one of several processes."""
        data = self._make()
        data.prepare_data()
        data.setup("fit")
        for name, value in settings.items():
            setattr(data, name, value)
        data._share = lambda: (rank, processes)  # type: ignore[method-assign]
        return data


def _loaded(data: CascadeDataModule, split: Split) -> Iterator[CascadeBatch]:
    """Yield the batches of a split as a model gets them."""
    for batch in getattr(data, f"{split}_dataloader")():
        yield data.on_after_batch_transfer(batch, 0)


def _same(a: CascadeBatch, b: CascadeBatch) -> bool:
    pairs = [(getattr(a, field.name), getattr(b, field.name)) for field in fields(CascadeBatch)]
    return all(torch.equal(x, y) if isinstance(x, Tensor) else x == y for x, y in pairs)


def _by_request(batches: Iterator[CascadeBatch]) -> list[tuple[int, Any]]:
    """Return the id and the list of each request: item ids (-1 where masked), labels and groups."""
    found: list[tuple[int, Any]] = []
    for batch in batches:
        items = torch.where(batch.mask, batch.item_id[batch.candidates], -1)
        rows = zip(items.tolist(), batch.labels.tolist(), batch.group.tolist(), strict=True)
        found += zip(batch.request_id.tolist(), rows, strict=True)
    return found


def the_outline_is_known_before_preparation(subject: DataSubject) -> None:
    """`outline` prepares nothing and writes no file to the cache, and it agrees with the schema."""

    def refuse(*_: Any, **__: Any) -> None:
        require(False, "asking for the outline prepares data; override `outline`", subject.name)

    data = subject._make()
    for name in ("prepare_data", "setup", "open_shard"):
        setattr(data, name, refuse)
    with tempfile.TemporaryDirectory() as home, mock.patch.dict(os.environ, {"RECSYS_TOPK_CACHE": home}):
        outline = data.outline
        written = sorted(path.name for path in Path(home).rglob("*"))
    require(not written, f"asking for the outline writes {', '.join(written[:3])}; override `outline`", subject.name)
    found = subject.build().schema.outline
    require(found == outline, f"the outline is {outline} before, and {found} after preparation", subject.name)


def the_schema_can_be_stored(subject: DataSubject) -> None:
    """The schema survives `to_dict`, and every split has named shards."""
    data = subject._make()
    schema = data.schema
    require(Schema.from_dict(schema.to_dict()) == schema, "the schema differs after to_dict and from_dict", schema)
    splits = data.splits
    require(set(splits) >= set(SPLITS), f"splits must have {', '.join(SPLITS)}", splits)
    require(all(isinstance(name, str) for names in splits.values() for name in names), "shards need names", splits)


def batches_match_the_schema(subject: DataSubject) -> None:
    """Tensors have the shapes and dtypes of `CascadeBatch`, ids are rows of their tables, values are finite."""
    data = subject.build()
    schema = data.schema
    for split in SPLITS:
        for number, batch in enumerate(_loaded(data, split)):
            _require_schema(batch, schema, f"batch {number} of {split}")


def _require_schema(batch: CascadeBatch, schema: Schema, given: str) -> None:
    size, pool, length = batch.size, batch.item_id.numel(), batch.history.shape[1]
    integer = ("request_id", "request", "history", "history_length", "item_id", "items", "candidates", "group")
    for name in integer:
        dtype = getattr(batch, name).dtype
        require(dtype == torch.int64, f"{name} has dtype {dtype}, expected int64", given)
    require(batch.request_id.shape == (size,), f"request_id has shape {tuple(batch.request_id.shape)}", given)
    require(batch.history_length.shape == (size,), "history_length must have one entry per request", given)
    shapes = {"request": (size,), "history": (size, length), "items": (pool,)}
    for part in PARTS:
        ids: Tensor = getattr(batch, part)
        values: Tensor = batch.item_values if part == "items" else getattr(batch, f"{part}_values")
        id_columns, value_columns = schema.id_columns(part), schema.value_columns(part)
        wide = sum(column.stop - column.start for column in id_columns.values())
        expected = (*shapes[part], wide)
        require(ids.shape == expected, f"{part} ids have shape {tuple(ids.shape)}, expected {expected}", given)
        for feature in schema.features(part):
            if feature.table is None or not ids.numel():
                continue
            here, rows = ids[..., id_columns[feature.name]], schema.table(feature.table).rows
            low, high = int(here.min()), int(here.max())
            require(low >= 0 and high < rows, f"{part} feature {feature.name!r} has ids {low}..{high}, "
                    f"but table {feature.table!r} has {rows} rows", given)  # fmt: skip
        wide = sum(column.stop - column.start for column in value_columns.values())
        expected = (*shapes[part], wide) if wide else (0, 0)
        require(values.shape == expected, f"{part} values have shape {tuple(values.shape)}, expected {expected}", given)
        require(values.dtype == torch.float32, f"{part} values have dtype {values.dtype}, expected float32", given)
        require(bool(values.isfinite().all()), f"{part} values are not finite", given)
    counts = batch.history_length
    require(bool(((counts >= 0) & (counts <= length)).all()), f"history_length must be in 0..{length}", given)
    absent = ~batch.history_mask
    for feature in schema.history:
        if feature.table is not None:
            padding = schema.table(feature.table).padding
            held = batch.history[..., schema.id_columns("history")[feature.name]][absent]
            require(bool((held == padding).all()), f"history feature {feature.name!r} must have the padding id "
                    f"{padding} after the last view", given)  # fmt: skip
    if schema.value_columns("history"):
        require(bool((batch.history_values[absent] == 0).all()), "history values must be 0 after the last view", given)


def lists_are_consistent(subject: DataSubject) -> None:
    """Pool items are distinct; padding has label 0, group -1 and index 0; labels are finite and >= 0."""
    data = subject.build()
    groups = len(data.schema.groups)
    for split in SPLITS:
        for number, batch in enumerate(_loaded(data, split)):
            given = f"batch {number} of {split}"
            shape, mask = batch.candidates.shape, batch.mask
            for name in ("labels", "mask", "group"):
                found = tuple(getattr(batch, name).shape)
                require(found == shape, f"{name} has shape {found}, but candidates have {tuple(shape)}", given)
            require(mask.dtype == torch.bool, f"mask has dtype {mask.dtype}", given)
            require(batch.labels.dtype == torch.float32, f"labels have dtype {batch.labels.dtype}", given)
            pool = batch.item_id.numel()
            require(torch.unique(batch.item_id).numel() == pool, "the pool contains an item id twice", given)
            inside = (batch.candidates >= 0) & (batch.candidates < pool)
            require(bool(inside.all()), f"candidates must be indices into the pool of {pool} items", given)
            labels = batch.labels
            require(bool((labels.isfinite() & (labels >= 0)).all()), "labels must be finite and >= 0", given)
            for name, value in (("labels", 0), ("group", -1), ("candidates", 0)):
                padding = getattr(batch, name)[~mask]
                require(bool((padding == value).all()), f"padding must have {value} in {name}", given)
            known = (batch.group[mask] >= 0) & (batch.group[mask] <= groups)
            require(bool(known.all()), f"group must be in 0..{groups} where the mask is True", given)


def labels_are_of_the_declared_kind(subject: DataSubject) -> None:
    """At least one training item is positive; grades are small; the positives of a list have distinct places."""
    data = subject.build(train_negatives=0)
    schema, positives = data.schema, 0
    for number, batch in enumerate(_loaded(data, "train")):
        given = f"batch {number} of train, labels={schema.labels!r}"
        positive = (batch.labels > schema.positive_above) & batch.mask
        positives += int(positive.sum())
        if schema.labels == "grades":
            top = float(batch.labels.max()) if batch.labels.numel() else 0.0
            require(top <= LARGEST_GRADE, f"a label is {top}, too large for a grade (gain 2^label - 1); declare "
                    "labels='places' in the schema if labels only order items", given)  # fmt: skip
        else:
            columns = torch.arange(positive.shape[1])
            ordered = torch.where(positive, batch.labels, -1.0 - columns).sort(1).values
            require(not bool((ordered[:, 1:] == ordered[:, :-1]).any()), "two positives of a list have the same place; "
                    "declare labels='grades' in the schema if labels are grades", given)  # fmt: skip
    require(positives > 0, f"no training label is above positive_above={schema.positive_above}", schema.labels)


def the_same_seed_gives_the_same_batches(subject: DataSubject) -> None:
    """Two data modules with the same seed return the same training batches, including negatives, in every epoch."""
    runs = []
    for _ in range(2):
        data = subject.build(train_negatives=NEGATIVES, negative_source="uniform")
        loader = data.train_dataloader()
        runs.append([data.on_after_batch_transfer(batch, 0) for _ in range(2) for batch in loader])
    require(len(runs[0]) == len(runs[1]), "two runs differ in length", [len(run) for run in runs])
    for number, (a, b) in enumerate(zip(*runs, strict=True)):
        require(_same(a, b), "two data modules with the same seed differ", f"training batch {number}")


def evaluation_does_not_depend_on_batching(subject: DataSubject) -> None:
    """The list of an evaluated request is the same for any batch size, number of processes and pass."""
    data = subject.build()
    for split in SPLITS[1:]:
        expected = dict(_by_request(_loaded(data, split)))
        require(len(expected) > 0, "the split has no requests", split)
        again = dict(_by_request(_loaded(data, split)))
        require(again == expected, "a second pass gives different lists", split)
        small = dict(_by_request(_loaded(subject.build(eval_batch_size=3), split)))
        require(small == expected, "lists depend on the batch size", f"{split}, eval_batch_size=3")
        shared: dict[int, Any] = {}
        for rank in range(2):
            shared.update(_by_request(_loaded(subject.build(eval_batch_size=4, rank=rank, processes=2), split)))
        require(shared == expected, "lists depend on the number of processes", f"{split}, 2 processes")


def every_request_occurs_once(subject: DataSubject) -> None:
    """No request is lost or repeated with one or several processes. All processes have the same number of batches."""
    for split in SPLITS:
        expected: list[int] | None = None
        for processes in (1, 2, 3):
            found: list[int] = []
            lengths = set()
            for rank in range(processes):
                data = subject.build(batch_size=4, eval_batch_size=4, rank=rank, processes=processes)
                batches = list(_loaded(data, split))
                lengths.add(len(batches))
                found += [request for batch in batches for request in batch.request_id.tolist()]
            given = f"{split}, {processes} processes"
            require(len(lengths) == 1, f"processes have {sorted(lengths)} batches", given)
            require(len(set(found)) == len(found), "a request occurs twice", given)
            expected = sorted(found) if expected is None else expected
            require(sorted(found) == expected, f"{len(found)} of {len(expected)} requests occur", given)


def training_resumes_at_the_exact_batch(subject: DataSubject) -> None:
    """A state that was saved as JSON after any batch resumes with the next batch."""
    settings: dict[str, Any] = {"batch_size": 8, "train_negatives": NEGATIVES, "negative_source": "uniform"}
    data = subject.build(**settings)
    loader = data.train_dataloader()
    states, whole = [], []
    for _ in range(2):
        for batch in loader:
            whole.append(data.on_after_batch_transfer(batch, 0))
            states.append(json.dumps(data.state_dict()))
    length = len(whole) // 2
    for at in sorted({1, length // 2 + 1, length, length + 1} & set(range(1, len(whole)))):
        other = subject.build(**settings)
        other.load_state_dict(json.loads(states[at - 1]))
        rest = list(_loaded(other, "train"))
        expected = whole[at : length if at < length else 2 * length]
        same = len(rest) == len(expected) and all(_same(a, b) for a, b in zip(rest, expected, strict=True))
        require(same, "resuming gives different batches", f"the state after {at} of {length} batches")


def hyper_parameters_are_plain_and_restore_the_data_module(subject: DataSubject) -> None:
    """`hparams` are plain values with the class and all arguments. `restore` builds the same data module from them."""
    from recsys_topk.datamodules.base import restore

    data = subject.build()
    saved = dict(data.hparams)
    require(json.loads(json.dumps(saved, default=repr)) == saved, "hyper-parameters are not plain values", saved)
    given = {name: data._arguments[name] for name in saved.get("left_out", ())}
    again = restore(saved, trust=(type(data).__module__,), **given)
    again.prepare_data()
    again.setup("fit")
    require(type(again) is type(data), f"restore builds a {type(again).__name__}", saved)
    require(dict(again.hparams) == saved, "the restored data module has different hyper-parameters", saved)
    require(again.schema == data.schema, "the restored data module has a different schema", saved)
    first, restored = (next(_loaded(each, "train")) for each in (data, again))
    require(_same(restored, first), "the restored data module gives a different first batch", saved)


def sampled_negatives_are_new_items(subject: DataSubject) -> None:
    """Negatives are in the last columns with label 0. They are distinct and never items of the list."""
    for source in ("in_batch", "uniform", "popularity"):
        data = subject.build(train_negatives=NEGATIVES, negative_source=source)
        sampled = len(data.schema.groups)
        for number, raw in enumerate(data.train_dataloader()):
            given = f"batch {number} of train, {source}"
            batch = data.on_after_batch_transfer(raw, 0)
            width = raw.candidates.shape[1]
            require(batch.candidates.shape[1] == width + NEGATIVES, f"lists of {width} became "
                    f"{batch.candidates.shape[1]} with {NEGATIVES} negatives", given)  # fmt: skip
            new = batch.mask[:, width:]
            require(bool((batch.group[:, width:][new] == sampled).all()), f"negatives need group {sampled}", given)
            require(bool((batch.labels[:, width:] == 0).all()), "negatives need label 0", given)
            before, after = (b.item_id[b.candidates].where(b.mask, -1) for b in (raw, batch))
            require(torch.equal(before, after[:, :width]), "negatives changed the items of the lists", given)
            for request, own, drawn in zip(
                batch.request_id.tolist(), before.tolist(), after[:, width:].tolist(), strict=True
            ):
                items = [item % VARIANT for item in drawn if item >= 0]
                known = {item % VARIANT for item in own if item >= 0}
                require(not known & set(items), f"request {request} has {known & set(items)} sampled again", given)
                require(len(set(items)) == len(items), f"request {request} has a negative twice: {items}", given)


def the_catalogue_holds_the_items_of_the_lists(subject: DataSubject) -> None:
    """Every item of the lists and every sampled negative is in the catalogue of its shard, with the same features."""
    data = subject.build(train_negatives=NEGATIVES, negative_source="uniform")
    for split in SPLITS:
        for name in data.splits[split]:
            catalogue = data.catalogue(name)
            for number, raw in enumerate(data.loader([name], training=split == "train")):
                batch, given = data.on_after_batch_transfer(raw, 0), f"batch {number} of shard {name}"
                ids = batch.item_id % VARIANT
                rows = catalogue.rows(batch.item_id).clamp_max(len(catalogue) - 1)
                listed = torch.zeros_like(ids, dtype=torch.bool)
                listed[batch.candidates[batch.mask]] = True
                known = (catalogue.item_id[rows] == ids) | ~listed
                require(bool(known.all()), f"items {ids[~known][:3].tolist()} are not in the catalogue", given)
                first = listed & (batch.item_id < VARIANT)
                same = torch.equal(catalogue.features[rows[first]].long(), batch.items[first])
                if data.schema.value_columns("items"):
                    same &= torch.equal(catalogue.values[rows[first]], batch.item_values[first])
                require(same, "an item has different features in the catalogue and in the pool", given)


def list_length_is_the_longest_list(subject: DataSubject) -> None:
    """`list_length(split)` is the largest number of columns of a batch, including negatives."""
    data = subject.build(train_negatives=NEGATIVES)
    for split in SPLITS:
        longest = max(batch.candidates.shape[1] for batch in _loaded(data, split))
        declared = data.list_length(split)
        require(declared == longest, f"list_length is {declared}, but the longest list has {longest} columns", split)


def shards_can_be_sent_to_workers(subject: DataSubject) -> None:
    """A pickled shard gives the same batches, and a batch depends only on the requested rows."""
    data = subject.build()
    name = data.splits["train"][0]
    shard = data.shard(name)
    rows = np.arange(min(len(shard), 5))
    expected = shard.batch(rows)
    sent = pickle.loads(pickle.dumps(shard))
    require(sent.name == name, f"the shard is called {sent.name!r}", name)
    require(_same(sent.batch(rows), expected), "a pickled shard gives a different batch", name)
    alone = _by_request(iter([shard.batch(rows[i : i + 1]) for i in range(len(rows))]))
    require(alone == _by_request(iter([expected])), "a request differs when it is batched alone", name)


_, RULES = rules_for(DataSubject, __name__)
