"""The base class of data modules: data loaders, sampled negatives, resuming and hyper-parameters."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Literal, TypedDict, get_args

import numpy as np
import torch
from lightning.pytorch import LightningDataModule

from recsys_topk.datamodules.batch import CascadeBatch
from recsys_topk.datamodules.catalogue import Catalogue
from recsys_topk.datamodules.hyper_parameters import data_spec, hyper_parameters
from recsys_topk.datamodules.loader import ShardLoader
from recsys_topk.datamodules.negatives.expansion import NegativeMix, check_mix, expand
from recsys_topk.datamodules.negatives.shared import against_catalogue, expand_shared
from recsys_topk.datamodules.prepare.progress import Progress, StepBars
from recsys_topk.datamodules.shard import Shard, ShardBatch
from recsys_topk.machine import check_budget
from recsys_topk.registry import Registry
from recsys_topk.spec import Recorded, build
from recsys_topk.tabular.export_tables import ItemTable, UserTable, newest_rows
from recsys_topk.tabular.features.encoder import FeatureEncoder
from recsys_topk.tabular.ids.vocabulary import Vocabulary
from recsys_topk.tabular.schema import Outline, Schema
from recsys_topk.trust import loading
from recsys_topk.types import Array

Split = Literal["train", "val", "test"]
BatchSize = int | Literal["auto"]
# With batch_size="auto": training requests per step, as a share of all of them and within bounds.
STEPS_PER_EPOCH, MOST = 64, 4096
_WORKER_BYTES = 50 << 20  # least memory of a worker process, most of whose pages are shared
EvalSource = Literal["uniform", "popularity", "in_batch"]

registry: Registry[CascadeDataModule]


class LoaderOptions(TypedDict, total=False):
    """Options of all data modules that no source changes; see `CascadeDataModule`."""

    eval_batch_size: int | None
    seed: int
    num_workers: int
    shuffle: bool
    logq_correction: bool
    eval_negative_source: EvalSource


class NegativeOptions(LoaderOptions, total=False):
    """The options of loaders and of negatives."""

    train_negatives: int
    negative_source: NegativeMix
    eval_negatives: int


class DataOptions(NegativeOptions, total=False):
    """All options of `CascadeDataModule`. A subclass takes them as ``**options: Unpack[DataOptions]``."""

    batch_size: BatchSize


class CascadeDataModule(Recorded, LightningDataModule, ABC):  # type: ignore[misc]  # Lightning is seen untyped
    """Base class of data modules: makes data loaders of `CascadeBatch` from a schema and shards.

    A subclass defines `schema` and `open_shard`. It also defines `splits` if it does not have exactly one shard per
    split. The base class makes the loaders, adds sampled negatives after the transfer to the device, saves the position
    in the epoch, and records the constructor's arguments as hyper-parameters. `restore` rebuilds the data module from
    these hyper-parameters.

    Training negatives are drawn again in every epoch, from `negative_source`. Evaluation negatives are `eval_negatives`
    draws from the evaluated shard, by default uniform. They are the same for a request in every epoch, and do not
    depend on the batch size, the order or the number of processes (except for ``eval_negative_source="in_batch"``).

    A subclass with a class attribute ``name`` is registered under this name (`recsys_topk.datamodules.get`). Other
    packages register data modules through the entry-point group ``recsys_topk.datamodules``. `docs/data.md` has a
    complete example, and `recsys_topk.testing.check_data_module` checks a subclass.

    Args:
        batch_size: Requests per training batch and process. ``"auto"`` = so many that an epoch has 64 steps, but at
            least 256 (lists: 64) and at most 4096 requests of all processes. Smaller interactions are read several
            times per epoch, so that it has 17 to 32 steps.
        eval_batch_size: Requests per evaluation batch and process; None = as in training.
        train_negatives: Sampled negatives per list in training.
        negative_source: Source of the training negatives: ``"in_batch"``, ``"in_global_batch"``, ``"uniform"`` or
            ``"popularity"``; or the number per list from each source, ``{"in_batch": 20, "uniform": 10}``. The sum
            then replaces `train_negatives`. With several processes, ``"in_batch"`` draws from the batch of one process
            and ``"in_global_batch"`` from the batches of all processes. ``"shared"`` draws the same items for all lists
            of a batch. ``"catalogue"`` draws nothing: a softmax loss compares each positive with all items.
        eval_negatives: Sampled negatives per list in evaluation.
        seed: Seed of the order of requests and of all negatives.
        num_workers: Number of worker processes that make batches.
        shuffle: Whether to shuffle training requests within each shard.
        logq_correction: Whether training batches contain `CascadeBatch.log_q`. Softmax losses subtract it from the
            scores of sampled negatives, so that they estimate the softmax over all items.
        eval_negative_source: Source of the evaluation negatives. ``"uniform"``: all items of the evaluated shard are
            equally likely. ``"popularity"``: in proportion to how often an item occurs in the lists of the shard.
            ``"in_batch"``: in proportion to how often it occurs in the lists of the batch, as in the published code of
            DFTopK; the results then depend on the batch size. Frequent items are harder negatives, so names of test
            metrics contain the source if it is not uniform.
    """

    name: ClassVar[str]
    without_validation: ClassVar[str] = "use test"
    """What the user can do if there are no validation shards, for an error message."""

    fewest: ClassVar[int] = 256
    """Smallest automatic batch size, in requests of all processes."""

    steps_per_epoch: ClassVar[int] = 1
    """With an automatic batch size, an epoch reads the data as often as fits into this number of steps."""

    softmax_items: int | None = None
    """With negatives from the whole catalogue: number of items in the softmax of a step; None = all."""

    sampling_probabilities: bool = False
    """Whether training batches contain `CascadeBatch.log_q` without a logQ correction, for objectives with a pool."""

    newest: float = 0.0
    """Share of each training shard that training leaves out: its newest requests, which `newest_requests` returns."""

    progress: Progress | None = None
    """Receives the progress of `prepare_data`; None = progress bars on a terminal."""

    def __init__(
        self,
        *,
        batch_size: BatchSize = 1024,
        eval_batch_size: int | None = None,
        train_negatives: int = 0,
        negative_source: NegativeMix = "in_batch",
        eval_negatives: int = 160,
        seed: int = 42,
        num_workers: int = 0,
        shuffle: bool = True,
        logq_correction: bool = False,
        eval_negative_source: EvalSource = "uniform",
    ) -> None:
        super().__init__()
        counts = {"train_negatives": train_negatives, "eval_negatives": eval_negatives, "seed": seed}
        for name, value in {**counts, "num_workers": num_workers}.items():
            if value < 0:
                raise ValueError(f"{name} must not be negative, got {value}")
        for name, size in (("batch_size", batch_size), ("eval_batch_size", eval_batch_size)):
            if isinstance(size, str) and (size != "auto" or name != "batch_size"):
                raise ValueError(f"{name} must be an integer, or for batch_size 'auto', got {size!r}")
            if isinstance(size, int) and size < 1:
                raise ValueError(f"{name} must be at least 1, got {size}")
        if eval_negative_source not in get_args(EvalSource):
            known = ", ".join(get_args(EvalSource))
            raise ValueError(f"eval_negative_source must be one of {known}, got {eval_negative_source!r}")
        check_budget(num_workers * _WORKER_BYTES, f"{num_workers:,} num_workers", "use a smaller --data.num_workers")
        train_negatives = check_mix(negative_source, train_negatives)
        rows = self.fewest if batch_size == "auto" else batch_size
        each = 1 if negative_source in ("shared", "catalogue") else rows  # lists with negatives of their own
        for name, number in (("train", train_negatives * each), ("eval", eval_negatives * (eval_batch_size or rows))):
            what = f"a batch with {counts[f'{name}_negatives']:,} {name}_negatives"
            check_budget(32 * number, what, f"use a smaller --data.{name}_negatives or --data.batch_size")
        self.batch_size: BatchSize = batch_size
        self.eval_batch_size = eval_batch_size
        self.train_negatives = train_negatives
        self.negative_source = negative_source
        self.eval_negatives = eval_negatives
        self.seed = seed
        self.num_workers = num_workers
        self.shuffle = shuffle
        self.logq_correction = logq_correction
        self.eval_negative_source: EvalSource = eval_negative_source
        # Lightning would look for the options among the local variables of every constructor on the stack. They are not
        # there if a constructor passes them on, so it gets a frame that no function has called.
        self.save_hyperparameters(hyper_parameters(self), frame=_uncalled().gi_frame, logger=False)
        self._shards: dict[str, Shard] = {}
        self._catalogue: tuple[str, torch.device, Catalogue] | None = None
        self._train_loader: ShardLoader | None = None
        self._state: dict[str, Any] | None = None
        self._counts: dict[bool, list[torch.Tensor]] = {}

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "name" in cls.__dict__:
            registry.register(cls.name, cls)

    @classmethod
    def load_from_checkpoint(
        cls, checkpoint_path: Any, *args: Any, trust: Collection[str] = (), **kwargs: Any
    ) -> CascadeDataModule:
        """Load a data module from a checkpoint, like Lightning's method. Only classes that are trusted are imported.

        Args:
            checkpoint_path: The file.
            args: Arguments of Lightning's method.
            trust: Further packages whose classes may be imported; see `recsys_topk.trust`.
            kwargs: Arguments of Lightning's method; `weights_only` defaults to True.
        """
        with loading(checkpoint_path, kwargs, trust):
            data: CascadeDataModule = super().load_from_checkpoint(checkpoint_path, *args, **kwargs)
        return data

    @property
    @abstractmethod
    def schema(self) -> Schema:
        """The schema of the batches. It may need the prepared data, which are then prepared first; see `outline`."""

    @property
    def outline(self) -> Outline:
        """What is known of the schema before the data are prepared. Override it if `schema` needs prepared data."""
        return self.schema.outline

    @abstractmethod
    def open_shard(self, name: str) -> Shard:
        """Return a prepared shard. Called once per name in each process."""

    @property
    def splits(self) -> dict[str, tuple[str, ...]]:
        """The names of the shards used for ``"train"``, ``"val"`` and ``"test"``, in order."""
        return {split: (split,) for split in get_args(Split)}

    def facts(self) -> list[str]:
        """Return lines of text that describe the prepared data and the guesses that were made."""
        return []

    @contextmanager
    def progress_of(self, unit: str = " rows") -> Iterator[Progress]:
        """Yield the object that receives the progress of `prepare_data`: `progress`, or new progress bars."""
        if self.progress is not None:
            if isinstance(self.progress, StepBars):
                self.progress.unit = unit
            yield self.progress
        else:
            with StepBars(unit) as bars:
                yield bars

    @property
    def prepared_folders(self) -> dict[str, Path]:
        """The folders of the prepared data by name. Their paths contain a fingerprint of the source."""
        return {}

    @property
    def vocabularies(self) -> dict[str, Vocabulary]:
        """The vocabulary of each table whose raw ids are mapped to rows. The schema contains the fingerprints."""
        return {}

    def list_length(self, split: Split) -> int:
        """Return the maximum length of a list in the batches of `split`, including sampled negatives.

        The data must be prepared, unless a subclass knows the length without them.
        """
        negatives = self.train_negatives if split == "train" else self.eval_negatives
        return max(self.shard(name).list_length for name in self.splits[split]) + negatives

    def lists_text(self, split: Split) -> str:
        """Return the length of the lists of an evaluated split and the source of their negatives, as text."""
        negatives = f" with {self.eval_negatives} {self.eval_negative_source} negatives" if self.eval_negatives else ""
        return f"lists of {self.list_length(split)}{negatives}"

    def shard(self, name: str) -> Shard:
        """Return a shard. It is opened on first use."""
        if name not in self._shards:
            self._shards[name] = self.open_shard(name)
        return self._shards[name]

    def catalogue(self, shard: str, device: torch.device | str = "cpu") -> Catalogue:
        """Return all items of a shard on a device. The catalogue of the last call is cached."""
        device = torch.device(device)
        if self._catalogue is None or self._catalogue[:2] != (shard, device):
            with torch.inference_mode(False):  # training may use the catalogue after an evaluation has created it
                self._catalogue = (shard, device, self.shard(shard).catalogue(device))
        return self._catalogue[2]

    def serving_items(self) -> ItemTable:
        """Return the items of all shards for an export. The features of an item come from its newest shard.

        Override this method if the names of items differ from their ids.
        """
        shards = list(dict.fromkeys(name for names in self.splits.values() for name in names))
        found = [self.shard(name).catalogue() for name in shards]
        rows = newest_rows([catalogue.item_id.numpy() for catalogue in found])
        values = [catalogue.values if len(catalogue.values) else torch.empty(len(catalogue), 0) for catalogue in found]
        columns = [
            np.concatenate([getattr(one, field).numpy()[own] for one, own in zip(found, rows, strict=True)])
            for field in ("item_id", "features", "count")
        ]
        numbers = np.concatenate([one.numpy()[own] for one, own in zip(values, rows, strict=True)])
        order = np.argsort(columns[0])
        return ItemTable(columns[0][order], columns[1][order], numbers[order], columns[2][order])

    def item_names(self, item_id: Array) -> Array:
        """Return the names of items, as in `serving_items`, given their ids in batches and catalogues."""
        return item_id

    def request_names(self, shard: str, request_id: Array) -> Array:
        """Return the names of requests in the source, given their ids in the batches of a shard."""
        return request_id

    def serving_users(self, items: ItemTable) -> UserTable | None:
        """Return the newest state of each user for an export, or None if users have no names.

        Args:
            items: The result of `serving_items`.
        """
        return None

    @property
    def encoder(self) -> FeatureEncoder | None:
        """The encoder of raw features for an export; None if only this data module can encode them."""
        return None

    def rows_per_batch(self) -> int:
        """Return the rows per training batch and process: `batch_size`, or if that is ``"auto"`` a size by the data."""
        if isinstance(self.batch_size, int):
            return self.batch_size
        shards = [self.shard(name) for name in self.splits["train"]]
        rows, requests = sum(map(len, shards)), sum(shard.requests for shard in shards)
        wanted = min(max(requests // STEPS_PER_EPOCH, self.fewest), MOST) / self._share()[1]
        return max(1, round(wanted * rows / max(1, requests)))

    def loader(self, shards: Sequence[str], *, training: bool) -> ShardLoader:
        """Return a loader of the batches of the given shards, for training or for evaluation."""
        rank, processes = self._share()
        size = self.rows_per_batch() if training or self.eval_batch_size is None else self.eval_batch_size
        opened, views = [self.shard(name) for name in shards], int(self.hparams.get("history_length") or 0)
        elements = min(size, max(map(len, opened), default=0)) * views * len(self.schema.history)
        check_budget(8 * elements, f"a batch with histories of {views:,} views", "use a smaller --data.history_length")
        return ShardLoader(
            opened,
            size,
            seed=self.seed,
            shuffle=training and self.shuffle,
            training=training,
            rank=rank,
            processes=processes,
            num_workers=self.num_workers,
            between=(0.0, 1.0 - self.newest * training),
            device=None if self.trainer is None else self.trainer.strategy.root_device,
        )

    def newest_requests(self, name: str) -> Iterator[CascadeBatch]:
        """Yield the newest requests of a shard (`newest`) in evaluation batches, with negatives."""
        part = (1.0 - self.newest, 1.0)
        for batch in ShardLoader([self.shard(name)], self.rows_per_batch(), seed=self.seed, between=part):
            yield self.add_negatives(batch)

    def train_dataloader(self) -> ShardLoader:
        """Return the loader of training batches. It resumes at the loaded state, if there is one."""
        self._train_loader = self.loader(self.splits["train"], training=True)
        if self.batch_size == "auto":
            self._train_loader.passes = max(1, self.steps_per_epoch // max(1, len(self._train_loader)))
        if self._state is not None:
            self._train_loader.load_state_dict(self._state)
            self._state = None
        return self._train_loader

    def val_dataloader(self) -> ShardLoader | list[ShardLoader]:
        """Return the loader of validation batches, or an empty list if there are no validation shards.

        Lightning skips validation for an empty list.
        """
        if self.splits["val"]:
            return self.loader(self.splits["val"], training=False)
        if self.trainer is not None and self.trainer.state.fn == "validate":
            raise ValueError(f"the data have nothing for validation; {self.without_validation}")
        return []

    def test_dataloader(self) -> ShardLoader:
        """Return the loader of test batches."""
        return self.loader(self.splits["test"], training=False)

    def predict_dataloader(self) -> ShardLoader:
        """Return the loader of test batches."""
        return self.test_dataloader()

    def on_after_batch_transfer(self, batch: CascadeBatch, dataloader_idx: int) -> CascadeBatch:
        """Append negatives to a batch, on its device. Called by Lightning."""
        return self.add_negatives(batch) if isinstance(batch, ShardBatch) else batch

    def add_negatives(self, batch: ShardBatch) -> CascadeBatch:
        """Return a batch of a loader with its negatives: lists become (B, N + negatives).

        The Lightning trainer does this after the transfer to the device. In a custom training loop, call this method
        for every batch.
        """
        number = self.train_negatives if batch.training else self.eval_negatives
        source = self.negative_source if batch.training else self.eval_negative_source
        plain, excluded = batch.plain(), batch.excluded
        if source == "catalogue":
            catalogue = self.catalogue(batch.shard, batch.items.device)
            return against_catalogue(plain, catalogue, batch.pool_rows, excluded, self.softmax_items)
        if not number:
            return plain
        if excluded is not None and plain.shares_histories:
            excluded = excluded[plain.history_row]
        log_q = batch.training and (self.logq_correction or self.sampling_probabilities)
        common: dict[str, Any] = {
            "seed": batch.draw_seed,
            "group": self._sampled_group,
            "pool_rows": batch.pool_rows,
            "excluded": excluded,
            "log_q": log_q,
            "catalogue": self.catalogue(batch.shard, batch.items.device)
            if source != "in_batch" or excluded is not None or log_q
            else None,
        }
        if source == "shared":
            return expand_shared(plain, number, **common)
        expansion = expand(plain, number, source=source, processes=self._share()[1], **common)
        counts = self._counts.setdefault(batch.training, [torch.zeros_like(expansion.drawn)] * 2)
        self._counts[batch.training] = [counts[0] + expansion.drawn, counts[1] + expansion.rejected]
        return expansion.batch

    def rejection_rate(self, *, training: bool) -> float:
        """Return the fraction of all draws so far that were rejected because the list already had the item."""
        drawn, rejected = (float(count) for count in self._counts.get(training, (0.0, 0.0)))
        return rejected / drawn if drawn else 0.0

    def state_dict(self) -> dict[str, Any]:
        """Return the position in training: seed, epoch, shard, and number of requests of the shard already returned."""
        if self._train_loader is not None:
            return self._train_loader.state_dict()
        return self._state or {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the result of `state_dict`. The next `train_dataloader` resumes there."""
        self._state = state or None

    @cached_property
    def _sampled_group(self) -> int:
        """The index of the group of sampled negatives."""
        return len(self.outline.groups)

    def _share(self) -> tuple[int, int]:
        """Return the rank of this process and the number of processes."""
        if self.trainer is not None:
            return self.trainer.global_rank, self.trainer.world_size
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            return torch.distributed.get_rank(), torch.distributed.get_world_size()
        return 0, 1


def _uncalled() -> Any:
    yield


registry = Registry(
    "data module", "recsys_topk.datamodules", "recsys_topk.datamodules", CascadeDataModule, "datamodule"
)


def get(name: str, /, **arguments: Any) -> CascadeDataModule:
    """Build a data module by name, class name or class path.

    Example:
        >>> get("recflow", batch_size=32).batch_size
        32
    """
    return registry.get(name, **arguments)


def available() -> tuple[str, ...]:
    """Return the names of all data modules, including those of installed plug-ins."""
    return registry.available()


def restore(saved: Mapping[str, Any], *, trust: Collection[str] = (), **changes: Any) -> CascadeDataModule:
    """Rebuild a data module from its hyper-parameters, as stored in a checkpoint.

    Args:
        saved: ``data.hparams``, or ``checkpoint["datamodule_hyper_parameters"]``. Checkpoints of version 0.1 have no
            class path; a `RecFlowDataModule` is built for them.
        trust: Further packages whose classes may be built. This package and installed entry points are always trusted.
        changes: Arguments to replace, e.g. ``root="elsewhere"``. Arguments that are not plain values (a data frame, an
            open connection) are not saved and must be given here.

    Example:
        >>> data = get("recflow", batch_size=32)
        >>> restore(data.hparams, batch_size=64).batch_size
        64
    """
    spec = data_spec(saved)
    missing = sorted(set(spec["left_out"]) - set(changes))
    if missing:
        raise ValueError(
            f"{', '.join(missing)} of {spec['class_path']} cannot be saved as plain values, so it is not in the "
            f"hyper-parameters; give it: restore(saved, {', '.join(f'{name}=...' for name in missing)})"
        )
    described = {"class_path": spec["class_path"], "init_args": {**spec["init_args"], **changes}}
    made: CascadeDataModule = build(described, base=CascadeDataModule, trust=trust)
    return made
