"""What the objective of a cascade is called with, for callbacks that look at scores."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from torch import nn


class ObjectiveCalls(Callback, ABC):  # type: ignore[misc]  # lightning is untyped here
    """Keeps the arguments of the newest training call of the objective, by name, in `call`.

    They are kept when `should_record` is true. They belong to the batch that is trained on anyway: there is no second
    forward pass through the model.
    """

    call: dict[str, Any] | None = None
    _hook: Any = None

    @abstractmethod
    def should_record(self, trainer: pl.Trainer) -> bool:
        """Return whether to keep the arguments of a call now."""

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Listen to what the objective is called with."""
        signature = inspect.signature(pl_module.objective.forward)

        def remember(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if trainer.training and self.should_record(trainer):
                self.call = dict(signature.bind(*args, **kwargs).arguments)

        self._hook = pl_module.objective.register_forward_pre_hook(remember, with_kwargs=True)

    def teardown(self, *_: Any, **__: Any) -> None:
        """Stop listening."""
        if self._hook is not None:
            self._hook.remove()

    on_exception = teardown

    def pop_call(self) -> dict[str, Any] | None:
        """Return the arguments that were kept and forget them; None if there are none."""
        call, self.call = self.call, None
        return call
