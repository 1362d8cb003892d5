"""Map raw ids to rows of an embedding table: dense, compact (the ids of the training data) or hash (fixed rows).

Needs only numpy, so that serving can use the same code.
"""

from __future__ import annotations

import hashlib
import io
import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Final

import numpy as np
import numpy.typing as npt

from recsys_topk.files import write_whole
from recsys_topk.tabular.ids.counter import IdCounter
from recsys_topk.tabular.ids.keys import id_keys, mixed
from recsys_topk.tabular.ids.options import AUTO_DENSE_ROWS, VocabularyOptions
from recsys_topk.types import Array

VOCABULARIES: Final = "vocabularies.json"
_FORMAT: Final = 1
_LARGE: Final = 100_000


class Vocabulary(ABC):
    """Base class of vocabularies. A vocabulary maps ids to rows of an embedding table.

    Ids are integers or text. Text that is a plain decimal number is the same id as the integer. An id that is not in
    the vocabulary gets a row for unknown ids. A missing id gets the padding row.

    Attributes:
        kind: ``"dense"``, ``"compact"``, ``"hash"`` or ``"growing"``.
        rows: Number of rows of the table, including those for padding and for unknown ids.
        padding: The row of missing ids, which has no embedding.
    """

    kind: ClassVar[str]
    rows: int
    padding: int = 0

    def encode(self, ids: npt.ArrayLike, missing: npt.ArrayLike | None = None) -> npt.NDArray[np.int64]:
        """Return the row of each id, int64 in the shape of `ids`. Unknown ids do not raise; an invalid type does.

        Args:
            ids: Integers or strings; None and NaN among strings are missing.
            missing: Boolean, same shape, True where the id is missing. `ids` is ignored there.
        """
        keys, absent, _ = id_keys(ids, missing)
        rows = self._rows_of(keys.reshape(-1)).reshape(keys.shape)
        return rows if absent is None else np.where(absent, np.int64(self.padding), rows)

    def known(self, ids: npt.ArrayLike) -> npt.NDArray[np.bool_]:
        """Return a mask of the ids that are in the vocabulary (in a hash vocabulary: all ids)."""
        keys = id_keys(ids).keys
        return self._known(keys.reshape(-1)).reshape(keys.shape)

    @abstractmethod
    def describe(self) -> str:
        """Return a short description, e.g. ``compact, 1,000 ids + 1 for unknown ids``."""

    @abstractmethod
    def options(self) -> dict[str, int]:
        """Return the numbers that define the vocabulary, without its ids."""

    @property
    def keys(self) -> Array | None:
        """The ids of a vocabulary that stores them: sorted int64 keys if it is compact; None if there are none."""
        return None

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of the kind, the numbers and the ids. Equal fingerprints mean that all ids get the same rows."""
        digest = hashlib.sha256(json.dumps([self.kind, self.options()], sort_keys=True).encode())
        if self.keys is not None:
            digest.update(np.ascontiguousarray(self.keys, dtype="<i8").data)
        return digest.hexdigest()

    def grow(self, part: Vocabulary) -> Vocabulary:
        """Return the vocabulary after one more part of a stream, given that of the part. Only growing ones change."""
        return self

    def new_rows(self, before: Vocabulary) -> npt.NDArray[np.int64]:
        """Return the rows that hold another id than in an earlier vocabulary of a stream."""
        return np.empty(0, dtype=np.int64)

    def save(self, folder: str | Path) -> None:
        """Save the vocabulary to a separate folder. `Vocabulary.load` reads it."""
        save_vocabularies(folder, {"vocabulary": self})

    @staticmethod
    def load(folder: str | Path) -> Vocabulary:
        """Load a vocabulary from a folder written by `save`."""
        return load_vocabularies(folder)["vocabulary"]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Vocabulary) and self.fingerprint == other.fingerprint

    def __hash__(self) -> int:
        return hash(self.fingerprint)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.describe()})"

    @abstractmethod
    def _rows_of(self, keys: Array) -> npt.NDArray[np.int64]:
        """Return the row of each of (n,) keys."""

    @abstractmethod
    def _known(self, keys: Array) -> npt.NDArray[np.bool_]:
        """Return a mask of the keys, (n,), that are in the vocabulary."""


class DenseVocabulary(Vocabulary):
    """Row = id + offset. An id below 0, or too large for the table, gets the last row.

    Args:
        rows: Number of rows of the table.
        offset: Number added to each id; 1 reserves row 0 for padding.
        padding: The row of missing ids.

    Example:
        >>> DenseVocabulary(5).encode([0, 2, 3, 99, -1]).tolist()
        [1, 3, 4, 4, 4]
        >>> DenseVocabulary(5, offset=0, padding=2).encode([0, 1], missing=[False, True]).tolist()
        [0, 2]
    """

    kind = "dense"

    def __init__(self, rows: int, offset: int = 1, padding: int = 0) -> None:
        if rows < 2 or offset < 0 or not 0 <= padding < rows:
            raise ValueError(f"a dense vocabulary needs 2 rows and a padding row among them, got {rows} and {padding}")
        self.rows, self.offset, self.padding = int(rows), int(offset), int(padding)

    def describe(self) -> str:
        """Return the range of ids."""
        return f"dense, ids 0 to {self.rows - 1 - self.offset:,}"

    def options(self) -> dict[str, int]:
        """Return rows, offset and padding."""
        return {"rows": self.rows, "offset": self.offset, "padding": self.padding}

    def _rows_of(self, keys: Array) -> npt.NDArray[np.int64]:
        return np.asarray(np.where(self._known(keys), keys, self.rows - 1 - self.offset) + self.offset, dtype=np.int64)

    def _known(self, keys: Array) -> npt.NDArray[np.bool_]:
        return np.asarray((keys >= 0) & (keys < self.rows - self.offset))


class CompactVocabulary(Vocabulary):
    """One row for each id of the training data. All other ids share the rows 1 to `oov_rows`, by a hash.

    Text ids are stored as 64-bit hashes. The probability that any two of n text ids share a row is n^2 / 2^65 (3e-6
    for 10 million). Cost: 8 bytes per id; O(log n) per id to encode, less if the ids are sorted.

    Args:
        keys: The ids as distinct, sorted int64 keys (`IdCounter`, `id_keys`).
        oov_rows: Number of rows for unknown ids.

    Example:
        >>> vocabulary = CompactVocabulary.fit([70, 7, 70, 900], oov_rows=1)
        >>> vocabulary.encode([7, 70, 900, 8]).tolist(), vocabulary.rows
        ([2, 3, 4, 1], 5)
        >>> CompactVocabulary.fit(["a", "b", "a"], min_count=2).encode(["a", "b", None]).tolist()
        [2, 1, 0]
    """

    kind = "compact"

    def __init__(self, keys: Array, oov_rows: int = 1) -> None:
        if oov_rows < 1:
            raise ValueError(f"oov_rows must be at least 1, for the ids that are not in the vocabulary, got {oov_rows}")
        if keys.ndim != 1 or keys.dtype != np.int64 or (keys[1:] <= keys[:-1]).any():
            raise ValueError(
                "the keys of a compact vocabulary must be distinct, sorted int64; use CompactVocabulary.fit"
            )
        self._keys, self.oov_rows = keys, int(oov_rows)
        self.rows = 1 + self.oov_rows + keys.size

    @classmethod
    def fit(
        cls,
        ids: npt.ArrayLike | IdCounter,
        counts: npt.ArrayLike | None = None,
        *,
        min_count: int = 1,
        oov_rows: int = 1,
    ) -> CompactVocabulary:
        """Return the vocabulary of the ids that occur at least `min_count` times.

        Args:
            ids: The ids with repetitions, or a counter of the ids.
            counts: Number of occurrences of each id, in the shape of `ids`; None = one.
            min_count: Rarer ids are treated as unknown. The rows for unknown ids are then trained.
            oov_rows: Number of rows for unknown ids.
        """
        if not isinstance(ids, IdCounter):
            counter = IdCounter(counting=min_count > 1)
            counter.add(ids, counts)
            ids = counter
        return cls(ids.keys(min_count), oov_rows)

    @property
    def keys(self) -> Array:
        """The ids as sorted int64 keys. The id with key ``keys[i]`` has the row ``1 + oov_rows + i``."""
        return self._keys

    def describe(self) -> str:
        """Return the number of ids as text."""
        return f"compact, {self._keys.size:,} ids + {self.oov_rows:,} for unknown ids"

    def options(self) -> dict[str, int]:
        """Return the number of rows for unknown ids."""
        return {"oov_rows": self.oov_rows}

    def _rows_of(self, keys: Array) -> npt.NDArray[np.int64]:
        if self._keys.size < _LARGE or keys.ndim != 1:
            at = np.searchsorted(self._keys, keys)
        else:  # a search for sorted keys reads a large table in order: 4 times as fast
            order, at = np.argsort(keys), np.empty(keys.shape, dtype=np.int64)
            at[order] = np.searchsorted(self._keys, keys[order])
        found = self._at(at, keys)
        at += 1 + self.oov_rows
        unknown = ~found
        if unknown.any():
            at[unknown] = 1 + mixed(keys[unknown], 0) % np.uint64(self.oov_rows)
        return at

    def _known(self, keys: Array) -> npt.NDArray[np.bool_]:
        return self._at(np.searchsorted(self._keys, keys), keys)

    def _at(self, at: Array, keys: Array) -> npt.NDArray[np.bool_]:
        if not self._keys.size:
            return np.zeros(at.shape, dtype=np.bool_)
        return np.asarray(self._keys[np.minimum(at, self._keys.size - 1)] == keys)


class HashVocabulary(Vocabulary):
    """Row = 1 + hash(id, seed) mod (rows - 1). Every id has a row, and several ids may share a row.

    The hash is the same on all machines and in all processes. With n ids and m rows, about n - m (1 - exp(-n/m)) ids
    collide with another id. Nothing has to be fitted or stored.

    Args:
        rows: Number of rows of the table.
        seed: Seed of the hash.

    Example:
        >>> rows = HashVocabulary(1000, seed=1).encode([7, 75_000_000, 7])
        >>> bool(rows[0] == rows[2]), bool((rows > 0).all() and (rows < 1000).all())
        (True, True)
    """

    kind = "hash"

    def __init__(self, rows: int, seed: int = 0) -> None:
        if rows < 2 or seed < 0:
            raise ValueError(f"a hash vocabulary needs at least 2 rows and a seed >= 0, got {rows} and {seed}")
        self.rows, self.seed = int(rows), int(seed)

    def describe(self) -> str:
        """Return the number of rows as text."""
        return f"hash, {self.rows - 1:,} rows"

    def options(self) -> dict[str, int]:
        """Return rows and seed."""
        return {"rows": self.rows, "seed": self.seed}

    def _rows_of(self, keys: Array) -> npt.NDArray[np.int64]:
        return np.asarray(mixed(keys, self.seed) % np.uint64(self.rows - 1) + np.uint64(1), dtype=np.int64)

    def _known(self, keys: Array) -> npt.NDArray[np.bool_]:
        return np.ones(keys.shape, dtype=np.bool_)


def fit_vocabulary(
    options: VocabularyOptions | str | Mapping[str, Any] | None,
    ids: npt.ArrayLike | IdCounter | None = None,
    *,
    name: str = "ids",
    dense: DenseVocabulary | None = None,
) -> Vocabulary:
    """Return the vocabulary of a table.

    Args:
        options: The options, or a value that `VocabularyOptions.parse` accepts.
        ids: The ids of the training data, or a counter of them. Not needed for ``hash``, or if `dense` is used.
        name: Name of the table in messages.
        dense: The vocabulary to use if the kind is dense; None = large enough for the largest id, plus one more row.

    Example:
        >>> fit_vocabulary("auto", [0, 5, 5]).describe()
        'dense, ids 0 to 6'
        >>> fit_vocabulary("auto", [0, 75_000_000]).describe()
        'compact, 2 ids + 1 for unknown ids'
    """
    options = options if isinstance(options, VocabularyOptions) else VocabularyOptions.parse(options)
    if options.kind == "hash":
        assert options.rows is not None
        return HashVocabulary(options.rows, options.seed)
    if dense is not None and (options.kind == "dense" or (options.kind == "auto" and dense.rows <= AUTO_DENSE_ROWS)):
        return dense
    if ids is None:
        raise ValueError(f"the vocabulary of {name} needs the ids of the training data")
    if not isinstance(ids, IdCounter):
        counter = IdCounter(counting=options.min_count > 1 or options.kind == "growing")
        counter.add(ids)
        ids = counter
    if options.kind == "growing":
        from recsys_topk.tabular.ids.growing import GrowingVocabulary

        return GrowingVocabulary.fit(ids, min_count=options.min_count, evict_after=options.evict_after)
    if options.kind == "dense" or (options.kind == "auto" and dense is None and options.min_count == 1):
        made = _dense_of(ids)
        if made is not None and (options.kind == "dense" or made.rows <= AUTO_DENSE_ROWS):
            return made
        if options.kind == "dense":
            raise ValueError(f"{name} holds texts or ids below 0, which cannot be rows; use vocabulary compact or hash")
    return CompactVocabulary.fit(ids, min_count=options.min_count, oov_rows=options.oov_rows)


def _dense_of(counter: IdCounter) -> DenseVocabulary | None:
    """Return the dense vocabulary of all ids, or None if any id is text or negative."""
    keys = counter.keys()
    if counter.text or (keys.size and keys[0] < 0):
        return None
    return DenseVocabulary(int(keys[-1] if keys.size else 0) + 3)


def save_vocabularies(folder: str | Path, vocabularies: Mapping[str, Vocabulary]) -> None:
    """Save the vocabularies of all tables to a folder: one JSON file, and one ``.npy`` file of ids per compact one.

    The JSON file is written last and refers to the other files by fingerprint. A reader therefore finds either the old
    or the new vocabularies.
    """
    folder = Path(folder)
    entries = {}
    for name, vocabulary in vocabularies.items():
        entry: dict[str, Any] = {"kind": vocabulary.kind, **vocabulary.options(), "rows": vocabulary.rows}
        entry["fingerprint"] = vocabulary.fingerprint
        if vocabulary.keys is not None:
            entry["ids"] = f"{vocabulary.fingerprint[:32]}.npy"
            data = io.BytesIO()
            np.save(data, np.ascontiguousarray(vocabulary.keys, dtype="<i8"), allow_pickle=False)
            write_whole(folder / entry["ids"], data.getvalue())
        entries[name] = entry
    write_whole(
        folder / VOCABULARIES, json.dumps({"format": _FORMAT, "tables": entries}, indent=1, sort_keys=True) + "\n"
    )


def load_vocabularies(folder: str | Path) -> dict[str, Vocabulary]:
    """Load the vocabularies written by `save_vocabularies`. Ids are memory-mapped.

    Raises:
        FileNotFoundError: The JSON file is missing.
        ValueError: A file is damaged, or a file of ids is missing.
    """
    path = Path(folder) / VOCABULARIES
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing; it describes how ids become rows")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["format"] != _FORMAT:
            raise ValueError(f"it has format {content['format']!r}, this release reads {_FORMAT}")
        return {str(name): _rebuilt(entry, path.parent) for name, entry in content["tables"].items()}
    except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
        raise ValueError(
            f"{path} cannot be used ({error}); prepare the data again, or copy the whole folder"
        ) from error


def _rebuilt(entry: Mapping[str, Any], folder: Path) -> Vocabulary:
    kind = entry["kind"]
    made: Vocabulary
    if kind == "dense":
        made = DenseVocabulary(entry["rows"], entry["offset"], entry["padding"])
    elif kind == "hash":
        made = HashVocabulary(entry["rows"], entry["seed"])
    elif kind in ("compact", "growing"):
        name = str(entry["ids"])
        if Path(name).name != name:
            raise ValueError(f"ids must be a file beside it, got {name!r}")
        keys = np.load(folder / name, mmap_mode="r", allow_pickle=False)
        if kind == "compact":
            made = CompactVocabulary(keys, entry["oov_rows"])
        else:
            from recsys_topk.tabular.ids.growing import GrowingVocabulary

            made = GrowingVocabulary(
                keys, entry["rows"], **{name: entry[name] for name in ("min_count", "evict_after", "part")}
            )
    else:
        raise ValueError(f"unknown kind {kind!r}")
    if made.fingerprint != entry.get("fingerprint", made.fingerprint):
        raise ValueError("the ids do not match their fingerprint")
    return made
