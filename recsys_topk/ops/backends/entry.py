"""C functions for the loops of `recsys_topk.ops.backends.jit`. Any thread can call them without Python and the GIL.

`recsys_topk.ops.backends.parallel` packs the arguments of a loop into memory, and the C function reads them from there.
"""

from __future__ import annotations

from typing import Any

import llvmlite.ir as ir  # type: ignore[import-untyped]
import numba
import numpy as np
from numba.core import types

from recsys_topk.ops.backends.compiled.build import native
from recsys_topk.ops.backends.compiled.lanes import instruction, intrinsic
from recsys_topk.ops.backends.compiled.memory import claim, read
from recsys_topk.ops.backends.machine_code import Code

# Bytes of a packed call before its arguments: the address of the C function and the address of the next call.
HEAD = 16


@instruction(types.void, types.int64, types.int64)
def invoke(builder: Any, code: Any, address: Any) -> None:
    """Call the C function at `code` with an address."""
    kind = ir.FunctionType(ir.VoidType(), [ir.IntType(64)])
    builder.call(builder.inttoptr(code, kind.as_pointer()), [address])


@native
def take_chains(address: Any) -> None:
    """Run chains of calls that no other thread has taken, until none is left.

    The memory at `address` holds int64: the number of chains taken, the number of chains, and the address of the first
    call of each chain.
    """
    while True:
        chain = claim(address)
        if chain >= read(address, 1, np.int64):
            return
        call = read(address, 2 + chain, np.int64)
        while call != 0:
            invoke(read(call, 0, np.int64), call + HEAD)
            call = read(call, 1, np.int64)


def entry_code(loop: Any, kinds: tuple[str, ...]) -> Code:
    """Compile a C function that reads the arguments of a loop at an address and calls the loop.

    A number takes 8 bytes, and an array the 8-byte fields of numba's array type: two pointers to an owner, which are 0,
    the number of elements, the bytes per element, the address of the first element, the shape, and the strides.

    Args:
        loop: The loop, as numba's dispatcher.
        kinds: Type of each argument: ``"q"`` for an int64, ``"f"`` for a float32, and for a contiguous array its numpy
            type code followed by its number of dimensions, for example ``"f2"``.
    """
    packed: Any = types.Tuple([_type(kind) for kind in kinds])  # type: ignore[no-untyped-call]

    @intrinsic
    def arguments_at(context: Any, address: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            values, place = [], arguments[0]
            for kind, element in zip(kinds, packed, strict=True):
                values.append(builder.load(builder.inttoptr(place, context.get_value_type(element).as_pointer())))
                size = 8 * (5 + 2 * int(kind[1:])) if kind[1:] else 8
                place = builder.add(place, ir.Constant(ir.IntType(64), size))
            return context.make_tuple(builder, packed, values)

        return packed(types.int64), generate

    def entry(address: Any) -> None:
        loop(*arguments_at(address))

    return native(entry).compile()


def _type(kind: str) -> Any:
    element = numba.from_dtype(np.dtype(kind[0]))
    return types.Array(element, int(kind[1:]), "C") if kind[1:] else element
