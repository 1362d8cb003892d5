"""A device without values, on which operations that make the host wait for a GPU raise.

The device is torch's ``meta``: tensors have shapes and dtypes, but no values. Operations that need values (``.item()``,
``bool(x)``, ``.cpu()``, boolean indexing, ``nonzero``) fail there, and the error names the operation and its line.
Copies of Python numbers to the device are reported too, because they also wait on a GPU.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

DEVICE = torch.device("meta")

# With `output_size`, repeat_interleave does not read the size from the device.
_READS = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)
_UPLOADS = (torch.tensor, torch.as_tensor, torch.from_numpy, Tensor.new_tensor)
_INDEXING = (Tensor.__getitem__, Tensor.__setitem__)
# The derivatives of these operations search for zeros on the host.
_READ_BACKWARD = {"prod", "cumprod"}
_aten = torch.ops.aten


class HostReadError(AssertionError):
    """Code made the host wait for the device."""


@contextmanager
def no_host_reads() -> Iterator[None]:
    """Raise a `HostReadError` inside this context if code makes the host wait for a tensor on `DEVICE`.

    Copies that do not wait (``non_blocking=True``) are allowed; they give zeros.

    Example:
        >>> x = torch.zeros(2, 3, device=DEVICE)
        >>> with no_host_reads():
        ...     x.relu().sum().item()
        Traceback (most recent call last):
        ...
        recsys_topk.testing.host_reads.HostReadError: _local_scalar_dense reads values on the host, in <module>
    """
    with _Calls(), _Operations():  # type: ignore[no-untyped-call]
        yield


class _Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves it untyped
    """Checks every operation, including those of backward passes and inside torch's own functions."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        if func in (_aten._to_copy.default, _aten.copy_.default):
            return _copy(func, args, kwargs)
        if func in (_aten.index.Tensor, _aten.index_put.default, _aten.index_put_.default):
            _check_indices(name, args)
        elif any(tag in func.tags for tag in _READS) and _is_there(args) and kwargs.get("output_size") is None:
            raise HostReadError(f"{name} reads values on the host, in {_place()}")
        elif name in _READ_BACKWARD and isinstance(args[0], Tensor) and _is_there(args) and args[0].requires_grad:
            raise HostReadError(f"the derivative of {name} reads values on the host, in {_place()}")
        return func(*args, **kwargs)


class _Calls(TorchFunctionMode):
    """Checks calls that are not operations, such as the conversion of Python numbers to tensors."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _INDEXING and args[0].device == DEVICE:
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            if any(isinstance(one, list) for one in index):
                raise HostReadError(f"a list as an index is copied to the device, in {_place()}")
        if func is Tensor.numpy and args[0].device == DEVICE:
            raise HostReadError(f"numpy reads values on the host, in {_place()}")
        made = func(*args, **(kwargs or {}))
        if func in _UPLOADS and isinstance(made, Tensor) and made.device == DEVICE and args[0] is not made:
            raise HostReadError(
                f"numbers are copied to the device, in {_place()}; use torch.full, or create the tensor once"
            )
        return made


def _copy(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    in_place = func is _aten.copy_.default
    source, target = args[1 if in_place else 0], args[0].device if in_place else kwargs.get("device") or args[0].device
    if (source.device == DEVICE) == (torch.device(target) == DEVICE):
        return func(*args, **kwargs)
    waits = not (args[2] if in_place and len(args) > 2 else kwargs.get("non_blocking", False))
    if waits:
        raise HostReadError(f"a copy from {source.device} to {target} waits for the device, in {_place()}")
    if in_place or source.device != DEVICE:
        return func(*args, **kwargs)
    return torch.zeros(source.shape, dtype=kwargs.get("dtype") or source.dtype)


def _check_indices(name: str, args: tuple[Any, ...]) -> None:
    if args[0].device != DEVICE:
        return
    for index in args[1]:
        if index is None:
            continue
        if index.dtype in (torch.bool, torch.uint8):
            # Writing one number where a mask is True is a masked_fill, which reads no values.
            if name == "index" or args[2].numel() != 1:
                raise HostReadError(f"a boolean index reads values on the host, in {_place()}; use torch.where")
        elif index.device != DEVICE and index.dim() > 0:
            raise HostReadError(f"an index on {index.device} is copied to the device, in {_place()}")


def _is_there(args: tuple[Any, ...]) -> bool:
    return any(isinstance(x, Tensor) and x.device == DEVICE for x in args)


def _place() -> str:
    """Return the innermost line of the call stack outside of torch and this file."""
    for frame in reversed(traceback.extract_stack()):
        if frame.filename != __file__ and "/torch/" not in frame.filename.replace("\\", "/"):
            return f"{frame.filename}:{frame.lineno}, {frame.name}" if "<" not in frame.filename else frame.name
    return "torch"
