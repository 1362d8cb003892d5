"""The manifest of an export: its stages, the inputs of their models, and the SHA-256 of every file. Needs no torch."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Final

from recsys_topk.files import write_whole
from recsys_topk.tabular.schema import Part, Schema

FORMATS: Final = (1, 2)
"""Format 2: a stage adds the scores of the stage before it, which format 1 does not know."""
FILE: Final = "manifest.json"
SEAL: Final = "manifest.sha256"
"""The SHA-256 of the manifest, in the format of `sha256sum -c`. Version 0.2 did not write it."""
STAGE_FILE: Final = "stage.json"
_BLOCK: Final = 1 << 20

log = logging.getLogger(__name__)

# The fields of a batch with the ids and the values of each part.
FIELDS: dict[Part, tuple[str, str]] = {
    "request": ("request", "request_values"),
    "history": ("history", "history_values"),
    "items": ("items", "item_values"),
}


@dataclass(frozen=True)
class Input:
    """An input of an exported model."""

    name: str  # name of the input, the same as the field of `CascadeBatch`
    dtype: str  # "int64" or "float32"
    axes: tuple[str | int, ...]  # per axis, its name if the length is dynamic, otherwise its length


def inputs_of(schema: Schema, parts: Sequence[Part], lists: bool = False) -> list[Input]:
    """Return the inputs of a model that reads the given parts of a schema. A part without features has no inputs.

    With `lists`, items are lists, (batch, items, columns), one per request; otherwise rows, (items, columns).

    Example:
        >>> from recsys_topk.tabular.schema import Feature, Table
        >>> schema = Schema((Table("video", 9),), (Feature("age", kind="numeric"),), (), (Feature("id", "video"),))
        >>> [(one.name, one.axes) for one in inputs_of(schema, ("request", "items"), lists=True)]
        [('request_values', ('batch', 1)), ('items', ('batch', 'items', 1))]
    """
    rows: dict[Part, tuple[str, ...]] = {
        "request": ("batch",),
        "history": ("batch", "views"),
        "items": ("batch", "items") if lists else ("items",),
    }
    found = []
    for part in parts:
        ids, values = FIELDS[part]
        for name, dtype, columns in (
            (ids, "int64", schema.id_columns(part)),
            (values, "float32", schema.value_columns(part)),
        ):
            width = max((column.stop for column in columns.values()), default=0)
            if width:
                found.append(Input(name, dtype, (*rows[part], width)))
        if part == "history" and schema.history:
            found.append(Input("history_length", "int64", ("batch",)))
    return found


class ManifestError(ValueError):
    """The folder is not an export, or the export is damaged or mixed with files of other exports."""


@dataclass(frozen=True)
class Model:
    """An exported function."""

    file: str  # the ONNX file, relative to the export
    inputs: tuple[Input, ...]  # the inputs, in order
    output: str  # the name of the output

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Model:
        """Rebuild the object from the result of `dataclasses.asdict`."""
        inputs = tuple(Input(one["name"], one["dtype"], tuple(one["axes"])) for one in plain["inputs"])
        return cls(str(plain["file"]), inputs, str(plain["output"]))


@dataclass(frozen=True)
class StageEntry:
    """A stage of an export."""

    name: str
    kind: str  # registry name or class path of the stage
    quota: int  # number of items that the stage passes on
    # "requests" and "items" (vectors whose dot product is the score), or "scores" (of lists).
    models: Mapping[str, Model]
    previous_scale: float = 0.0  # the scores of the stage before it are added with this factor; 0 = they are not

    @property
    def has_towers(self) -> bool:
        """Whether the score is the dot product of two vectors, so that the catalogue can be indexed."""
        return "items" in self.models

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> StageEntry:
        """Rebuild the object from the result of `dataclasses.asdict`."""
        models = {str(name): Model.from_plain(model) for name, model in plain["models"].items()}
        scale = float(plain.get("previous_scale", 0.0))
        return cls(str(plain["name"]), str(plain["kind"]), int(plain["quota"]), models, scale)


@dataclass(frozen=True)
class Manifest:
    """The content of an export."""

    schema: Schema
    stages: tuple[StageEntry, ...]  # the stages, first stage first
    k: int  # number of items wanted at the end of the cascade
    # Further information: versions, the checkpoint, the agreement with it. Not needed for serving.
    facts: Mapping[str, Any]
    files: Mapping[str, Mapping[str, Any]]  # SHA-256 and size of every file, by path relative to the export

    @property
    def identity(self) -> str:
        """A short hash over the contents of all files."""
        text = json.dumps({name: entry["sha256"] for name, entry in self.files.items()}, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def write_manifest(
    folder: Path, schema: Schema, stages: tuple[StageEntry, ...], k: int, facts: Mapping[str, Any]
) -> Manifest:
    """Write `stage.json` of each stage, the manifest and its seal. All other files must be complete."""
    version = FORMATS[1] if any(stage.previous_scale for stage in stages) else FORMATS[0]
    for stage in stages:
        write_whole(folder / stage.name / STAGE_FILE, _text({"format": version, "k": k, **asdict(stage)}))
    files = {
        path.relative_to(folder).as_posix(): {"sha256": sha256(path), "bytes": path.stat().st_size}
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path not in (folder / FILE, folder / SEAL)
    }
    manifest = Manifest(schema, stages, k, dict(facts), files)
    plain = {"format": version, "seal": SEAL, **asdict(manifest), "schema": schema.to_dict()}
    write_whole(folder / FILE, _text(plain))
    write_whole(folder / SEAL, f"{sha256(folder / FILE)}  {FILE}\n")
    return manifest


def read_manifest(folder: str | Path, verify: bool = True) -> Manifest:
    """Return the manifest of an export. With `verify`, it and every file are compared with their SHA-256.

    Raises a `ManifestError` if the manifest cannot be read, names a file outside the folder, or a file differs, is
    missing or is not listed. A manifest of version 0.2 has no seal: that is logged as a warning.
    """
    folder = Path(folder)
    path = folder / FILE
    if not path.is_file():
        raise ManifestError(f"{str(folder)!r} has no export: {FILE} is missing; create one with `recsys-topk export`")
    try:
        plain = json.loads(path.read_text(encoding="utf-8"))
        if plain["format"] not in FORMATS:
            raise ManifestError(f"{path} has format {plain['format']!r}; this version reads formats 1 and 2")
        sealed = "seal" in plain
        manifest = Manifest(
            schema=Schema.from_dict(plain["schema"]),
            stages=tuple(StageEntry.from_plain(stage) for stage in plain["stages"]),
            k=int(plain["k"]),
            facts=dict(plain["facts"]),
            files={str(name): dict(entry) for name, entry in plain["files"].items()},
        )
    except ManifestError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ManifestError(f"{path} cannot be read ({type(error).__name__}: {error}); export again") from error
    _check_names(path, manifest)
    if verify:
        _check_seal(folder, sealed)
        _verify(folder, manifest)
    return manifest


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file, in hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()


def _check_seal(folder: Path, sealed: bool) -> None:
    """Compare the manifest with its seal."""
    seal = folder / SEAL
    if not seal.is_file():
        if sealed:
            raise ManifestError(f"{str(seal)!r} is missing: copy the whole folder again, or export again")
        log.warning("%s has no %s (it was written by version 0.2): changes of the manifest itself go unnoticed; "
                    "export again to protect it", folder, SEAL)  # fmt: skip
    elif seal.read_text(encoding="utf-8", errors="replace").split()[:1] != [sha256(folder / FILE)]:
        raise ManifestError(
            f"{str(folder / FILE)!r} does not match its SHA-256 in {SEAL}: it was changed; export again, or copy the "
            f"whole folder again"
        )


def _check_names(path: Path, manifest: Manifest) -> None:
    used = [model.file for stage in manifest.stages for model in stage.models.values()]
    for name in (*manifest.files, *used, *(stage.name for stage in manifest.stages)):
        parts = PurePosixPath(name)
        if parts.is_absolute() or ".." in parts.parts or "\\" in name or not parts.parts:
            raise ManifestError(f"{path} names {name!r}, which is not a path inside its folder")
    missing = [name for name in used if name not in manifest.files]
    if missing:
        raise ManifestError(f"{path} uses {missing[0]!r} but has no SHA-256 of it; export again")


def _verify(folder: Path, manifest: Manifest) -> None:
    for name, problem in _problems(folder, manifest):
        raise ManifestError(
            f"{str(folder / name)!r} {problem}: the export is damaged or mixed with another one; export again, or copy "
            f"the whole folder again"
        )


def _problems(folder: Path, manifest: Manifest) -> Iterator[tuple[str, str]]:
    inside = folder.resolve()
    for name, entry in manifest.files.items():
        path = folder / name
        if not path.resolve().is_relative_to(inside):
            yield name, "is a link to a path outside the folder"
        elif not path.is_file():
            yield name, "is missing"
        elif path.stat().st_size != entry["bytes"] or sha256(path) != entry["sha256"]:
            yield name, "does not match the manifest"
    listed = {folder / name for name in (*manifest.files, FILE, SEAL)}
    for path in sorted(folder.rglob("*")):
        if path not in listed and not path.is_dir():
            yield path.relative_to(folder).as_posix(), "is not listed in the manifest"
    for stage in manifest.stages:
        try:
            own = json.loads((folder / stage.name / STAGE_FILE).read_text(encoding="utf-8"))
            same = StageEntry.from_plain(own) == stage and own["k"] == manifest.k
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            same = False
        if not same:
            yield f"{stage.name}/{STAGE_FILE}", "describes a different stage than the manifest"


def _text(plain: Any) -> str:
    return json.dumps(plain, indent=1, sort_keys=True) + "\n"
