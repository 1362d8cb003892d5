"""The registry of losses."""

from __future__ import annotations

from typing import TYPE_CHECKING

from recsys_topk.operators.base import registry as operators
from recsys_topk.registry import Registry

if TYPE_CHECKING:
    from recsys_topk.losses.base import RankingLoss


class LossRegistry(Registry["RankingLoss"]):
    """The registry of losses. Every operator without a loss of the same name gets a generated loss."""

    def discover(self) -> None:
        """Import every module that may define a loss or an operator, and generate the losses of operators."""
        from recsys_topk.losses.from_operator import loss_of

        super().discover()
        for name, operator in operators.classes().items():
            if name not in self._classes:
                self.register(name, loss_of(operator))

    def register(self, name: str, cls: type[RankingLoss]) -> None:
        """Add `cls` under `name`. A hand-written loss replaces a generated one."""
        if hasattr(self._classes.get(name), "source_operator"):
            del self._classes[name]
        super().register(name, cls)
