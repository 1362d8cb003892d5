"""Diagnostics of losses and gradients, logged during training."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from torch import Tensor, nn

from recsys_topk.callbacks.objective_calls import ObjectiveCalls
from recsys_topk.evaluation.diagnostics import score_diagnostics, share_below


class Diagnostics(ObjectiveCalls):
    """Logs `score_diagnostics` and the share of gradients below the optimizer's eps, every few steps.

    Logged as ``diagnostics/...``; the gradients are those of the batch just trained on, with no second forward pass
    through the model. Tables with a fused optimizer have no gradients and do not count.

    Args:
        every_n_steps: Number of steps between two measurements.
    """

    def __init__(self, every_n_steps: int = 50) -> None:
        if every_n_steps < 1:
            raise ValueError(f"every_n_steps must be at least 1, got {every_n_steps}")
        self.every_n_steps = every_n_steps

    def should_record(self, trainer: pl.Trainer) -> bool:
        """Return whether the step is a multiple of `every_n_steps`."""
        return bool(trainer.global_step % self.every_n_steps == 0)

    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Any) -> None:
        """Log the share of gradients that are below the optimizer's eps."""
        eps = next((group["eps"] for group in optimizer.param_groups if "eps" in group), None)
        if eps is None or not self.should_record(trainer):
            return
        kinds: dict[str, list[nn.Parameter]] = {"embeddings": [], "dense": []}
        for name, parameter in pl_module.named_parameters():
            kinds["embeddings" if ".embedding_bags." in name else "dense"].append(parameter)
        for kind, parameters in kinds.items():
            if any(p.grad is not None for p in parameters):
                pl_module.log(f"diagnostics/below_eps/{kind}", share_below(parameters, eps))

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        """Log what the objective did to the scores."""
        call = self.pop_call()
        if call is not None and isinstance(call["labels"], Tensor):  # else the stages train on different lists
            values = score_diagnostics(pl_module.objective, **call, names=pl_module.cascade.names)
            batch_size = len(call["labels"])
            pl_module.log_dict({f"diagnostics/{name}": value for name, value in values.items()}, batch_size=batch_size)
