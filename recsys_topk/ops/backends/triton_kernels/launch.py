"""Registration of kernels as operators of `torch.library`."""

from __future__ import annotations

from collections.abc import Callable
from functools import update_wrapper
from typing import Any

import torch
from torch import Tensor

from recsys_topk.ops.dispatch import INTERPRETED

LARGEST_INT = 2**31 - 1

Function = Callable[..., Any]


def registered(launch: Function, fake: Function, on_cpu: Function, setup: Function, backward: Function) -> Any:
    """Return the operator ``recsys_topk::NAME``, where NAME is the name of `launch`.

    Args:
        launch: Allocates the results, launches the kernel and returns them; used for CUDA tensors.
        fake: Returns empty results of the same shapes.
        on_cpu: The torch reference; used for CPU tensors, unless Triton interprets the kernels.
        setup: Saves what `backward` needs.
        backward: Returns the gradients; through the reference if they must be differentiable.
    """

    def on_its_device(*args: Any) -> Any:
        with torch.cuda.device_of(args[0]):
            return launch(*args)

    update_wrapper(on_its_device, launch)
    name = f"recsys_topk::{launch.__name__}"
    made = torch.library.custom_op(name, on_its_device, mutates_args=(), device_types="cuda")
    made.register_kernel("cpu")(launch if INTERPRETED else on_cpu)
    made.register_fake(fake)
    made.register_autograd(backward, setup_context=setup)
    return made


def value_and_gradient(function: Function, scores: Tensor) -> tuple[Any, Tensor]:
    """Return the results of a torch reference in float32, and the gradient of the sum of the first one.

    To be called inside an operator, where autograd is off.
    """
    key = torch._C.DispatchKey.AutogradFunctionality
    with torch._C._SetExcludeDispatchKeyGuard(key, False), torch.enable_grad():
        x = scores.detach().float().requires_grad_()
        made = function(x)
        (gradient,) = torch.autograd.grad(made[0].sum(), x)
    return tuple(one.detach() for one in made), gradient
