"""Read interactions once and distribute them to files by user, so that memory stays bounded."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from recsys_topk.datamodules.columns import Keys, keys_of, numbers_of, one_chunk, split_numbers
from recsys_topk.datamodules.folders import remove_partial, whole_folder
from recsys_topk.datamodules.id_counter import IdCounter
from recsys_topk.datamodules.id_keys import mixed
from recsys_topk.datamodules.interactions.sequences import ROW
from recsys_topk.datamodules.reading import TableReader
from recsys_topk.datamodules.times import guess_unit, microseconds

Array = npt.NDArray[Any]

ROWS_PER_PART: Final = 1 << 20
MOST_PARTS: Final = 128
_SAMPLE: Final = 1 << 20


class RawIds:
    """The distinct ids of a column: their keys, and the ids if they are strings."""

    def __init__(self) -> None:
        self._counter = IdCounter(counting=False)
        self._texts: dict[int, str] = {}
        self.text = False

    def add(self, column: Any, keys: Keys, *, texts_only: bool = False) -> None:
        """Add the ids of a column, without missing ones. An integer is its key, so `texts_only` skips integers."""
        if not texts_only:
            self._counter.add(keys.keys[~keys.missing])
        if keys.text:
            self.text = True
            distinct = column.unique().drop_null().cast("string")
            self._texts.update(zip(keys_of(distinct).keys.tolist(), distinct.to_pylist(), strict=True))

    def keys(self) -> Array:
        """Return the keys, ascending."""
        return self._counter.keys()

    def merge(self, keys: Array, texts: Mapping[int, str], text: bool) -> None:
        """Add the ids of another collection."""
        self._counter.add(keys)
        self._texts.update(texts)
        self.text |= text

    @property
    def texts(self) -> Mapping[int, str]:
        """The string ids, by key."""
        return self._texts

    def ids(self, keys: Array) -> Any:
        """Return the ids of keys: integers if all ids are integers, else strings."""
        if not self.text:
            return keys
        return np.array([self._texts.get(key, str(key)) for key in keys.tolist()], dtype=object)


class Spill:
    """Interactions in parts by user, written one piece of the sources at a time.

    A piece is a file or some of its row groups. Its folder appears when the piece is complete, together with its
    statistics. A killed process loses only the piece that it was reading; the next process resumes with that piece.

    Args:
        folder: The folder of the pieces, which may hold pieces of an earlier process.
        roles: The column of each role.
        context: Columns of the interactions that are context features.
        min_rating: Interactions with a lower rating, or without a rating, are left out.
        parts: Number of parts.
        rows: Approximate number of rows.

    Attributes:
        items: The items that occur.
        users: The users that occur.
        unit: The unit of time, once it is known.
        kept: Number of interactions written.
        left_out: Number of interactions left out, by reason.
    """

    def __init__(
        self,
        folder: Path,
        roles: Mapping[str, str],
        context: Sequence[str],
        min_rating: float | None,
        parts: int,
        rows: int,
    ) -> None:
        self.folder, self.roles, self.context, self.min_rating = folder, roles, list(context), min_rating
        self.parts, self._step = parts, max(rows // _SAMPLE, 1)
        self.items, self.users = RawIds(), RawIds()
        self.unit: str | None = None
        self.kept = 0
        self.left_out: dict[str, int] = {}
        self.span: tuple[int, int] | None = None
        self._times: list[Array] = []
        self._seen = 0
        self._pieces: list[Path] = []

    def read(self, reader: TableReader, split: int | None, done: Callable[[int], None]) -> None:
        """Read a table, except for the pieces that were read before.

        Args:
            reader: The table.
            split: The split number of all its interactions; None = from the split column, or not given.
            done: Called with the number of rows of each batch that was read.
        """
        columns = [column for role, column in self.roles.items() if role != "split" or split is None]
        reader.require([*columns, *self.context])
        for piece in range(reader.pieces):
            target = self.folder / f"piece-{len(self._pieces)}"
            if target.is_dir():
                done(int(_read_json(target / "facts.json")["seen"]))
            else:
                remove_partial(target)
                with whole_folder(target) as folder:
                    made = _Piece(folder, self)
                    for batch in reader.batches([*columns, *self.context], piece):
                        made.add(batch, split)
                        done(batch.num_rows)
                    made.close()
            self._take(target)

    def part(self, number: int) -> tuple[Array, Any]:
        """Return the interactions of a part (dtype `ROW`) and their context columns as a pyarrow table."""
        import pyarrow as pa

        files = [piece / f"{number}.rows" for piece in self._pieces]
        rows = np.concatenate([np.fromfile(file, dtype=ROW) for file in files])
        if not self.context or not rows.size:
            return rows, None
        tables = []
        for file in files:
            if file.with_suffix(".context").is_file():
                with pa.memory_map(str(file.with_suffix(".context"))) as source:
                    tables.append(pa.ipc.open_stream(source).read_all())
        return rows, pa.concat_tables(tables)

    def drop(self, number: int) -> None:
        """Remove the files of a part."""
        for piece in self._pieces:
            (piece / f"{number}.rows").unlink(missing_ok=True)
            (piece / f"{number}.context").unlink(missing_ok=True)

    def quantile(self, share: float) -> int:
        """Return the time before which a share of the interactions lies (estimated by a sample for large data)."""
        times = np.sort(np.concatenate(self._times))
        return int(times[min(int(share * times.size), times.size - 1)])

    def _take(self, piece: Path) -> None:
        """Add the statistics of a piece."""
        facts = _read_json(piece / "facts.json")
        self._pieces.append(piece)
        self.items.merge(np.load(piece / "items.npy"), *_ids_of(facts["items"]))
        self.users.merge(np.empty(0, dtype=np.int64), *_ids_of(facts["users"]))
        self._times.append(np.load(piece / "times.npy"))
        self.unit = self.unit or facts["unit"]
        self.kept += facts["kept"]
        self._seen += facts["seen"]
        for reason, number in facts["left_out"].items():
            self.left_out[reason] = self.left_out.get(reason, 0) + number
        if facts["span"] is not None:
            low, high = facts["span"]
            self.span = (low, high) if self.span is None else (min(low, self.span[0]), max(high, self.span[1]))


class _Piece:
    """Writes a piece of the interactions to files by part, and its statistics."""

    def __init__(self, folder: Path, spill: Spill) -> None:
        self.folder, self.roles, self.context, self.min_rating = folder, spill.roles, spill.context, spill.min_rating
        self.parts, self._step, self.unit, self._before = spill.parts, spill._step, spill.unit, spill._seen
        self.items, self.users = RawIds(), RawIds()
        self.kept, self._seen = 0, 0
        self.left_out: dict[str, int] = {}
        self.span: tuple[int, int] | None = None
        self._files = [(folder / f"{part}.rows").open("wb") for part in range(self.parts)]
        self._contexts: list[Any] = [None] * self.parts
        self._times: list[Array] = [np.empty(0, dtype=np.int64)]

    def close(self) -> None:
        """Finish writing."""
        for file in (*self._files, *(writer for writer in self._contexts if writer is not None)):
            file.close()
        np.save(self.folder / "items.npy", self.items.keys())
        np.save(self.folder / "times.npy", np.concatenate(self._times))
        ids = {
            name: [list(own.texts.items()), own.text] for name, own in (("items", self.items), ("users", self.users))
        }
        counts = {"kept": self.kept, "seen": self._seen, "left_out": self.left_out, "span": self.span}
        text = json.dumps({"unit": self.unit, **counts, **ids})
        (self.folder / "facts.json").write_text(text, encoding="utf-8")

    def add(self, batch: Any, split: int | None) -> None:
        """Add a record batch."""
        column = {
            role: one_chunk(batch.column(name)) for role, name in self.roles.items() if name in batch.schema.names
        }
        users, items = keys_of(column["user"]), keys_of(column["item"])
        rows = np.zeros(batch.num_rows, dtype=ROW)
        rows["user"], rows["item"], rows["weight"] = users.keys, items.keys, 1.0
        kept = self._drop(~users.missing, f"no {self.roles['user']}") & self._drop(
            ~items.missing, f"no {self.roles['item']}"
        )
        rows["split"] = (
            split_numbers(column["split"], self.roles["split"]) if split is None and "split" in column else split or 0
        )
        if "time" in column:
            if self.unit is None and column["time"].null_count < batch.num_rows:
                self.unit = guess_unit(column["time"])
            rows["time"], missing = microseconds(column["time"], self.unit or "s", self.roles["time"])
            kept &= self._drop(~missing, f"no {self.roles['time']}")
        else:  # the order of the rows, with the given splits one after the other
            rows["time"] = (
                self._before + self._seen + np.arange(batch.num_rows) + (rows["split"].astype(np.int64) << 42)
            )
        if self.min_rating is not None:
            rating = numbers_of(column["rating"], self.roles["rating"])
            kept &= self._drop(
                rating >= self.min_rating, f"{self.roles['rating']} below {self.min_rating:g} or missing"
            )
        if "weight" in column:
            weight = numbers_of(column["weight"], self.roles["weight"])
            if (weight < 0).any():
                raise ValueError(f"column {self.roles['weight']!r} has the weight {weight.min():g}; weights are >= 0")
            rows["weight"] = np.nan_to_num(weight)
            kept &= self._drop(weight > 0, f"{self.roles['weight']} 0 or missing")
        self._seen += batch.num_rows
        if not kept.all():
            where = np.flatnonzero(kept)
            rows, batch = rows[where], batch.take(where)
            column |= {role: column[role].take(where) for role in ("user", "item")}
            users, items = (Keys(keys.keys[where], keys.missing[where], keys.text) for keys in (users, items))
        if rows.size:
            self.items.add(column["item"], items)
            self.users.add(column["user"], users, texts_only=True)
            self._sample(rows["time"])
            self._write(rows, batch)

    def _drop(self, kept: Array, reason: str) -> Array:
        number = int(kept.size - np.count_nonzero(kept))
        if number:
            self.left_out[reason] = self.left_out.get(reason, 0) + number
        return kept

    def _sample(self, times: Array) -> None:
        low, high = int(times.min()), int(times.max())
        self.span = (low, high) if self.span is None else (min(low, self.span[0]), max(high, self.span[1]))
        self._times.append(times[-self.kept % self._step :: self._step].copy())

    def _write(self, rows: Array, batch: Any) -> None:
        import pyarrow as pa

        self.kept += rows.size
        part = (mixed(rows["user"], 7) % np.uint64(self.parts)).astype(np.int64)
        order = np.argsort(part, kind="stable")
        rows = rows[order]
        edges = np.searchsorted(part[order], np.arange(self.parts + 1))
        contexts = batch.select(self.context).take(order) if self.context else None
        for number in np.flatnonzero(np.diff(edges)):
            here = slice(edges[number], edges[number + 1])
            rows[here].tofile(self._files[number])
            if contexts is not None:
                if self._contexts[number] is None:
                    path = str(self.folder / f"{number}.context")
                    self._contexts[number] = pa.ipc.new_stream(path, contexts.schema)
                self._contexts[number].write_batch(contexts.slice(here.start, here.stop - here.start))


def _read_json(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def _ids_of(facts: Any) -> tuple[dict[int, str], bool]:
    return {int(key): text for key, text in facts[0]}, bool(facts[1])
