"""The arguments of the objective's calls, for callbacks that measure scores."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from torch import nn


class ObjectiveCalls(Callback, ABC):  # type: ignore[misc]  # lightning is untyped here
    """Stores the arguments of the newest training call of the objective, by name, if `should_record` is true.

    The scores are those of the training step, so that no second forward pass is needed.
    """

    call: dict[str, Any] | None = None
    _hook: Any = None

    @abstractmethod
    def should_record(self, trainer: pl.Trainer) -> bool:
        """Return whether to store the arguments of the next call."""

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Register a forward hook on the objective."""
        signature = inspect.signature(pl_module.objective.forward)

        def remember(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if trainer.training and self.should_record(trainer):
                self.call = dict(signature.bind(*args, **kwargs).arguments)

        self._hook = pl_module.objective.register_forward_pre_hook(remember, with_kwargs=True)

    def teardown(self, *_: Any, **__: Any) -> None:
        """Remove the hook."""
        if self._hook is not None:
            self._hook.remove()

    on_exception = teardown

    def pop_call(self) -> dict[str, Any] | None:
        """Return and clear the stored arguments; None if there are none."""
        call, self.call = self.call, None
        return call
