"""How kernels read and write arrays: 16 items at once, or one.

Arrays are given by their address, an int64. Views of numpy arrays have reference counts, whose atomic updates take
longer than the loop over a short list.
"""

from __future__ import annotations

from typing import Any

import llvmlite.ir as ir  # type: ignore[import-untyped]
from numba.core import types

from recsys_topk.ops.backends.compiled.lanes import BITS, FLOATS, INTEGERS, instruction, intrinsic
from recsys_topk.ops.backends.task import WIDTH

_FLOAT_VECTOR = ir.VectorType(ir.FloatType(), WIDTH)
_BYTE_VECTOR = ir.VectorType(ir.IntType(8), WIDTH)
_BIT_VECTOR = ir.VectorType(ir.IntType(1), WIDTH)


def _at(builder: Any, address: Any, place: Any, element: Any, vector: Any = None) -> Any:
    """Return a pointer to an item, or to a vector of items, from the address of an array and a position."""
    pointer = builder.gep(builder.inttoptr(address, element.as_pointer()), [place])
    return pointer if vector is None else builder.bitcast(pointer, vector.as_pointer())


def _function(builder: Any, name: str, result: Any, arguments: Any) -> Any:
    """Return a function of LLVM whose name holds the types of its arguments."""
    known = builder.module.globals.get(name)
    return ir.Function(builder.module, ir.FunctionType(result, arguments), name) if known is None else known


def _load_where(builder: Any, address: Any, place: Any, bits: Any, vector: Any, align: int) -> Any:
    pointer = _at(builder, address, place, vector.element, vector)
    letter = "f32" if isinstance(vector.element, ir.FloatType) else "i8"
    kinds = [pointer.type, ir.IntType(32), _BIT_VECTOR, vector]
    function = _function(builder, f"llvm.masked.load.v{WIDTH}{letter}.p0", vector, kinds)
    return builder.call(function, [pointer, ir.Constant(ir.IntType(32), align), bits, ir.Constant(vector, None)])


@instruction(FLOATS, types.int64, types.int64)
def load(builder: Any, address: Any, place: Any) -> Any:
    """Return the 16 items that start at a position of the float32 array at an address."""
    return builder.load(_at(builder, address, place, ir.FloatType(), _FLOAT_VECTOR), align=4)


@instruction(FLOATS, types.int64, INTEGERS)
def gather(builder: Any, address: Any, indices: Any) -> Any:
    """Return the items at 16 positions, which are not negative, of the float32 array at an address."""
    start = builder.inttoptr(address, ir.FloatType().as_pointer())
    # llvmlite makes a pointer from one index only; LLVM takes a vector of them.
    pointers = builder.gep(start, [ir.Constant(ir.IntType(32), 0)])
    pointers.indices, pointers.operands = [indices], [start, indices]
    pointers.type = ir.VectorType(start.type, WIDTH)
    kinds = [pointers.type, ir.IntType(32), _BIT_VECTOR, _FLOAT_VECTOR]
    function = _function(builder, f"llvm.masked.gather.v{WIDTH}f32.v{WIDTH}p0", _FLOAT_VECTOR, kinds)
    every, nothing = ir.Constant(_BIT_VECTOR, [1] * WIDTH), ir.Constant(_FLOAT_VECTOR, None)
    return builder.call(function, [pointers, ir.Constant(ir.IntType(32), 4), every, nothing])


@instruction(FLOATS, types.int64, types.int64, BITS)
def load_where(builder: Any, address: Any, place: Any, bits: Any) -> Any:
    """Return the same as `load` where `bits`, and 0 elsewhere, where nothing is read."""
    return _load_where(builder, address, place, bits, _FLOAT_VECTOR, 4)


@instruction(BITS, types.int64, types.int64, BITS)
def load_bits(builder: Any, address: Any, place: Any, bits: Any) -> Any:
    """Return 16 items of the boolean array at an address where `bits`, and False elsewhere, where nothing is read."""
    loaded = _load_where(builder, address, place, bits, _BYTE_VECTOR, 1)
    return builder.icmp_unsigned("!=", loaded, ir.Constant(_BYTE_VECTOR, None))


@instruction(types.void, types.int64, types.int64, FLOATS)
def store(builder: Any, address: Any, place: Any, lanes: Any) -> None:
    """Write the 16 items that start at a position of the float32 array at an address."""
    builder.store(lanes, _at(builder, address, place, ir.FloatType(), _FLOAT_VECTOR), align=4)


@instruction(types.void, types.int64, types.int64, FLOATS, BITS)
def store_where(builder: Any, address: Any, place: Any, lanes: Any, bits: Any) -> None:
    """Write the items of `store` where `bits`, and nothing elsewhere."""
    pointer = _at(builder, address, place, ir.FloatType(), _FLOAT_VECTOR)
    kinds = [_FLOAT_VECTOR, pointer.type, ir.IntType(32), _BIT_VECTOR]
    function = _function(builder, f"llvm.masked.store.v{WIDTH}f32.p0", ir.VoidType(), kinds)
    builder.call(function, [lanes, pointer, ir.Constant(ir.IntType(32), 4), bits])


@intrinsic
def read(context: Any, address: Any, place: Any, kind: Any) -> Any:
    """Return one item of the array of a type (`np.float32`, `np.int64`, `np.uint8`) at an address."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.load(_at(builder, arguments[0], arguments[1], context.get_data_type(kind.dtype)))

    return kind.dtype(types.int64, types.int64, kind), generate


@intrinsic
def write(context: Any, address: Any, place: Any, item: Any) -> Any:
    """Write one item of an array of its type at an address."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        builder.store(arguments[2], _at(builder, arguments[0], arguments[1], context.get_data_type(item)))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, item), generate


@instruction(types.int64, types.int64)
def claim(builder: Any, address: Any) -> Any:
    """Return the int64 at an address and add 1 to it, atomically."""
    counter = builder.inttoptr(address, ir.IntType(64).as_pointer())
    return builder.atomic_rmw("add", counter, ir.Constant(ir.IntType(64), 1), "monotonic")
