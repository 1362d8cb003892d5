"""Select the implementation of an operation.

An operation is a function of tensors with a torch reference and faster backends. A call goes to the first backend that
supports its arguments. The reference handles all other calls: other devices and dtypes, `torch.compile`, `torch.func`.

The environment variable ``RECSYS_TOPK_BACKEND``, read when the package is imported, or the context manager `backend`
restricts the choice:

- ``auto`` (default): the fastest backend that supports the call.
- ``torch``: only the references.
- ``numpy``, ``numba``, ``triton``: this backend if the operation has it and it supports the call, otherwise the
  reference.

Under `torch.compile` the setting is read when a function is traced, and only backends with ``traced=True`` are used.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import os
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from functools import cache, update_wrapper
from typing import Any, Generic, NamedTuple, ParamSpec, TypeVar, overload

import torch
from torch import Tensor
from torch.autograd import forward_ad

from recsys_topk.registry import suggest

SWITCH = "RECSYS_TOPK_BACKEND"
BACKENDS = ("numpy", "numba", "triton")
MODES = ("auto", "torch", *BACKENDS)
OLDEST_NUMBA = (0, 68)  # the compiled loops use the names of LLVM instructions of this version
DISABLED = "NUMBA_DISABLE_JIT"  # numba then calls Python functions, which cannot run the loops
INSTALL = {"numba": "pip install 'recsys-topk[fast]'", "triton": "pip install triton", "numpy": "pip install numpy"}

# Triton's interpreter runs kernels on the CPU, slowly. The tests use it. It must be set before triton is imported.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

P = ParamSpec("P")
T = TypeVar("T")

_PLAIN = (Tensor, torch.nn.Parameter)
_keeps_graph: Callable[[], bool] = torch._C._autograd._get_current_graph_task_keep_graph
_functorch_active: Callable[[], bool] = torch._C._are_functorch_transforms_active


@cache
def installed(name: str) -> bool:
    """Return whether the package of a backend can be imported, is recent enough and is not disabled."""
    if importlib.util.find_spec(name) is None or (name == "numba" and os.environ.get(DISABLED, "0") not in ("", "0")):
        return False
    return name != "numba" or tuple(map(int, importlib.metadata.version(name).split(".")[:2])) >= OLDEST_NUMBA


def _checked(mode: str, source: str) -> str:
    if mode not in MODES:
        raise ValueError(f"{source} must be one of {', '.join(MODES)}, got {mode!r}. {suggest(mode, MODES)}".rstrip())
    if mode in BACKENDS and not installed(mode):
        disabled = f", or disabled by {DISABLED}" if mode == "numba" else ""
        raise ModuleNotFoundError(
            f"{source} asks for {mode!r}, which is not installed or too old{disabled}; run {INSTALL[mode]}, or choose "
            f"'auto' or 'torch'"
        )
    return mode


_from_environment = _checked(os.environ.get(SWITCH) or "auto", SWITCH)
_mode: ContextVar[str] = ContextVar("backend", default=_from_environment)


def current_backend() -> str:
    """Return the backend that is set."""
    return _mode.get()


def _traced_mode() -> str:
    return _mode.get()


# What `torch.compiler.assume_constant_result` sets. That decorator imports torch._dynamo, which takes seconds.
_traced_mode._dynamo_marked_constant = True  # type: ignore[attr-defined]


@contextlib.contextmanager
def backend(name: str) -> Iterator[None]:
    """Set the backend inside a ``with`` block, for this thread.

    Args:
        name: ``"auto"``, ``"torch"``, ``"numpy"``, ``"numba"`` or ``"triton"``.

    Example:
        >>> with backend("torch"):
        ...     current_backend()
        'torch'
    """
    token = _mode.set(_checked(name, "the backend"))
    try:
        yield
    finally:
        _mode.reset(token)


def _transforms_active() -> bool:
    """Return whether a transform of `torch.func` or forward-mode differentiation (`torch.autograd.forward_ad`) runs."""
    return _functorch_active() or forward_ad._current_level >= 0


def is_eager() -> bool:
    """Return whether code runs eagerly: not in `torch.compile`, `torch.func` or forward-mode differentiation."""
    return not torch.compiler.is_compiling() and not _transforms_active()


def under_transform() -> bool:
    """Return whether `torch.func` (grad, vmap, ...) or forward-mode differentiation runs, outside `torch.compile`."""
    return not torch.compiler.is_compiling() and _transforms_active()


def is_real(x: Tensor) -> bool:
    """Return whether `x` is ordinary memory on the CPU (not fake, not a subclass). For predicates of backends."""
    return type(x) in _PLAIN and x.is_cpu


def is_float32(*tensors: Tensor) -> bool:
    """Return whether all tensors are ordinary float32 tensors on the CPU. For predicates of backends."""
    return all(is_real(x) and x.dtype == torch.float32 for x in tensors)


def runs_triton(*tensors: Tensor) -> bool:
    """Return whether Triton kernels support all tensors: at most 32 bits, on CUDA or in Triton's interpreter."""
    return all(
        type(x) in _PLAIN and (x.is_cuda or (INTERPRETED and x.is_cpu)) and x.dtype != torch.float64 for x in tensors
    )


def may_read(x: Tensor) -> bool:
    """Return whether the host can read the values of `x` without waiting: on the CPU, in eager mode."""
    return is_real(x) and is_eager()


class Implementation(NamedTuple):
    """A backend of an operation.

    Attributes:
        backend: Its name.
        serves: Takes the arguments of a call and returns whether `function` supports them.
        function: The implementation.
        traced: Whether `torch.compile` can trace `serves` and `function`.
    """

    backend: str
    serves: Callable[..., bool]
    function: Callable[..., Any]
    traced: bool = False


operations: dict[str, Operation[..., Any]] = {}  # by dotted name


def _dotted(function: Any) -> str:
    return f"{function.__module__}.{function.__qualname__}"


class Operation(Generic[P, T]):
    """A function with a torch reference and faster backends. Made by `operation`.

    Args:
        reference: The function in torch.
        fake: Takes the same arguments and returns empty tensors of the right shape and dtype. Required for a reference
            that must not be traced, because it loops or reads values on the CPU. The operation is then registered with
            `torch.library`, and called through it under `torch.compile` and `torch.func`. Every tensor argument must
            have one row per list, and must not require a gradient. A reference must not read values off the CPU.

    Attributes:
        implementations: The backends, in order of preference.
    """

    def __init__(self, reference: Callable[P, T], fake: Callable[..., Any] | None = None) -> None:
        update_wrapper(self, reference)
        self.reference = reference
        self.implementations: list[Implementation] = []
        self._by_mode: dict[str, tuple[Implementation, ...]] = {}
        self._registered = None if fake is None else self._register(fake)
        self._traced: Callable[P, T] = reference if self._registered is None else self._registered
        operations[_dotted(reference)] = self

    def backend(
        self, name: str, serves: Callable[..., bool], *, traced: bool = False
    ) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Return a decorator that adds a backend. Backends that were added first are preferred.

        Args:
            name: ``"numpy"``, ``"numba"`` or ``"triton"``.
            serves: Returns whether the backend supports given arguments. Called in eager mode, and in tracing if
                `traced`.
            traced: Whether `torch.compile` can trace `serves` and the function.
        """
        if name not in BACKENDS:
            raise ValueError(f"a backend is one of {', '.join(BACKENDS)}, got {name!r}")

        def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
            self.implementations.append(Implementation(name, serves, function, traced))
            self._by_mode.clear()
            return function

        return decorate

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> T:
        """Call the first allowed backend that supports the arguments, otherwise the reference."""
        found = self.implementation_for(*args, **kwargs)
        if found is not None:
            served: T = found.function(*args, **kwargs)
            return served
        return self.reference(*args, **kwargs) if is_eager() else self._traced(*args, **kwargs)

    def implementation_for(self, *args: P.args, **kwargs: P.kwargs) -> Implementation | None:
        """Return the backend that a call with these arguments would use; None = the reference."""
        if torch.compiler.is_compiling():
            return self._serving_traced(*args, **kwargs)
        if not _transforms_active():
            for implementation in self._serving():
                if implementation.serves(*args, **kwargs):
                    return implementation
        return None

    def backend_for(self, *args: P.args, **kwargs: P.kwargs) -> str:
        """Return the name of the backend that a call with these arguments would use; ``"torch"`` = the reference."""
        found = self.implementation_for(*args, **kwargs)
        return "torch" if found is None else found.backend

    def _serving_traced(self, *args: P.args, **kwargs: P.kwargs) -> Implementation | None:
        for one in self.implementations:
            if one.traced and _traced_mode() in ("auto", one.backend) and one.serves(*args, **kwargs):
                return one
        return None

    def _serving(self) -> tuple[Implementation, ...]:
        mode = _mode.get()
        found = self._by_mode.get(mode)
        if found is None:
            found = tuple(
                one
                for one in self.implementations
                if mode == one.backend or (mode == "auto" and installed(one.backend))
            )
            self._by_mode[mode] = found
        return found

    def _register(self, fake: Callable[..., Any]) -> Any:
        name = f"recsys_topk::{self.reference.__name__}"

        find: Callable[..., Implementation | None] = self.implementation_for
        reference: Callable[..., Any] = self.reference

        def run(*args: Any) -> Any:
            found = find(*args)
            return (reference if found is None else found.function)(*args)

        update_wrapper(run, self.reference)
        registered = torch.library.custom_op(name, run, mutates_args=())
        registered.register_fake(fake)
        registered.register_vmap(lambda info, in_dims, *args: _fold(registered, info.batch_size, in_dims, args))
        return registered


def _fold(function: Callable[..., Any], size: int, in_dims: Sequence[int | None], args: Sequence[Any]) -> Any:
    """Implement vmap for a function of lists: fold (V, B, ...) into (V B, ...), call it, and unfold the result."""
    folded = [
        (x.movedim(dim, 0) if dim is not None else x.expand(size, *x.shape)).flatten(0, 1)
        if isinstance(x, Tensor)
        else x
        for x, dim in zip(args, in_dims, strict=True)
    ]
    done = function(*folded)
    apart = [x.view(size, len(x) // size, *x.shape[1:]) for x in ([done] if isinstance(done, Tensor) else done)]
    return (apart[0], 0) if isinstance(done, Tensor) else (tuple(apart), (0,) * len(apart))


@overload
def operation(reference: Callable[P, T]) -> Operation[P, T]: ...


@overload
def operation(*, fake: Callable[..., Any]) -> Callable[[Callable[P, T]], Operation[P, T]]: ...


def operation(reference: Callable[..., Any] | None = None, *, fake: Callable[..., Any] | None = None) -> Any:
    """Make an `Operation` from its torch reference; used as ``@operation`` or ``@operation(fake=...)``."""
    if reference is not None:
        return Operation(reference)
    return lambda function: Operation(function, fake)


def apply(function: type[torch.autograd.Function], *args: Any) -> Any:
    """Call a `torch.autograd.Function`. In eager mode this skips the part of ``Function.apply`` for transforms.

    For a function with `setup_context`, which `torch.func` needs, ``Function.apply`` unwraps its arguments and binds
    them to the signature. For a short list this takes longer than the operation itself.
    """
    if is_eager():
        return super(torch.autograd.Function, function).apply(*args)  # type: ignore[misc]
    if not torch.compiler.is_compiling() and forward_ad._current_level >= 0:
        function = _forward_mode(function)
    return function.apply(*args)  # type: ignore[no-untyped-call]


@cache
def _forward_mode(function: type[torch.autograd.Function]) -> type[torch.autograd.Function]:
    """Return the function with its static method `tangents` as `jvp`. `torch.compile` refuses functions with a jvp."""
    return type(function.__name__, (function,), {"jvp": function.__dict__["tangents"]})


def save(ctx: Any, *tensors: Tensor) -> None:
    """Save tensors for `backward` and for `tangents`, in the `setup_context` of a function."""
    ctx.save_for_backward(*tensors)
    if not torch.compiler.is_compiling():
        ctx.save_for_forward(*tensors)


def closed_form(function: type[torch.autograd.Function], reference: Callable[..., Any], *inputs: Any) -> Any:
    """Call a function with a closed-form gradient, or its reference under `torch.func` and `torch.compile`.

    Its backward starts with ``if wants_graph(): return through_reference(reference, inputs, grads)``.
    """
    if under_transform() or torch.compiler.is_compiling():
        return reference(*inputs)
    return apply(function, *inputs)


def wants_graph() -> bool:
    """Return whether the result of the current backward must be differentiable (``create_graph=True``) or vectorised.

    A closed-form backward then uses `through_reference`.
    """
    return (torch.is_grad_enabled() or _transforms_active()) and not torch.compiler.is_compiling()


def is_last_backward() -> bool:
    """Return whether the graph is freed after the current backward, so that it may overwrite saved tensors."""
    return not _keeps_graph()


def through_reference(
    reference: Callable[..., Any], inputs: Sequence[Any], grads: Sequence[Tensor | None]
) -> tuple[Tensor | None, ...]:
    """Return differentiable gradients of `reference`, for a backward under ``create_graph=True``.

    Args:
        reference: The function in differentiable torch.
        inputs: The inputs of the forward: tensors as `ctx.saved_tensors` returns them, and other arguments.
        grads: Gradients of the outputs.

    Returns:
        One gradient per input; None where none is needed.
    """
    create_graph = torch.is_grad_enabled()
    with torch.enable_grad():
        # One input may be computed from another. The gradient of a view does not include what comes through others.
        inputs = [x.view_as(x) if isinstance(x, Tensor) else x for x in inputs]
        made = reference(*inputs)
        outputs = (made,) if isinstance(made, Tensor) else made
        pairs = [(y, g) for y, g in zip(outputs, grads, strict=True) if g is not None and y.requires_grad]
        places = [i for i, x in enumerate(inputs) if isinstance(x, Tensor) and x.requires_grad]
        result: list[Tensor | None] = [None] * len(inputs)
        if not pairs or not places:
            return tuple(result)
        found = torch.autograd.grad(
            [y for y, _ in pairs],
            [inputs[i] for i in places],
            [g for _, g in pairs],
            create_graph=create_graph,
            allow_unused=True,
        )
    for i, gradient in zip(places, found, strict=True):
        result[i] = gradient
    return tuple(result)


def refuse_second_derivative(message: str, gradient: Tensor, *inputs: Tensor) -> Tensor:
    """Return `gradient`, whose derivative with respect to the inputs raises a RuntimeError with the message.

    For a backward that cannot be differentiated: without this, a second derivative would silently be 0.
    """
    if not wants_graph():
        return gradient
    refused: Tensor = _Refused.apply(message, gradient, *inputs)  # type: ignore[no-untyped-call]
    return refused


class _Refused(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, message: str, gradient: Tensor, *inputs: Tensor) -> Tensor:
        ctx.message = message
        return gradient.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise RuntimeError(ctx.message)
