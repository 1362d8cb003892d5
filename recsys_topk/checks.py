"""Checks of user input. Every message states what was given, what was expected and what to do."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable
from typing import Any, SupportsIndex

import torch
from torch import Tensor


def check_lists(scores: Tensor, mask: Tensor | None, **others: Tensor | None) -> None:
    """Raise unless `scores` is a floating (B, N) tensor and all other tensors have its shape and device.

    The mask is boolean, True = a real item. `others` are further (B, N) tensors, by the argument name used in messages.
    """
    check_scores(scores)
    if scores.dim() != 2:
        raise ValueError(f"scores must have shape (lists, items), got {tuple(scores.shape)}; {_reshape(scores)}")
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
            hint = ""
            if name == "labels" and tensor.shape == scores.shape[:1]:
                hint = "; if they hold the index of one positive item per list, pass "
                hint += f"torch.nn.functional.one_hot(labels, {scores.shape[1]})"
            raise ValueError(
                f"{name} must have the shape of scores, {tuple(scores.shape)}, got {tuple(tensor.shape)}{hint}"
            )
        check_real(name, tensor)
        if tensor.device != scores.device:
            raise ValueError(f"{name} is on {tensor.device} and scores are on {scores.device}; move one to the other")


def check_real(name: str, tensor: Tensor) -> None:
    """Raise if the tensor is complex."""
    if tensor.is_complex():
        raise TypeError(f"{name} must be real numbers, got {tensor.dtype}; pass {name}.real")


def check_scores(scores: Tensor) -> None:
    """Raise unless `scores` is an ordinary floating tensor, of any shape."""
    if not isinstance(scores, Tensor):
        raise TypeError(f"scores must be a torch.Tensor of shape (lists, items), got {type(scores).__name__}")
    if scores.is_nested:
        raise TypeError(
            "scores must be an ordinary tensor, got a nested tensor; pass its values and lengths to the loss: "
            "loss(scores.values(), labels.values(), lengths=scores.offsets().diff())"
        )
    if not scores.is_floating_point():
        raise TypeError(f"scores must be floating point, got {scores.dtype}; call scores.float()")


def _reshape(scores: Tensor) -> str:
    if scores.dim() < 2:
        return "for one list pass scores[None, :]; for many lists in 1-D tensors pass list_ids or lengths to the loss"
    if scores.shape[-1] == 1:
        return "for one score per item pass scores.squeeze(-1)"
    return "pass scores.flatten(0, -2), one list per row, and flatten labels and mask in the same way"


def check_k(k: float | Tensor, scores: Tensor, *, lists: int | None = None, read: bool) -> int | Tensor:
    """Return `k` as an int or a tensor (B,). Raise unless it is one integer >= 0 or one integer >= 0 per list.

    A numpy integer or a 0-d tensor becomes an int. A 0-d tensor that may not be `read` (a device synchronisation on a
    GPU) becomes a tensor (B,). By default scores have one row per list.
    """
    lists = scores.shape[0] if lists is None else lists
    if isinstance(k, Tensor):
        if k.is_floating_point() or k.is_complex() or k.dtype == torch.bool:
            raise TypeError(
                f"k must hold integers, got {k.dtype}; call k.long(). Only operators with fractional_k accept floats"
            )
        if k.device != scores.device and k.dim() > 0:
            raise ValueError(f"k is on {k.device} and scores are on {scores.device}; move one to the other")
        if k.dim() == 0:
            k = int(k) if read else k.to(scores.device).expand(lists)
        elif k.shape != (lists,):
            raise ValueError(f"k must be one int, or one int per list of shape ({lists},), got {tuple(k.shape)}")
        if isinstance(k, Tensor):
            if read and bool((k < 0).any()):
                raise ValueError(f"k must not be negative, got {int(k.min())}")
            return k
    # torch.compile may pass a symbolic integer; it stays symbolic.
    number: int = k if type(k) in (int, torch.SymInt) else check_int("k", k)  # type: ignore[assignment]
    if number < 0:
        raise ValueError(f"k must not be negative, got {number}")
    return number


def check_fractional_k(k: float | Tensor, scores: Tensor, *, lists: int | None = None, read: bool) -> int | Tensor:
    """Return `k` as `check_k` does. A float or a floating tensor becomes one floating-point k per list, (B,)."""
    if not isinstance(k, float) and not (isinstance(k, Tensor) and k.is_floating_point()):
        return check_k(k, scores, lists=lists, read=read)
    lists = scores.shape[0] if lists is None else lists
    if isinstance(k, float) or k.dim() == 0:
        k = torch.as_tensor(k, dtype=torch.float64, device=scores.device).expand(lists)
    if k.shape != (lists,):
        raise ValueError(f"k must be one number, or one per list of shape ({lists},), got {tuple(k.shape)}")
    if k.device != scores.device:
        raise ValueError(f"k is on {k.device} and scores are on {scores.device}; move one to the other")
    if read and not bool(((k >= 0) & torch.isfinite(k)).all()):
        raise ValueError(f"k must be finite and not negative, got {k.tolist()}")
    return k


def check_int(name: str, value: object) -> int:
    """Return `value` as an int. Raise unless it is a Python integer, a numpy integer or a 0-d integer tensor."""
    if not isinstance(value, Tensor) and not isinstance(value, str) and hasattr(value, "__len__"):
        raise TypeError(
            f"{name} must be an int or an integer tensor with one entry per list, got {type(value).__name__}; "
            f"pass torch.as_tensor({name}) to the call"
        )
    boolean = isinstance(value, bool) or (isinstance(value, Tensor) and value.dtype == torch.bool)
    if not boolean and isinstance(value, SupportsIndex):
        with contextlib.suppress(TypeError):
            return operator.index(value)
    raise TypeError(f"{name} must be an int or an integer tensor with one entry per list, got {value!r}")


def check_count(name: str, value: int) -> int:
    """Return `value`, or raise unless it is an int >= 0."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"{name} must be a non-negative int, got {value!r}")
    return value


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


class DeferredChecks:
    """Checks computed on the device in one step and evaluated on the host in the next step, without a wait.

    A check adds a small tensor, which is copied to the host asynchronously. `raise_failed` raises the error of a failed
    check. Call it at the start of each step and at the end of an epoch.

    Example:
        >>> checks = DeferredChecks()
        >>> check_finite(torch.tensor([[torch.nan, 1.0]]), torch.tensor([[True, True]]), deferred=checks)
        >>> checks.raise_failed()
        Traceback (most recent call last):
        ...
        ValueError: 1 of 2 valid scores are not finite; the first is scores[0, 0] = nan. Mask it, or look for overflow
        in the model (on devices other than the CPU this is detected one step later)
    """

    def __init__(self) -> None:
        self._pending: list[tuple[Tensor, Any, Callable[[list[float]], str | None]]] = []

    def add(self, facts: Tensor, judge: Callable[[list[float]], str | None]) -> None:
        """Add a check: numbers on any device, (n,), and a function from them to an error message, or None."""
        copied, event = facts.to("cpu", non_blocking=True), None
        accelerator = torch.accelerator.current_accelerator()
        if accelerator is not None and accelerator.type == facts.device.type:
            event = torch.Event(facts.device)
            event.record()
        self._pending.append((copied, event, judge))

    def raise_failed(self) -> None:
        """Raise a ValueError if an added check failed. Does not wait for checks that were added one step ago."""
        pending, self._pending = self._pending, []
        for copied, event, judge in pending:
            if event is not None:
                event.synchronize()
            message = judge(copied.tolist())
            if message is not None:
                raise ValueError(f"{message} (on devices other than the CPU this is detected one step later)")


def check_finite(scores: Tensor, mask: Tensor, *, deferred: DeferredChecks | None = None) -> None:
    """Raise if a valid score is NaN or infinite. The message names the first such score.

    With `deferred`, the check is added there and evaluated later; otherwise the tensors are read now.
    """
    bad = ~torch.isfinite(scores) & mask
    if deferred is None:
        if bool(bad.any()):
            raise ValueError(_not_finite(int(bad.sum()), int(mask.sum()), _first(bad, scores)))
    elif bad.numel():
        place = bad.flatten().byte().argmax()
        facts = [bad.sum(), mask.sum(), place, scores.detach().take(place)]
        width = scores.shape[1]

        def judge(found: list[float]) -> str | None:
            number, valid, first = (int(one) for one in found[:3])
            return _not_finite(number, valid, f"{list(divmod(first, width))} = {found[3]}") if number else None

        deferred.add(torch.stack([one.double() for one in facts]), judge)


def _not_finite(number: int, valid: int, first: str) -> str:
    return (
        f"{number} of {valid} valid scores are not finite; the first is scores{first}. "
        f"Mask it, or look for overflow in the model"
    )


def _first(bad: Tensor, values: Tensor) -> str:
    """Return the index and value of the first bad entry, e.g. ``[0, 3] = nan``."""
    place = tuple(bad.nonzero()[0].tolist())
    return f"{list(place)} = {values[place].item()}"


def check_labels(labels: Tensor, mask: Tensor) -> None:
    """Raise if a valid label is not a finite number >= 0. Reads the tensors."""
    bad = ~(torch.isfinite(labels) & (labels >= 0)) & mask
    if bool(bad.any()):
        raise ValueError(
            f"labels must be finite and >= 0 (bigger is better); {int(bad.sum())} of {int(mask.sum())} valid labels "
            f"are not, the first is labels{_first(bad, labels)}. Mask items that have no label; only a mask marks "
            f"padding: for labels of -1 pass mask=labels >= 0"
        )


def check_weights(name: str, weights: Tensor) -> None:
    """Raise if a weight is not a finite number >= 0. Reads the tensor."""
    bad = ~(torch.isfinite(weights) & (weights >= 0))
    if bool(bad.any()):
        raise ValueError(
            f"{name} must be finite and >= 0; {int(bad.sum())} of {weights.numel()} are not, the first is "
            f"{name}{_first(bad, weights)}. Use weight 0 for what should not count"
        )
