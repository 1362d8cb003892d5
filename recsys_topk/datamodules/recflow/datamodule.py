"""RecFlow for Lightning: prepared once, read as columns, negatives added on the device."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.pytorch import LightningDataModule
from lightning.pytorch.utilities import rank_zero_info

from recsys_topk.datamodules.batch import CascadeBatch
from recsys_topk.datamodules.folders import cache_home
from recsys_topk.datamodules.loader import DayLoader
from recsys_topk.datamodules.negatives import Catalogue, NegativeSource, expand
from recsys_topk.datamodules.recflow.batch_maker import BatchMaker, DayBatch
from recsys_topk.datamodules.recflow.cache import DayCache, PreparedDay
from recsys_topk.datamodules.recflow.days import select_days
from recsys_topk.datamodules.recflow.files import RecFlowFiles
from recsys_topk.datamodules.recflow.layout import find_layout, recflow_schema
from recsys_topk.datamodules.schema import Schema
from recsys_topk.datamodules.simulator.embedded import DEFAULT_WORLD, embedded_root
from recsys_topk.datamodules.simulator.world import WorldConfig


class RecFlowDataModule(LightningDataModule):  # type: ignore[misc]  # Lightning is seen untyped
    """RecFlow, or a simulated world in its layout, as batches of lists.

    Lists hold the groups of the layout (10 columns each) and, after transfer to the device, sampled negatives. In
    training they are drawn anew every epoch from `negative_source`; in evaluation they are `eval_negatives` uniform
    draws from the catalogue of the evaluated day, the same for a request whatever the batch size, order, number of
    processes or epoch.

    Args:
        root: Folder of the data set; None = a simulated world, made once in the user's cache folder.
        world: The simulated world used if `root` is None.
        layout: Which sample groups make up a list.
        train_days: A date or "FIRST:LAST", both included; None = all but the last two days.
        val_days: The same; None = the last day but one.
        test_days: The same; None = the last day. Also the days of `predict`.
        batch_size: Requests a training batch and process.
        eval_batch_size: Requests an evaluation batch and process; None = as in training.
        train_negatives: Sampled negatives a list in training.
        negative_source: Where training negatives come from.
        eval_negatives: Sampled negatives a list in evaluation.
        history_length: Newest views of the user to keep.
        seed: Seed of the order and of all negatives.
        num_workers: Worker processes that make batches; one process is enough (`recsys-topk bench data`).
        shuffle: Whether to shuffle training requests within each day.
        cache_dir: Folder of the prepared data; None = in the user's cache folder.

    Example:
        >>> import tempfile
        >>> from recsys_topk.datamodules import WorldConfig, simulate
        >>> folder = tempfile.mkdtemp()
        >>> root = simulate(f"{folder}/world", WorldConfig(users=20, items=200, days=3, requests=30))
        >>> data = RecFlowDataModule(str(root), eval_negatives=20, cache_dir=folder)
        >>> data.prepare_data()
        >>> batch = data.add_negatives(next(iter(data.test_dataloader())))
        >>> tuple(batch.candidates.shape)
        (30, 60)
    """

    def __init__(
        self,
        root: str | None = None,
        world: WorldConfig = DEFAULT_WORLD,
        layout: Literal["two-stage", "three-stage"] = "two-stage",
        train_days: str | None = None,
        val_days: str | None = None,
        test_days: str | None = None,
        batch_size: int = 1024,
        eval_batch_size: int | None = None,
        train_negatives: int = 0,
        negative_source: NegativeSource = "in_batch",
        eval_negatives: int = 160,
        history_length: int = 50,
        seed: int = 42,
        num_workers: int = 0,
        shuffle: bool = True,
        cache_dir: str | None = None,
    ) -> None:
        super().__init__()
        counts = {"train_negatives": train_negatives, "eval_negatives": eval_negatives, "seed": seed}
        for name, value in counts.items():
            if value < 0:
                raise ValueError(f"{name} must not be negative, got {value}")
        # In plain values, so that checkpoints hold what the model was trained on and load with weights_only=True.
        self.save_hyperparameters(
            {
                "root": root,
                "world": asdict(world),
                "layout": layout,
                "train_days": train_days,
                "val_days": val_days,
                "test_days": test_days,
                "batch_size": batch_size,
                "eval_batch_size": eval_batch_size,
                "train_negatives": train_negatives,
                "negative_source": negative_source,
                "eval_negatives": eval_negatives,
                "history_length": history_length,
                "seed": seed,
                "num_workers": num_workers,
                "shuffle": shuffle,
                "cache_dir": cache_dir,
            },
            logger=False,
        )
        self.root = root
        self.world = world
        self.layout = find_layout(layout)
        self.wanted_days = {"train": train_days, "val": val_days, "test": test_days}
        self.batch_size = batch_size
        self.eval_batch_size = eval_batch_size
        self.train_negatives = train_negatives
        self.negative_source = negative_source
        self.eval_negatives = eval_negatives
        self.seed = seed
        self.num_workers = num_workers
        self.shuffle = shuffle
        self.cache_dir = cache_dir
        self._maker = BatchMaker(self.layout, history_length)
        self._cache: DayCache | None = None
        self._open: dict[str, PreparedDay] = {}
        self._catalogue: tuple[str, torch.device, Catalogue] | None = None
        self._train_loader: DayLoader | None = None
        self._state: dict[str, Any] | None = None
        self._counts: dict[bool, list[torch.Tensor]] = {}

    @property
    def cache(self) -> DayCache:
        """The prepared days; simulates the embedded world first if there is no root."""
        if self._cache is None:
            root = self.root if self.root is not None else embedded_root(self.world, rank_zero_info)
            folder = Path(self.cache_dir) if self.cache_dir is not None else cache_home() / "prepared"
            self._cache = DayCache(RecFlowFiles(root), folder)
        return self._cache

    @property
    def schema(self) -> Schema:
        """What the columns of the batches mean; reads only the id counts of the data set."""
        return recflow_schema(self.cache.files.counts, self.layout)

    @property
    def days(self) -> dict[str, tuple[str, ...]]:
        """The days used for ``"train"``, ``"val"`` and ``"test"``."""
        available = self.cache.files.days
        if len(available) < 3 and None in self.wanted_days.values():
            raise ValueError(
                f"the data hold {' and '.join(available)}, too few to set apart a validation and a test day; say which "
                f"to use with train_days, val_days and test_days"
            )
        default = {"train": available[:-2], "val": available[-2:-1], "test": available[-1:]}
        return {
            stage: select_days(available, wanted, default[stage], f"{stage}_days")
            for stage, wanted in self.wanted_days.items()
        }

    def prepare_data(self) -> None:
        """Prepare the days that are used and not prepared yet; called by Lightning in one process."""
        missing = self.cache.missing(sorted({day for days in self.days.values() for day in days}))
        if missing:
            rank_zero_info(f"preparing {len(missing)} days of {self.cache.files.folder} in {self.cache.folder} (once)")
            self.cache.prepare(missing)

    def for_day(self, day: str) -> RecFlowDataModule:
        """Return this data module with one day to train, validate and test on; they share what is open."""
        _ = self.cache
        data = copy.copy(self)
        data.wanted_days = dict.fromkeys(self.wanted_days, day)
        data._train_loader = data._state = None
        return data

    def loader(self, days: Sequence[str], *, training: bool) -> DayLoader:
        """Return the batches of some prepared days, for training or for evaluation."""
        rank, processes = self._share()
        size = self.batch_size if training or self.eval_batch_size is None else self.eval_batch_size
        return DayLoader(
            [self._day(day) for day in days],
            self._maker,
            size,
            seed=self.seed,
            shuffle=training and self.shuffle,
            training=training,
            rank=rank,
            processes=processes,
            num_workers=self.num_workers,
        )

    def train_dataloader(self) -> DayLoader:
        """Return the training days, in order; a state loaded before is taken up."""
        self._train_loader = self.loader(self.days["train"], training=True)
        if self._state is not None:
            self._train_loader.load_state_dict(self._state)
            self._state = None
        return self._train_loader

    def val_dataloader(self) -> DayLoader:
        """Return the validation days."""
        return self.loader(self.days["val"], training=False)

    def test_dataloader(self) -> DayLoader:
        """Return the test days."""
        return self.loader(self.days["test"], training=False)

    def predict_dataloader(self) -> DayLoader:
        """Return the test days."""
        return self.test_dataloader()

    def on_after_batch_transfer(self, batch: CascadeBatch, dataloader_idx: int) -> CascadeBatch:
        """Append the negatives of a batch, on the device it is on."""
        return self.add_negatives(batch) if isinstance(batch, DayBatch) else batch

    def add_negatives(self, batch: DayBatch) -> CascadeBatch:
        """Return a batch of one of the loaders with its negatives: lists become (B, N + negatives).

        Lightning calls this after transfer; in a training loop of your own, call it on every batch.
        """
        number = self.train_negatives if batch.training else self.eval_negatives
        if not number:
            return batch.plain()
        source = self.negative_source if batch.training else "uniform"
        expansion = expand(
            batch.plain(),
            number,
            seed=batch.draw_seed,
            group=len(self.layout.groups),
            source=source,
            pool_rows=batch.pool_rows,
            catalogue=None if source == "in_batch" else self._catalogue_of(batch.day, batch.items.device),
        )
        counts = self._counts.setdefault(batch.training, [torch.zeros_like(expansion.drawn)] * 2)
        self._counts[batch.training] = [counts[0] + expansion.drawn, counts[1] + expansion.rejected]
        return expansion.batch

    def rejection_rate(self, *, training: bool) -> float:
        """Return the share of draws so far that were rejected, as the list's own or repeated."""
        drawn, rejected = (float(count) for count in self._counts.get(training, (0.0, 0.0)))
        return rejected / drawn if drawn else 0.0

    def state_dict(self) -> dict[str, Any]:
        """Return where training is: seed, epoch, day and the requests of the day already given."""
        if self._train_loader is not None:
            return self._train_loader.state_dict()
        return self._state or {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let the next `train_dataloader` go on where `state_dict` was taken."""
        self._state = state or None

    def _day(self, day: str) -> PreparedDay:
        if day not in self._open:
            self._open[day] = self.cache.open(day)
        return self._open[day]

    def _catalogue_of(self, day: str, device: torch.device) -> Catalogue:
        if self._catalogue is None or self._catalogue[:2] != (day, device):
            with torch.inference_mode(False):  # it outlives the evaluation that asks for it first
                self._catalogue = (day, device, Catalogue.of_day(self._day(day), device))
        return self._catalogue[2]

    def _share(self) -> tuple[int, int]:
        """Return the number of this process and how many there are."""
        if self.trainer is not None:
            return self.trainer.global_rank, self.trainer.world_size
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            return torch.distributed.get_rank(), torch.distributed.get_world_size()
        return 0, 1
