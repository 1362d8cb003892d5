"""Checkpoints in several files: each process writes the shards of its tables, and one small file refers to them.

The small file, e.g. ``last.ckpt``, has everything but the sharded tensors. Its entry ``shards`` names a folder beside
it, which `torch.distributed.checkpoint` wrote, with a digest of each file, and the place of every piece of a tensor. A
checkpoint is replaced by renaming the small file, so a killed process leaves either the old or the new one.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import operator
import pickle
import re
import shutil
import warnings
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.checkpoint import default_planner, metadata, planner
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.utils._pytree import tree_flatten_with_path, tree_map

ENTRY = "shards"
Keys: TypeAlias = tuple[Any, ...]  # the keys of a value in nested dicts and lists
# Rows of a table that are written and read at once: the memory that saving needs.
ROWS = 1 << 14

_UNREADABLE = (RuntimeError, EOFError, OSError, KeyError, ValueError, pickle.UnpicklingError)
_FOLDER = re.compile(r"shards-[0-9a-f]+")


def place_of(shard: Any) -> tuple[slice, ...]:
    """Return the slices of the full tensor that a shard covers."""
    offsets, sizes = shard.metadata.shard_offsets, shard.metadata.shard_sizes
    return tuple(slice(start, start + size) for start, size in zip(offsets, sizes, strict=True))


def copy_into(target: Any, full: Tensor | StoredTensor) -> None:
    """Copy a full tensor into a tensor, or the local shards of it into a `ShardedTensor`."""
    with torch.no_grad():
        if isinstance(full, StoredTensor):
            full.read_into(target)
        elif isinstance(target, ShardedTensor):
            for shard in target.local_shards():
                shard.tensor.copy_(full[place_of(shard)].view_as(shard.tensor))
        else:
            target.copy_(full)


def split(tree: Any) -> tuple[Any, dict[Keys, ShardedTensor]]:
    """Return nested dicts and lists without the `ShardedTensor`s in their dicts, and these by their keys."""
    leaves: Any = [(path, leaf) for path, leaf in tree_flatten_with_path(tree)[0] if isinstance(leaf, ShardedTensor)]
    sharded = {tuple(part.key if hasattr(part, "key") else part.idx for part in path): leaf for path, leaf in leaves}
    rest = tree_map(lambda leaf: leaf, tree)  # new containers
    for *keys, last in sharded:
        del functools.reduce(operator.getitem, keys, rest)[last]
    return rest, sharded


def put(tree: Any, path: Keys, value: Any) -> None:
    """Set the value at a path of nested dicts and lists."""
    for key in path[:-1]:
        tree = tree[key] if isinstance(tree, list) else tree.setdefault(key, {})
    tree[path[-1]] = value


def save_shards(tensors: Mapping[Keys, ShardedTensor], folder: Path) -> dict[str, Any]:
    """Write the local shards of every process into one folder; return the entry of the small file.

    Every process must call it. It raises in every process if one of them cannot write.
    """
    by_name = {json.dumps(path): tensor for path, tensor in tensors.items()}
    with _first_failure():
        saved = save(by_name, storage_writer=FileSystemWriter(folder), planner=_Pieces(False, False))
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, {file.name: _digest(file) for file in folder.glob(f"__{dist.get_rank()}_*")})
    places = {(index.fqn, index.offset): place for index, place in saved.storage_data.items()}
    described = {
        name: {
            "dtype": str(info.properties.dtype).removeprefix("torch."),
            "size": list(info.size),
            "pieces": [
                [list(part.offsets), list(part.sizes), place.relative_path, place.offset, place.length]
                for part in info.chunks
                for place in [places[name, part.offsets]]
            ],
        }
        for name, info in saved.state_dict_metadata.items()
    }
    files = {name: digest for part in parts for name, digest in part.items()}
    return {"folder": folder.name, "files": files, "tensors": described}


@contextmanager
def _first_failure() -> Iterator[None]:
    """Raise the error of the first process that failed, instead of the stacks of all."""
    try:
        yield
    except CheckpointException as error:
        raise next(iter(error.failures.values()))[0] from None


class _Pieces(default_planner.DefaultSavePlanner):
    """Writes at most `ROWS` rows at a time, because a piece is copied before it is written."""

    def create_local_plan(self) -> planner.SavePlan:
        self.pieces: dict[metadata.MetadataIndex, Tensor] = {}
        items = []
        for name, tensor in self.state_dict.items():
            for shard in tensor.local_shards():
                (first, *columns), sizes = shard.metadata.shard_offsets, shard.metadata.shard_sizes
                for row in range(0, sizes[0], ROWS):
                    piece = shard.tensor.detach().view(sizes)[row : row + ROWS]
                    offsets = torch.Size((first + row, *columns))
                    index = metadata.MetadataIndex(name, offsets)
                    part = planner.TensorWriteData(
                        metadata.ChunkStorageMetadata(offsets, piece.size()),
                        metadata.TensorProperties(dtype=piece.dtype),
                        torch.Size(tensor.size()),
                    )
                    items.append(planner.WriteItem(index, planner.WriteItemType.SHARD, tensor_data=part))
                    self.pieces[index] = piece
        self.plan = planner.SavePlan(items)
        return self.plan

    def lookup_object(self, index: metadata.MetadataIndex) -> Tensor:
        return self.pieces[index]


class ShardsError(ValueError):
    """A folder of shards is missing, damaged or invalid. The message names the file."""


class StoredTensor:
    """A tensor in a folder of shards. Only the rows that are needed are read."""

    def __init__(self, folder: _Reader, name: str) -> None:
        stored: Any = folder.content.state_dict_metadata[name]
        self.shape, self.dtype = tuple(stored.size), stored.properties.dtype
        self._folder, self._name = folder, name

    def read_into(self, target: Any) -> None:
        """Read the values of a tensor, or of the local shards of a `ShardedTensor`."""
        load_planner = default_planner.DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        with warnings.catch_warnings(), _first_failure():
            warnings.simplefilter("ignore")  # about reading in a single process
            load({self._name: target}, storage_reader=self._folder, planner=load_planner, no_dist=True)

    def full(self) -> Tensor:
        """Return the whole tensor."""
        tensor = torch.empty(self.shape, dtype=self.dtype)
        self.read_into(tensor)
        return tensor


class _Reader(FileSystemReader):
    """Reads a folder of shards. Each file is compared with its digest before it is used."""

    def __init__(self, checkpoint: Path, entry: Mapping[str, Any]) -> None:
        try:
            name, self.files, self.whole = entry["folder"], dict(entry["files"]), set[str]()
            self.content = metadata.Metadata({}, storage_data={})
            for tensor, description in entry["tensors"].items():
                kind, pieces = metadata.TensorProperties(dtype=getattr(torch, description["dtype"])), []
                if not isinstance(kind.dtype, torch.dtype):
                    raise TypeError(f"{description['dtype']!r} is not a dtype")
                for offsets, sizes, *place in description["pieces"]:
                    pieces.append(metadata.ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)))
                    index = metadata.MetadataIndex(tensor, torch.Size(offsets))
                    self.content.storage_data[index] = _StorageInfo(*place)
                size = torch.Size(description["size"])
                self.content.state_dict_metadata[tensor] = metadata.TensorStorageMetadata(kind, size, pieces)
            claimed = sum(math.prod(description["size"]) for description in entry["tensors"].values())
            self.folder = checkpoint.resolve().parent / _FOLDER.fullmatch(name)[0]  # type: ignore[index]
        except (TypeError, ValueError, KeyError, AttributeError) as error:
            raise ShardsError(f"the checkpoint {str(checkpoint)!r} does not describe its shards: {error}") from error
        missing = [str(self.folder / file) for file in self.files if not (self.folder / file).is_file()]
        if missing:
            raise ShardsError(f"{missing[0]!r} of a sharded checkpoint is missing; copy the folder with the checkpoint")
        if claimed > sum((self.folder / file).stat().st_size for file in self.files):
            raise ShardsError(f"{str(checkpoint)!r} claims {claimed:,} numbers in tables, more than its files have")
        super().__init__(self.folder)

    def read_metadata(self, *args: Any, **kwargs: Any) -> metadata.Metadata:
        return self.content

    def read_data(self, plan: planner.LoadPlan, planner: planner.LoadPlanner) -> Any:
        for name in {self.storage_data[item.storage_index].relative_path for item in plan.items} - self.whole:
            if name not in self.files or _digest(self.folder / name) != self.files[name]:
                raise ShardsError(
                    f"{str(self.folder / name)!r} of a sharded checkpoint is damaged; use another checkpoint, e.g. "
                    f"best.ckpt of the same run"
                )
            self.whole.add(name)
        return super().read_data(plan, planner)


def _digest(file: Path) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def load_stored(path: str | Path, weights_only: bool = True) -> dict[str, Any]:
    """Return the content of a checkpoint. Its tensors are mapped; sharded ones are `StoredTensor`s."""
    content: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=weights_only, mmap=True)
    if isinstance(content, dict) and ENTRY in content:
        reader = _Reader(Path(path), content.pop(ENTRY))
        for name in reader.content.state_dict_metadata:
            put(content, tuple(json.loads(name)), StoredTensor(reader, name))
    return content


def with_full_tensors(tree: Any) -> Any:
    """Return nested dicts and lists with every `StoredTensor` read as a whole."""
    return tree_map(lambda leaf: leaf.full() if isinstance(leaf, StoredTensor) else leaf, tree)


def load_into(module: nn.Module, saved: Mapping[str, Any], strict: bool = True) -> None:
    """Load full or stored tensors into a module. Each process loads its own shards of sharded tables."""
    state = module.state_dict()
    wrong = sorted(set(state) ^ set(saved)) if strict else []
    wrong += [key for key, value in state.items() if key in saved and tuple(value.size()) != tuple(saved[key].shape)]
    if wrong:
        raise ValueError(
            f"the weights of the checkpoint do not match this model (first mismatch: {wrong[0]}); use the options that "
            f"it was trained with"
        )
    for key, value in state.items():
        if key in saved:
            copy_into(value, saved[key])


def remove_unused(folder: Path) -> None:
    """Remove the folders of shards to which no checkpoint in `folder` refers: those of replaced checkpoints."""
    shards = [path for path in folder.glob("shards-*") if _FOLDER.fullmatch(path.name) and path.is_dir()]
    try:
        used = {_entry(file).get("folder") for file in folder.iterdir() if file.is_file()} if shards else set()
    except _UNREADABLE:
        return  # a file that cannot be read may refer to any of them
    for path in shards:
        if path.name not in used:
            shutil.rmtree(path, ignore_errors=True)


def stored_weights(path: Any) -> dict[str, Any] | None:
    """Return the weights of a checkpoint with a folder of shards; None for any other file."""
    try:
        return load_stored(path)["state_dict"] if isinstance(path, (str, Path)) and _entry(path) else None
    except ShardsError:
        raise
    except _UNREADABLE:
        return None


def _entry(file: str | Path) -> Mapping[str, Any]:
    if not zipfile.is_zipfile(file):
        return {}
    content = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    return content.get(ENTRY, {}) if isinstance(content, dict) else {}
