"""Vectors of 16 numbers as values in kernels, so that the vectorisation does not depend on LLVM.

A loop over a list calls `load(v, i)` (see `memory`) for i = 0, 16, 32, ... A machine with shorter vectors splits each
operation. Arithmetic and comparisons are written as for numbers. A number is treated as 16 equal ones.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import wraps
from typing import Any

import llvmlite.ir as ir  # type: ignore[import-untyped]
from numba import extending
from numba.core import types
from numba.core.datamodel import models
from numba.extending import lower_builtin, register_model, type_callable

from recsys_topk.ops.backends.task import WIDTH


def intrinsic(function: Callable[..., Any]) -> Any:
    """Make a function for compiled code from one that returns its signature and a generator of instructions."""
    return extending.intrinsic(function)


def instruction(result: Any, *kinds: Any) -> Callable[[Callable[..., Any]], Any]:
    """Make a function for compiled code from one that takes LLVM's builder and values, and returns the result.

    Args:
        result: The type of the result.
        kinds: The types of the arguments.
    """

    def decorate(emit: Callable[..., Any]) -> Any:
        @wraps(emit)  # numba takes the names of the arguments from the signature, without the first
        def typed(context: Any, *arguments: Any) -> Any:
            def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
                value = emit(builder, *values)
                return context.get_dummy_value() if result == types.void else value

            return result(*kinds), generate

        return intrinsic(typed)

    return decorate


class Lanes(types.Type):
    """The type of 16 numbers, all float32, int32 or boolean."""

    def __init__(self, element: Any) -> None:
        self.element = element
        super().__init__(name=f"Lanes({element})")

    @property
    def vector(self) -> Any:
        """The LLVM type."""
        return ir.VectorType(_ELEMENTS[self.element], WIDTH)


_ELEMENTS = {types.float32: ir.FloatType(), types.int32: ir.IntType(32), types.boolean: ir.IntType(1)}
FLOATS, INTEGERS, BITS = Lanes(types.float32), Lanes(types.int32), Lanes(types.boolean)


@register_model(Lanes)
class _LanesModel(models.PrimitiveModel):
    def __init__(self, manager: Any, kind: Any) -> None:
        super().__init__(manager, kind, kind.vector)  # type: ignore[no-untyped-call]


def _spread(builder: Any, number: Any) -> Any:
    """Return 16 times a number."""
    kind = ir.VectorType(number.type, WIDTH)
    one = builder.insert_element(ir.Constant(kind, ir.Undefined), number, ir.Constant(ir.IntType(32), 0))
    return builder.shuffle_vector(one, ir.Constant(kind, ir.Undefined), ir.Constant(_places(WIDTH), [0] * WIDTH))


def _places(count: int) -> Any:
    return ir.VectorType(ir.IntType(32), count)


def _common(a: Any, b: Any) -> Any:
    """Return the type of lanes of two operands, one of which may be a number; None = they do not fit."""
    lanes = a if isinstance(a, Lanes) else b
    if isinstance(lanes, Lanes) and a in (lanes, lanes.element) and b in (lanes, lanes.element):
        return lanes
    return None


def _binary(function: Any, result: Callable[[Any], Any], emit: Callable[[Any, Any, Any, Any], Any]) -> None:
    """Define an operator of lanes.

    Args:
        function: The operator.
        result: From the type of the operands to that of the result.
        emit: From builder, type and the two operands to the result.
    """

    @type_callable(function)
    def typed(context: Any) -> Any:
        def typer(a: Any, b: Any) -> Any:
            lanes = _common(a, b)
            return None if lanes is None else result(lanes)

        return typer

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        lanes = _common(*signature.args)
        a, b = (x if isinstance(x.type, ir.VectorType) else _spread(builder, x) for x in arguments)
        return emit(builder, lanes, a, b)

    for kinds in ((Lanes, Lanes), (Lanes, types.Number), (types.Number, Lanes)):
        lower_builtin(function, *kinds)(generate)  # type: ignore[no-untyped-call]


def _arithmetic(function: Any, name: str) -> None:
    def emit(builder: Any, lanes: Any, a: Any, b: Any) -> Any:
        return getattr(builder, ("f" if lanes == FLOATS else "") + name)(a, b)

    _binary(function, lambda lanes: lanes, emit)


def _integral(function: Any, name: str) -> None:
    _binary(function, lambda lanes: lanes, lambda builder, lanes, a, b: getattr(builder, name)(a, b))


def _comparison(function: Any, sign: str) -> None:
    def emit(builder: Any, lanes: Any, a: Any, b: Any) -> Any:
        return (builder.fcmp_ordered if lanes == FLOATS else builder.icmp_signed)(sign, a, b)

    _binary(function, lambda lanes: BITS, emit)


for _function, _name in (
    (operator.add, "add"),
    (operator.sub, "sub"),
    (operator.mul, "mul"),
    (operator.truediv, "div"),
):
    _arithmetic(_function, _name)
for _function, _name in ((operator.and_, "and_"), (operator.or_, "or_"), (operator.xor, "xor")):
    _integral(_function, _name)
for _function, _name in ((operator.lshift, "shl"), (operator.rshift, "ashr")):
    _integral(_function, _name)
for _function, _name in ((operator.gt, ">"), (operator.lt, "<"), (operator.ge, ">="), (operator.le, "<=")):
    _comparison(_function, _name)
_comparison(operator.eq, "==")


@intrinsic
def splat(context: Any, number: Any) -> Any:
    """Return 16 times a number."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return _spread(builder, arguments[0])

    return Lanes(number)(number), generate


@instruction(INTEGERS, types.int32)
def places(builder: Any, start: Any) -> Any:
    """Return start + 0, 1, ..., 15 of an int32."""
    return builder.add(_spread(builder, start), ir.Constant(_places(WIDTH), list(range(WIDTH))))


@intrinsic
def where(context: Any, bits: Any, first: Any, second: Any) -> Any:
    """Return `first` where `bits`, else `second`; either may be one number. Also takes one bit and two numbers."""
    lanes = bits == BITS

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        a, b = arguments[1:]
        if lanes:
            a, b = (x if isinstance(x.type, ir.VectorType) else _spread(builder, x) for x in (a, b))
        return builder.select(arguments[0], a, b)

    result = (_common(first, second) or Lanes(first)) if lanes else first
    return result(bits, first, second), generate


def _cast(name: str, source: Any, target: Any, instruction: str, doc: str) -> Any:
    """Return a function from lanes, or a number, of one type to another."""

    def convert(context: Any, x: Any) -> Any:
        lanes = isinstance(x, Lanes)

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return getattr(builder, instruction)(arguments[0], target.vector if lanes else _ELEMENTS[target.element])

        return (target(source) if lanes else target.element(source.element)), generate

    convert.__name__, convert.__doc__ = name, doc
    return intrinsic(convert)


bits_of = _cast("bits_of", FLOATS, INTEGERS, "bitcast", "Return the bits of floats as integers.")
floats_of = _cast("floats_of", INTEGERS, FLOATS, "bitcast", "Return the floats with the bits of integers.")
to_floats = _cast("to_floats", INTEGERS, FLOATS, "sitofp", "Return integers as floats.")


@instruction(types.int32, BITS)
def count(builder: Any, bits: Any) -> Any:
    """Return how many of 16 bits are set, an int32."""
    packed = builder.bitcast(bits, ir.IntType(WIDTH))
    return builder.zext(builder.ctpop(packed), ir.IntType(32))


def _fold(builder: Any, lanes: Any, combine: Callable[[Any, Any], Any]) -> Any:
    """Return the 16 numbers combined pairwise."""
    half = WIDTH // 2
    while half:
        undefined = ir.Constant(lanes.type, ir.Undefined)
        low = ir.Constant(_places(half), list(range(half)))
        high = ir.Constant(_places(half), list(range(half, 2 * half)))
        lanes = combine(*(builder.shuffle_vector(lanes, undefined, part) for part in (low, high)))
        half //= 2
    return builder.extract_element(lanes, ir.Constant(ir.IntType(32), 0))


@instruction(types.float32, FLOATS)
def total(builder: Any, lanes: Any) -> Any:
    """Return the sum of 16 floats."""
    return _fold(builder, lanes, builder.fadd)


@instruction(types.float32, FLOATS)
def least(builder: Any, lanes: Any) -> Any:
    """Return the smallest of 16 floats."""
    return _fold(builder, lanes, lambda a, b: builder.select(builder.fcmp_ordered("<", a, b), a, b))


@instruction(types.float32, FLOATS)
def greatest(builder: Any, lanes: Any) -> Any:
    """Return the largest of 16 floats."""
    return _fold(builder, lanes, lambda a, b: builder.select(builder.fcmp_ordered(">", a, b), a, b))
