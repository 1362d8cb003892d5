"""The parts of a growing data set, hours or days, and the data module of some of them."""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from recsys_topk.tabular.features.encoder import FeatureEncoder
from recsys_topk.tabular.ids.vocabulary import load_vocabularies, save_vocabularies
from recsys_topk.tabular.locations import location

COMPLETE: Final = "_SUCCESS"
"""Name of the file in the folder of a part that says that the part is complete."""

_NAME = re.compile(r"(?:\w+=)?(\d{4}-\d{2}-\d{2}(?:[T_-]?\d{2})?)(?:\.\w+)*")


@dataclass(frozen=True)
class Parts:
    """A place where hours or days of data arrive.

    RecFlow: a day is complete when its three files exist. Lists: the parts are folders or files with names such as
    2024-01-13, 2024-01-13T05 or day=2024-01-13; a part is complete when a later one exists, or when its folder has a
    file _SUCCESS.

    Attributes:
        kind: ``"recflow"`` or ``"lists"``.
        root: The folder, a path or a URL of fsspec.
    """

    kind: str
    root: str

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> Parts:
        """Return the place of a data module, given its class path and arguments."""
        kind, root = str(data["class_path"]).rpartition(".")[2], (data.get("init_args") or {}).get("root")
        names = {"recflow": "recflow", "RecFlowDataModule": "recflow", "lists": "lists", "ListsDataModule": "lists"}
        if kind not in names or not isinstance(root, (str, Path)):
            raise ValueError(
                f"online takes --data.root DIR with days in RecFlow's layout, or with --data lists a folder of lists "
                f"per hour or day; got --data {kind} with root {root!r}"
            )
        return cls(names[kind], str(root))

    def complete(self) -> dict[str, str]:
        """Return the places of the complete parts by name, oldest first."""
        if self.kind == "recflow":
            from recsys_topk.datamodules.recflow.files import RecFlowFiles

            try:
                files = RecFlowFiles(self.root)
                others = [files.folder / name for name in ("request_id_dict", "seq_effective_50_dict")]
                complete = [day for day in files.days if all((one / f"{day}.pkl").is_file() for one in others)]
                return dict.fromkeys(complete, self.root)
            except FileNotFoundError:  # there is no day yet
                return {}
        root = location(self.root)
        found = {match[1]: path for path in root.glob("*") if (match := _NAME.fullmatch(path.name))}
        names = sorted(found)
        done = names if names and (found[names[-1]] / COMPLETE).is_file() else names[:-1]
        return {name: str(found[name]) for name in done}

    def arguments(self, parts: Mapping[str, str], vocabularies: Path | None) -> dict[str, Any]:
        """Return the arguments of a data module of some parts, whose newest is also for testing."""
        names, places = list(parts), list(parts.values())
        if self.kind == "recflow":
            first = _consecutive(names)
            made: dict[str, Any] = {"train_days": f"{first}:{names[-1]}", "val_days": "none", "test_days": names[-1]}
            return made if vocabularies is None else {**made, "vocabulary": str(vocabularies)}
        made = {"root": places if len(places) > 1 else places[0], "val": places[-1], "test": places[-1]}
        return made if vocabularies is None else {**made, "features": str(vocabularies)}

    def start(self, data: Any, folder: Path, before: Path | None) -> None:
        """Save the vocabularies after one more part to a folder.

        Args:
            data: The data module of the part alone, with vocabularies of its own.
            folder: The folder.
            before: The folder of the part before; None = this is the first.
        """
        own = data.vocabularies if self.kind == "recflow" else data.encoder.vocabularies
        if before is not None:
            own = {name: vocabulary.grow(own[name]) for name, vocabulary in load_vocabularies(before).items()}
        if self.kind == "recflow":
            save_vocabularies(folder, own)
            return
        encoder: FeatureEncoder = data.encoder if before is None else FeatureEncoder.load(before)
        encoder.vocabularies = own
        encoder.save(folder)


def newest(parts: Mapping[str, str], last: str, number: int) -> dict[str, str]:
    """Return up to `number` parts that end with the part `last`."""
    names: Sequence[str] = [name for name in parts if name <= last][-number:]
    return {name: parts[name] for name in names}


def _consecutive(days: Sequence[str]) -> str:
    """Return the first of the days that end with the last one and have no gap."""
    dates = [dt.date.fromisoformat(day) for day in days]
    number = next((n for n in range(1, len(dates)) if (dates[-n] - dates[-n - 1]).days > 1), len(dates))
    return days[-number]
