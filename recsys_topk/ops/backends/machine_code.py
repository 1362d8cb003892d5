"""Machine code of the compiled loops. It is read from disk, or compiled by numba and written there.

Only compilation imports numba, whose import takes longer than most calls. Files are stored in ``NUMBA_CACHE_DIR``, in
``__pycache__`` beside this file, or in the cache folder of the user: the first of them that can be written. If there is
none, every process compiles again.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import importlib
import json
import os
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator
from functools import cache, cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

_HERE = Path(__file__).parent
_lock = threading.RLock()
_engines: list[Any] = []  # own the loaded machine code


class Code(NamedTuple):
    """A compiled C function.

    Attributes:
        symbol: Its name in `content`.
        runtime: The functions of numba's runtime that `content` refers to.
        content: An object file.
    """

    symbol: str
    runtime: list[str]
    content: bytes


class Kernel:
    """A C function of one int64 that any thread can call without Python.

    Args:
        path: Module and name of a `recsys_topk.ops.backends.compiled.build.native`, with a colon between them.
    """

    def __init__(self, path: str) -> None:
        self.path = path

    @cached_property
    def address(self) -> int:
        """Address of the machine code. The first access loads it."""
        return load(self.path, self._compile)

    def _compile(self) -> Code:
        module, name = self.path.split(":")
        code: Code = getattr(importlib.import_module(module), name).compile()
        return code


def load(name: str, compile_code: Callable[[], Code]) -> int:
    """Return the address of a C function, from disk or newly compiled.

    Args:
        name: The name of the function. It must change with all that is compiled but the files of `fingerprint`.
        compile_code: Compiles the function.
    """
    with _lock:
        key = hashlib.sha256(f"{name} {_target()} {fingerprint()}".encode()).hexdigest()[:16]
        file = f"{name.split(':')[-1].split('(')[0]}.{key}.o"
        code = next(filter(None, (_read(folder / file) for folder in _folders())), None)
        if code is None:
            code = compile_code()
            _write(file, code)
        return _link(code)


@cache
def fingerprint() -> str:
    """Return a hash of the files that every compiled function may depend on."""
    files = [*sorted((_HERE / "compiled").glob("*.py")), _HERE / "task.py", _HERE / "entry.py"]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


@cache
def _target() -> str:
    """Return what machine code depends on beside its source: compiler and processor."""
    import llvmlite.binding as llvm  # type: ignore[import-untyped]

    processor = (llvm.get_process_triple(), llvm.get_host_cpu_name(), llvm.get_host_cpu_features().flatten())
    chosen = (os.environ.get("NUMBA_CPU_NAME"), os.environ.get("NUMBA_CPU_FEATURES"))
    return repr((version("numba"), version("llvmlite"), sys.version_info[:2], processor, chosen))


def _folders() -> Iterator[Path]:
    chosen = os.environ.get("NUMBA_CACHE_DIR")
    if chosen:
        yield Path(chosen)
    yield _HERE / "__pycache__"
    with contextlib.suppress(RuntimeError):  # the user has no home
        yield Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "recsys_topk" / "machine_code"


def _read(file: Path) -> Code | None:
    """Return the code in a file; None if the file is missing or damaged."""
    try:
        digest, _, rest = file.read_bytes().partition(b"\n")
    except OSError:
        return None
    if digest != hashlib.sha256(rest).hexdigest().encode():
        return None
    head, _, content = rest.partition(b"\n")
    symbol, runtime = json.loads(head)
    return Code(symbol, runtime, content)


def _write(name: str, code: Code) -> None:
    rest = json.dumps([code.symbol, code.runtime]).encode() + b"\n" + code.content
    for folder in _folders():
        with contextlib.suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=folder, delete=False) as file:
                file.write(hashlib.sha256(rest).hexdigest().encode() + b"\n" + rest)
            Path(file.name).replace(folder / name)
            return
    _warn_not_stored()


@cache
def _warn_not_stored() -> None:
    tried = ", ".join(map(str, _folders()))
    warnings.warn(
        f"compiled loops cannot be stored, and every process compiles them again (seconds per loss): none of {tried} "
        f"can be written. Set NUMBA_CACHE_DIR to a writable folder",
        stacklevel=2,
    )


def _link(code: Code) -> int:
    import llvmlite.binding as llvm

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    for name in code.runtime:
        if llvm.address_of_symbol(name) is None:
            # Without numba. Only loops that allocate or raise would call these functions, and no loop does.
            llvm.add_symbol(name, ctypes.cast(ctypes.pythonapi.Py_FatalError, ctypes.c_void_p).value)
    machine = llvm.Target.from_triple(llvm.get_process_triple()).create_target_machine(jit=True)
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine)
    engine.add_object_file(llvm.ObjectFileRef.from_data(code.content))
    engine.finalize_object()
    _engines.append(engine)
    return int(engine.get_function_address(code.symbol))
