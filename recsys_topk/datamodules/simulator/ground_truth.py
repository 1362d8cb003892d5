"""The ground truth of a simulated world: the utility of any item to any request, and reference recalls."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from recsys_topk.datamodules.simulator.world import World, WorldConfig
from recsys_topk.tabular.schema import VARIANT
from recsys_topk.types import Array

if TYPE_CHECKING:
    from recsys_topk.datamodules.recflow.datamodule import RecFlowDataModule


FILE: Final = "ground_truth.npz"


@dataclass(frozen=True)
class GroundTruth:
    """A simulated world and its requests.

    Attributes:
        world: Users, items and the utility.
        request_id: (R,), ascending, over all days.
        user: (R,)
        time_ms: (R,)
    """

    world: World
    request_id: Array
    user: Array
    time_ms: Array

    def save(self, folder: Path) -> None:
        """Write `ground_truth.npz` into `folder`."""
        log = {"request_id": self.request_id, "request_user": self.user, "request_time_ms": self.time_ms}
        config = np.array(json.dumps(asdict(self.world.config)))
        arrays: dict[str, Any] = {"config": config, **log, **self.world.arrays()}
        np.savez(folder / FILE, **arrays)

    @classmethod
    def load(cls, root: str | Path) -> GroundTruth:
        """Read the ground truth of a simulated data set."""
        path = Path(root).expanduser() / FILE
        if not path.is_file():
            raise FileNotFoundError(
                f"{path} is missing: only simulated data (recsys-topk simulate) have a ground truth"
            )
        with np.load(path) as stored:
            arrays = dict(stored)
        world = World.from_arrays(WorldConfig(**json.loads(str(arrays["config"]))), arrays)
        return cls(world, arrays["request_id"], arrays["request_user"], arrays["request_time_ms"])

    @classmethod
    def of_data(cls, data: Any) -> GroundTruth | None:
        """Return the ground truth of a data module's files, or None if they are not simulated."""
        files = getattr(getattr(data, "cache", None), "files", None)
        root = Path(str(files.folder.parent)) if files is not None else None
        return cls.load(root) if root is not None and (root / FILE).is_file() else None

    def true_utility(self, request_id: Array, item_id: Array) -> Array:
        """Return the utility of items to requests: (n,) request ids and (n, m) item ids give float32 (n, m).

        Every item has a utility to every request, including sampled negatives.
        """
        request_id, item_id = np.asarray(request_id), np.asarray(item_id)
        at = np.minimum(np.searchsorted(self.request_id, request_id), self.request_id.size - 1)
        unknown = self.request_id[at] != request_id
        if unknown.any():
            raise ValueError(
                f"request {int(request_id[unknown][0])} is not one of the {self.request_id.size} simulated"
            )
        return self.world.utility(self.user[at], self.time_ms[at], item_id)


def reference_recalls(
    datamodule: RecFlowDataModule, *, quotas: Sequence[int] = (30, 20), k: int = 10, parts: bool = False
) -> dict[str, dict[str, float]]:
    """Return the recalls of a random, a popularity and an oracle ranker on the test days of a simulated world.

    All stages rank by the same score, on the same lists as in the evaluation of a model, including negatives.
    Popularity is the number of times that an item was a positive on the training days. The oracle is the true utility;
    it misses items because of the noise of the simulated stages.

    Args:
        datamodule: A prepared data module of a simulated world.
        quotas: Number of items that each stage passes on.
        k: Number of true items.
        parts: Also rank by parts of the utility: ``"taste"``, and ``"taste and appeal"``.

    Returns:
        For each ranker (``"random"``, ``"popularity"``, ``"oracle"``): ``"joint"`` and one recall per single stage
        (``"recall@10@30"``), averaged over the requests with a positive.
    """
    truth = GroundTruth.load(str(datamodule.cache.files.folder.parent))
    popularity = _popularity(datamodule, truth.world.config.items)
    rng = np.random.default_rng(datamodule.seed)
    names = ("joint", *(f"recall@{k}@{quota}" for quota in quotas))
    oracles = {"oracle": truth}
    if parts:
        less = replace(truth.world.config, freshness=0.0, context=0.0)
        configs = {"taste": replace(less, popularity=0.0), "taste and appeal": less}
        partial = {name: replace(truth, world=replace(truth.world, config=one)) for name, one in configs.items()}
        oracles = {**partial, **oracles}
    found: dict[str, list[Array]] = {name: [] for name in ("random", "popularity", *oracles)}
    for day_batch in datamodule.test_dataloader():
        batch = datamodule.add_negatives(day_batch)
        items = batch.item_id[batch.candidates].numpy() % VARIANT
        scores = {
            "random": rng.random(items.shape),
            "popularity": popularity[items],
            **{name: one.true_utility(batch.request_id.numpy(), items) for name, one in oracles.items()},
        }
        mask, labels = batch.mask.numpy(), batch.labels.numpy()
        for ranker, score in scores.items():
            found[ranker].append(_recalls(score, labels, mask, quotas, k, datamodule.layout.positive_above))
    return {
        ranker: dict(zip(names, np.concatenate(parts).mean(0).tolist(), strict=True)) for ranker, parts in found.items()
    }


def _popularity(datamodule: RecFlowDataModule, items: int) -> Array:
    """Return how often each item was in the best group on the training days."""
    total = np.zeros(items)
    for name in datamodule.splits["train"]:
        day = datamodule.cache.open(name)
        best = day.requests[datamodule.layout.groups[0].stage]
        total += np.bincount(day.catalogue["item_id"][best[best >= 0]] % VARIANT, minlength=items)
    return total


def _recalls(scores: Array, labels: Array, mask: Array, quotas: Sequence[int], k: int, positive_above: float) -> Array:
    """Return (counted lists, 1 + stages): recall after all stages, then of each stage; ties go to negatives."""
    labels = np.where(mask, labels, 0)
    by_label = np.argsort(labels, axis=1, kind="stable")
    score = np.take_along_axis(np.where(mask, scores, -np.inf), by_label, 1)
    order = np.take_along_axis(by_label, np.argsort(-score, axis=1, kind="stable"), 1)
    positive = labels > positive_above
    best = np.zeros_like(positive)
    np.put_along_axis(best, by_label[:, -k:], True, 1)
    true = np.take_along_axis(positive & best, order, 1)
    # All stages use one score, so the survivors are the first min(quotas) items of the order.
    hits = [true[:, :quota].sum(1) for quota in (min(quotas), *quotas)]
    wanted = true.sum(1)
    return np.asarray(np.stack(hits, axis=1)[wanted > 0] / wanted[wanted > 0, None])
