"""The base class of baselines and their registry."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from recsys_topk.evaluation.search import PAIRS_AT_ONCE, Candidates, Requests, best_scored
from recsys_topk.evaluation.training_log import TrainingLog
from recsys_topk.registry import Registry
from recsys_topk.spec import Recorded

registry: Registry[Baseline]


class Baseline(Recorded, ABC):
    """A recommender that is fitted on training interactions and scores all items of a catalogue.

    A subclass with a class attribute ``name`` is found under this name. Other packages add baselines through the
    entry-point group ``recsys_topk.baselines``.
    """

    name: ClassVar[str]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "name" in cls.__dict__:
            registry.register(cls.name, cls)

    @abstractmethod
    def fit(self, log: TrainingLog) -> None:
        """Fit the baseline. It is called once per catalogue."""

    @abstractmethod
    def scores(self, histories: Tensor) -> Tensor:
        """Return the scores of all C items of the catalogue, (B, C).

        Args:
            histories: (B, H) int64 on the CPU, rows of each user's earlier items, oldest first, followed by -1.
        """

    def candidates(self, requests: Requests, number: int, *, items: int) -> Candidates:
        """Return the best items of each request. Exclusions and ties are those of `ExactSearch`.

        Args:
            requests: The requests.
            number: Number of items per request.
            items: Number of items in the catalogue, C. At most about 4 million scores are in memory at once.
        """
        if requests.earlier is None:
            raise ValueError(f"the baseline {self.name!r} needs the users' earlier items; use --baselines popularity")
        parts = []
        step = max(1, PAIRS_AT_ONCE // items)
        for first in range(0, requests.own.shape[0], step):
            rows = slice(first, first + step)
            scores = self.scores(requests.earlier[rows].cpu()).to(requests.own.device)
            fields = ("own", "labels", "mask", "excluded", "own_excluded", "earlier")
            chunk = replace(requests, **{name: getattr(requests, name)[rows] for name in fields})
            parts.append(best_scored(chunk, partial(_columns, scores), items, items, number))
        names = ("rows", "scores", "labels", "mask")
        return Candidates(*(torch.cat([getattr(part, name) for part in parts]) for name in names))


def _columns(scores: Tensor, start: int, stop: int) -> Tensor:
    return scores[:, start:stop]


registry = Registry("baseline", "recsys_topk.evaluation.baselines", "recsys_topk.baselines", Baseline)


def make_baselines(options: Mapping[str, Mapping[str, Any]]) -> list[Baseline]:
    """Return baselines by name, with their options.

    Example:
        >>> [baseline.name for baseline in make_baselines({"popularity": {}, "transitions": {"gaps": 3}})]
        ['popularity', 'transitions']
    """
    try:
        return [registry.get(name, **arguments) for name, arguments in options.items()]
    except TypeError as error:
        raise ValueError(f"baselines: {error}") from error
