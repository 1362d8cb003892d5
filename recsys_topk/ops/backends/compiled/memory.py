"""How kernels read and write arrays: 16 items at once, or one.

Arrays are given by their address, an int64. Views of numpy arrays have reference counts, whose atomic updates take
longer than the loop over a short list.
"""

from __future__ import annotations

from typing import Any

import llvmlite.ir as ir  # type: ignore[import-untyped]
from numba.core import types

from recsys_topk.ops.backends.compiled.lanes import BITS, FLOATS, INTEGERS, intrinsic
from recsys_topk.ops.backends.task import WIDTH


def _at(builder: Any, arguments: Any, element: Any, vector: Any = None) -> Any:
    """Return a pointer to an item, or to a vector of items, from the address of an array and a position."""
    start = builder.inttoptr(arguments[0], element.as_pointer())
    pointer = builder.gep(start, [arguments[1]])
    return pointer if vector is None else builder.bitcast(pointer, vector.as_pointer())


def _masked(builder: Any, operation: str, vector: Any, kind: Any) -> Any:
    """Return LLVM's masked load or store; its name holds the type of the vector."""
    letter = "f32" if isinstance(vector.element, ir.FloatType) else "i8"
    name = f"llvm.masked.{operation}.v{WIDTH}{letter}.p0"
    found = builder.module.globals.get(name)
    return ir.Function(builder.module, kind, name) if found is None else found


_FLOAT_VECTOR = ir.VectorType(ir.FloatType(), WIDTH)
_BYTE_VECTOR = ir.VectorType(ir.IntType(8), WIDTH)
_BIT_VECTOR = ir.VectorType(ir.IntType(1), WIDTH)


@intrinsic
def load(context: Any, address: Any, place: Any) -> Any:
    """Return the 16 items that start at a position of the float32 array at an address."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.load(_at(builder, arguments, ir.FloatType(), _FLOAT_VECTOR), align=4)

    return FLOATS(types.int64, types.int64), generate


@intrinsic
def gather(context: Any, address: Any, indices: Any) -> Any:
    """Return the items at 16 positions, which are not negative, of the float32 array at an address."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        start = builder.inttoptr(arguments[0], ir.FloatType().as_pointer())
        # llvmlite makes a pointer from one index only; LLVM takes a vector of them.
        pointers = builder.gep(start, [ir.Constant(ir.IntType(32), 0)])
        pointers.indices, pointers.operands = [arguments[1]], [start, arguments[1]]
        pointers.type = ir.VectorType(start.type, WIDTH)
        name = f"llvm.masked.gather.v{WIDTH}f32.v{WIDTH}p0"
        kind = ir.FunctionType(_FLOAT_VECTOR, [pointers.type, ir.IntType(32), _BIT_VECTOR, _FLOAT_VECTOR])
        found = builder.module.globals.get(name)
        function = ir.Function(builder.module, kind, name) if found is None else found
        every, nothing = ir.Constant(_BIT_VECTOR, [1] * WIDTH), ir.Constant(_FLOAT_VECTOR, None)
        return builder.call(function, [pointers, ir.Constant(ir.IntType(32), 4), every, nothing])

    return FLOATS(types.int64, INTEGERS), generate


@intrinsic
def load_where(context: Any, address: Any, place: Any, bits: Any) -> Any:
    """Return the same as `load` where `bits`, and 0 elsewhere, where nothing is read."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return _load_where(builder, arguments, _FLOAT_VECTOR, 4)

    return FLOATS(types.int64, types.int64, BITS), generate


@intrinsic
def load_bits(context: Any, address: Any, place: Any, bits: Any) -> Any:
    """Return 16 items of the boolean array at an address where `bits`, and False elsewhere, where nothing is read."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        found = _load_where(builder, arguments, _BYTE_VECTOR, 1)
        return builder.icmp_unsigned("!=", found, ir.Constant(_BYTE_VECTOR, None))

    return BITS(types.int64, types.int64, BITS), generate


def _load_where(builder: Any, arguments: Any, vector: Any, align: int) -> Any:
    pointer = _at(builder, arguments, vector.element, vector)
    kind = ir.FunctionType(vector, [pointer.type, ir.IntType(32), _BIT_VECTOR, vector])
    given = [pointer, ir.Constant(ir.IntType(32), align), arguments[2], ir.Constant(vector, None)]
    return builder.call(_masked(builder, "load", vector, kind), given)


@intrinsic
def store(context: Any, address: Any, place: Any, lanes: Any) -> Any:
    """Write the 16 items that start at a position of the float32 array at an address."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        builder.store(arguments[2], _at(builder, arguments, ir.FloatType(), _FLOAT_VECTOR), align=4)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, FLOATS), generate


@intrinsic
def store_where(context: Any, address: Any, place: Any, lanes: Any, bits: Any) -> Any:
    """Write the items of `store` where `bits`, and nothing elsewhere."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = _at(builder, arguments, ir.FloatType(), _FLOAT_VECTOR)
        kind = ir.FunctionType(ir.VoidType(), [_FLOAT_VECTOR, pointer.type, ir.IntType(32), _BIT_VECTOR])
        given = [arguments[2], pointer, ir.Constant(ir.IntType(32), 4), arguments[3]]
        builder.call(_masked(builder, "store", _FLOAT_VECTOR, kind), given)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, FLOATS, BITS), generate


@intrinsic
def read(context: Any, address: Any, place: Any, kind: Any) -> Any:
    """Return one item of the array of a type (`np.float32`, `np.int64`, `np.uint8`) at an address."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.load(_at(builder, arguments, context.get_data_type(kind.dtype)))

    return kind.dtype(types.int64, types.int64, kind), generate


@intrinsic
def write(context: Any, address: Any, place: Any, item: Any) -> Any:
    """Write one item of an array of its type at an address."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        builder.store(arguments[2], _at(builder, arguments, context.get_data_type(item)))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, item), generate


@intrinsic
def claim(context: Any, address: Any) -> Any:
    """Return the int64 at an address and add 1 to it, atomically."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        counter = builder.inttoptr(arguments[0], ir.IntType(64).as_pointer())
        return builder.atomic_rmw("add", counter, ir.Constant(ir.IntType(64), 1), "monotonic")

    return types.int64(types.int64), generate
