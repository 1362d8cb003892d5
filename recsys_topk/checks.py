"""Checks of what a user passes in: every message says what was given, what was expected and what to do."""

from __future__ import annotations

import torch
from torch import Tensor


def check_lists(scores: Tensor, mask: Tensor | None, **others: Tensor | None) -> None:
    """Raise unless `scores` is a floating (B, N) tensor and the rest share its shape and device.

    Args:
        scores: The scores, (B, N).
        mask: Boolean, True = a real item; or None.
        **others: Further (B, N) tensors by the name the user knows them by.
    """
    if not isinstance(scores, Tensor):
        raise TypeError(f"scores must be a torch.Tensor of shape (lists, items), got {type(scores).__name__}")
    if scores.dim() != 2:
        raise ValueError(
            f"scores must have shape (lists, items), got {tuple(scores.shape)}; for one list pass scores[None, :]"
        )
    if not scores.is_floating_point():
        raise TypeError(f"scores must be floating point, got {scores.dtype}; call scores.float()")
    if mask is not None:
        if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
            given = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
            raise TypeError(f"mask must be a boolean tensor (True = a real item), got {given}; pass mask.bool()")
        others = {**others, "mask": mask}
    for name, tensor in others.items():
        if tensor is None:
            continue
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, got {type(tensor).__name__}")
        if tensor.shape != scores.shape:
            raise ValueError(
                f"{name} must have the shape of scores, {tuple(scores.shape)}, and has {tuple(tensor.shape)}"
            )
        if tensor.device != scores.device:
            raise ValueError(f"{name} is on {tensor.device} and scores are on {scores.device}; move one to the other")


def check_k(k: int | Tensor, scores: Tensor, *, read: bool) -> None:
    """Raise unless `k` is a non-negative int, or one non-negative integer per list.

    Args:
        k: The number of items to select.
        scores: The scores it applies to, (B, N).
        read: Whether a tensor's values may be looked at (a device synchronisation on a GPU).
    """
    if isinstance(k, Tensor):
        if k.is_floating_point() or k.is_complex() or k.dtype == torch.bool:
            raise TypeError(f"k must hold integers, got {k.dtype}; a fractional k has no meaning here: call k.long()")
        if k.shape != scores.shape[:1]:
            raise ValueError(
                f"k must be one int, or one int per list of shape ({scores.shape[0]},), got {tuple(k.shape)}"
            )
        if k.device != scores.device:
            raise ValueError(f"k is on {k.device} and scores are on {scores.device}; move one to the other")
        if read and bool((k < 0).any()):
            raise ValueError(f"k must not be negative, got {int(k.min())}")
        return
    if isinstance(k, bool) or not isinstance(k, (int, torch.SymInt)):
        raise TypeError(f"k must be an int or an integer tensor with one entry per list, got {k!r}")
    if k < 0:
        raise ValueError(f"k must not be negative, got {k}")


def check_positive(name: str, value: float) -> float:
    """Return `value`, or raise unless it is a positive finite number."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < float("inf"):
        raise ValueError(f"{name} must be a positive finite number, got {value!r}")
    return float(value)


def check_not_negative(name: str, value: float) -> float:
    """Return `value`, or raise unless it is a finite number >= 0."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < float("inf"):
        raise ValueError(f"{name} must be a finite number >= 0, got {value!r}")
    return float(value)


def check_finite(scores: Tensor, mask: Tensor) -> None:
    """Raise, naming the first place, if a valid score is NaN or infinite (reads the tensors)."""
    bad = ~torch.isfinite(scores) & mask
    if bool(bad.any()):
        row, column = (int(i) for i in bad.nonzero()[0])
        raise ValueError(
            f"{int(bad.sum())} of {int(mask.sum())} valid scores are not finite; the first is scores[{row}, {column}] "
            f"= {scores[row, column].item()}. Mask it, or look for overflow in the model that made it"
        )


def check_labels(labels: Tensor, mask: Tensor) -> None:
    """Raise, naming the first place, if a valid label is not a finite number >= 0 (reads the tensors)."""
    bad = ~(torch.isfinite(labels) & (labels >= 0)) & mask
    if bool(bad.any()):
        row, column = (int(i) for i in bad.nonzero()[0])
        raise ValueError(
            f"labels must be finite and >= 0 (bigger is better); {int(bad.sum())} of {int(mask.sum())} valid ones are "
            f"not, the first is labels[{row}, {column}] = {labels[row, column].item()}. Mask items that have no label"
        )


def check_weights(weights: Tensor) -> None:
    """Raise, naming the first place, if the weight of a list is not a finite number >= 0 (reads the tensor)."""
    bad = ~(torch.isfinite(weights) & (weights >= 0))
    if bool(bad.any()):
        row = int(bad.nonzero()[0])
        raise ValueError(
            f"weights must be finite and >= 0; {int(bad.sum())} of {len(weights)} are not, the first is "
            f"weights[{row}] = {weights[row].item()}. Give lists that should not count the weight 0"
        )
