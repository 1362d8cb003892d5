"""An export of two stages with random weights, and raw features of users and films."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx

from recsys_topk.serving.manifest import Input, Model, StageEntry, write_manifest
from recsys_topk.serving.recommend import ENCODER
from recsys_topk.tabular.export_tables import ITEMS, USERS, ItemTable, UserTable
from recsys_topk.tabular.features.description import Description
from recsys_topk.tabular.features.fitter import fit_features

NUMBER, USERS_NUMBER, QUOTAS = 150, 20, (30, 10)
_DRAW = np.random.default_rng(7)
GENRES = [
    [str(one) for one in _DRAW.choice(["comedy", "drama", "horror", "war"], _DRAW.integers(1, 4), replace=False)]
    for _ in range(NUMBER)
]
LANGUAGE = [["en", "fr", "ja"][int(n)] for n in _DRAW.integers(0, 3, NUMBER)]
NAMES = [f"film {n:03}" for n in range(NUMBER)]
DESCRIPTION = {
    "user": {"user_id": "categorical", "age": "numeric", "tags": {"kind": "bag", "separator": "|"}},
    "context": {"device": "categorical", "at": {"kind": "time", "parts": ["hour"]}},
    "items": {"item_id": "categorical", "genre": "bag", "language": "categorical"},
    "history": ["item_id"],
}


def raw_request(number: int) -> dict[str, Any]:
    """Return the raw features of a user."""
    draw = np.random.default_rng(number)
    return {
        "user_id": f"user {number}",
        "age": None if number % 7 == 3 else 20.0 + number,
        "tags": "a|b" if number % 2 else "c",
        "device": ["phone", "desk"][number % 2],
        "at": 1_700_000_000 + 3600 * number,
        "history": [NAMES[one] for one in draw.choice(NUMBER, 1 + number % 4, replace=False)],
    }


def write_model(path: Path, inputs: dict[str, int], nodes: list[Any], tables: dict[str, np.ndarray]) -> Model:
    """Write an ONNX model with the output ``out``. Inputs are ids, with a number of axes each."""
    constants = [onnx.numpy_helper.from_array(table, name) for name, table in tables.items()]
    free = [onnx.helper.make_tensor_value_info(name, onnx.TensorProto.INT64, [None] * n) for name, n in inputs.items()]
    out = onnx.helper.make_tensor_value_info("out", onnx.TensorProto.FLOAT, None)
    graph = onnx.helper.make_graph(nodes, path.stem, free, [out], constants)
    path.parent.mkdir(exist_ok=True)
    onnx.save(onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 18)], ir_version=9), path)
    given = tuple(Input(name, "int64", tuple(f"axis{n}" for n in range(axes))) for name, axes in inputs.items())
    return Model(f"{path.parent.name}/{path.name}", given, "out")


def write_films(folder: Path, seed: int = 0) -> Path:
    """Write the export to a new folder: vectors of users, views and films, and a second score of user and film."""
    users = [raw_request(number) for number in range(USERS_NUMBER)]
    films = {"item_id": NAMES, "genre": GENRES, "language": LANGUAGE}
    encoder = fit_features(
        Description.from_plain(DESCRIPTION), {"user": users, "context": users, "items": films, "history": films}
    )
    schema = encoder.schema()
    draw, node = np.random.default_rng(seed), onnx.helper.make_node
    vectors = {name: draw.normal(size=(NUMBER + 99, 6)).astype(np.float32) for name in ("user", "film")}
    scalars = {name: draw.normal(size=NUMBER + 99).astype(np.float32) for name in ("user", "film")}
    zero, one = {"zero": np.array(0)}, {"one": np.array([1])}
    (folder / "retrieval").mkdir(parents=True)
    first = StageEntry("retrieval", "two_tower", QUOTAS[0], {
        "requests": write_model(folder / "retrieval" / "requests.onnx", {"request": 2, "history": 3}, [
            node("Gather", ["request", "zero"], ["who"], axis=1), node("Gather", ["user", "who"], ["own"]),
            node("Gather", ["film", "history"], ["views"]), node("ReduceSum", ["views", "axes"], ["sum"], keepdims=0),
            node("Add", ["own", "sum"], ["out"]),
        ], {**vectors, **zero, "axes": np.array([1, 2])}),
        "items": write_model(folder / "retrieval" / "items.onnx", {"items": 2}, [
            node("Gather", ["items", "zero"], ["what"], axis=1), node("Gather", ["film", "what"], ["out"]),
        ], {"film": vectors["film"], **zero}),
    })  # fmt: skip
    second = StageEntry("ranking", "mlp", QUOTAS[1], {
        "scores": write_model(folder / "ranking" / "scores.onnx", {"request": 2, "items": 3}, [
            node("Gather", ["items", "zero"], ["what"], axis=2), node("Gather", ["film", "what"], ["a"]),
            node("Gather", ["request", "zero"], ["who"], axis=1), node("Gather", ["user", "who"], ["b"]),
            node("Unsqueeze", ["b", "one"], ["c"]), node("Add", ["a", "c"], ["out"]),
        ], {**scalars, **zero, **one}),
    })  # fmt: skip
    encoder.save(folder / ENCODER)
    ids, values = encoder.encode("items", films)
    ItemTable(np.array(NAMES), ids, values, np.ones(NUMBER, dtype=np.int64)).write(folder / ITEMS)
    user, context = encoder.encode("user", users), encoder.encode("context", users)
    seen = [np.array([NAMES.index(one) for one in row["history"]]) for row in users]
    history = np.zeros((USERS_NUMBER, 4, 1), dtype=np.int64)
    for row, own in enumerate(seen):
        history[row, : len(own), 0] = ids[own, 0]
    UserTable(
        names=np.array([row["user_id"] for row in users]),
        request=np.concatenate([user.ids, context.ids], axis=1),
        request_values=np.concatenate([user.values, context.values], axis=1),
        history=history,
        history_length=np.array([len(own) for own in seen]),
        history_values=np.empty((USERS_NUMBER, 4, 0), dtype=np.float32),
        seen=np.concatenate([np.sort(own) for own in seen]),
        seen_ends=np.cumsum([len(own) for own in seen]),
    ).sorted().write(folder / USERS)  # fmt: skip
    write_manifest(folder, schema, (first, second), 5, {"views": 4, "items": NUMBER})
    return folder
