from __future__ import annotations

import os
import pickle
import subprocess
import sys
import types
from collections import OrderedDict, defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from recsys_topk.datamodules.recflow.pickles import FormatError, StoredArray, load_pickle


def plain(value: Any) -> Any:
    if isinstance(value, StoredArray):
        return value.array().tolist()
    if isinstance(value, dict):
        return {key: plain(entry) for key, entry in value.items()}
    return value


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize("dtype", ["int64", "int32", "uint8", "float32"])
def test_arrays_of_every_protocol_are_read(tmp_path: Path, protocol: int, dtype: str) -> None:
    array = np.arange(12).reshape(3, 4).astype(dtype)
    content = {1: {"a": array, "f": np.asfortranarray(array), "empty": array[:0]}, "n": np.int64(5), "s": "text"}
    path = tmp_path / "a.pkl"
    path.write_bytes(pickle.dumps(content, protocol=protocol))
    expected = {1: {"a": array.tolist(), "f": array.tolist(), "empty": []}, "n": 5, "s": "text"}
    assert plain(load_pickle(path)) == expected


def test_arrays_written_by_numpy_1_are_read(tmp_path: Path) -> None:
    content = pickle.dumps({7: np.arange(3)}, protocol=2)
    old = content.replace(b"numpy._core.multiarray", b"numpy.core.multiarray")
    assert old != content
    (tmp_path / "old.pkl").write_bytes(old)
    assert plain(load_pickle(tmp_path / "old.pkl")) == {7: [0, 1, 2]}


@pytest.mark.parametrize("home", ["utils", "__mp_main__", "models"])
@pytest.mark.parametrize("name", ["defaultdict_tuple", "defaultdict_str"])
def test_default_factories_of_the_research_code_are_not_called(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, home: str, name: str
) -> None:
    module = types.ModuleType(home)

    def factory() -> tuple[()]:
        raise AssertionError("a factory of the file was called")

    factory.__module__, factory.__qualname__, factory.__name__ = home, name, name
    setattr(module, name, factory)
    monkeypatch.setitem(sys.modules, home, module)
    written = pickle.dumps(defaultdict(factory, {5: {"rank_pos": np.zeros((1, 8), np.int64)}}))
    monkeypatch.delitem(sys.modules, home)
    (tmp_path / "d.pkl").write_bytes(written)
    content = load_pickle(tmp_path / "d.pkl")
    assert plain(content) == {5: {"rank_pos": [[0] * 8]}}
    assert isinstance(content, defaultdict)


class Attack:
    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> Any:
        return self.call


def attacks(marker: Path) -> list[Any]:
    command = f"touch {marker}"
    return [
        Attack(os.system, command),
        Attack(subprocess.Popen, ["touch", str(marker)]),
        Attack(eval, f"open({str(marker)!r}, 'w')"),
        Attack(exec, f"open({str(marker)!r}, 'w')"),
        Attack(getattr, os, "system"),
        {1: {"rank_pos": np.array([Attack(os.system, command)], dtype=object)}},
        defaultdict(list, {1: Attack(os.system, command)}),
    ]


@pytest.mark.parametrize("number", range(7))
@pytest.mark.parametrize("protocol", [0, 2, 4, 5])
def test_pickle_that_runs_a_command_raises_without_running_it(tmp_path: Path, number: int, protocol: int) -> None:
    marker = tmp_path / "ran"
    path = tmp_path / "attack.pkl"
    try:
        path.write_bytes(pickle.dumps(attacks(marker)[number], protocol=protocol))
    except (TypeError, pickle.PicklingError):  # a module cannot be pickled: write the name by hand
        path.write_bytes(b"cbuiltins\ngetattr\n(cos\nsystem\nS'x'\ntR.")
    with pytest.raises(FormatError, match=r"attack\.pkl asks for \S+\.\S+ .*nothing was run"):
        load_pickle(path)
    assert not marker.exists()


@pytest.mark.parametrize("value", [OrderedDict(a=1), Path("/tmp"), complex(1, 2), {1, 2}])
def test_error_names_classes_that_the_format_does_not_use(tmp_path: Path, value: Any) -> None:
    path = tmp_path / "other.pkl"
    path.write_bytes(pickle.dumps(value, protocol=2))
    with pytest.raises(FormatError, match=r"other\.pkl asks for"):
        load_pickle(path)


@pytest.mark.parametrize("content", [b"", b"\x80\x04", b"not a pickle", pickle.dumps({1: np.arange(9)})[:-20]])
def test_error_for_truncated_pickle_names_the_file(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "cut.pkl"
    path.write_bytes(content)
    with pytest.raises(FormatError, match=r"cut\.pkl is not a whole pickle"):
        load_pickle(path)
