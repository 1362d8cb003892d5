"""Train on each new part of the data, export, compare with the export in service, and publish.

The folder `out` has `online.json` (what was done with each part), `parts` (checkpoints), `vocabularies`, `exports` and
`runs`. Every step either finds its result there or makes it from files of earlier steps, and every file and folder is
written whole. A process that is killed at any moment is therefore continued by the same command, with the same weights.
"""

from __future__ import annotations

import json
import math
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from recsys_topk.experiments.parts import Parts, newest
from recsys_topk.experiments.stream import PROTOCOL, SEED_STEP, short_metrics
from recsys_topk.files import make_once, swap_link, whole_file, write_whole
from recsys_topk.registry import suggest
from recsys_topk.runs.config import merge
from recsys_topk.runs.run import LogLine, TrainingRun
from recsys_topk.runs.trials import Competition, Trial
from recsys_topk.serving.manifest import read_manifest
from recsys_topk.tabular.ids.vocabulary import load_vocabularies

if TYPE_CHECKING:
    from recsys_topk.cascades.module import CascadeModule
    from recsys_topk.datamodules.base import CascadeDataModule

STATE = "online.json"
Entry = dict[str, Any]


@dataclass(frozen=True)
class Gate:
    """What an export must reach to replace the one in service: a metric, and the least difference to that export.

    Example:
        >>> Gate.parse("joint_recall -0.01")
        Gate(metric='joint_recall', least=-0.01)
    """

    metric: str | None = None  # with or without its cuts; None = the monitored one
    least: float = -0.01

    @classmethod
    def parse(cls, text: str) -> Gate:
        """Parse ``METRIC DIFFERENCE``."""
        name, _, least = text.strip().partition(" ")
        try:
            return cls(name, float(least))
        except ValueError:
            raise ValueError(f"--gate must be METRIC DIFFERENCE, e.g. 'joint_recall -0.01', got {text!r}") from None

    def judge(self, monitor: str, found: Mapping[str, float], in_service: Mapping[str, float]) -> Entry:
        """Return the compared metric, both values, and whether the new export passes."""
        wanted = self.metric or monitor
        name = next((own for own in found if wanted in (own, own.partition("@")[0])), None)
        if name is None:
            raise ValueError(f"--gate {wanted!r} is no metric; {suggest(wanted, found)}available: {', '.join(found)}")
        new, old = found[name], in_service.get(name)
        passed = math.isfinite(new) and (old is None or new - old >= self.least)
        return {"metric": name, "new": new, "in_service": old, "passed": passed}


@dataclass(frozen=True)
class Online:
    """Continuous training from one config."""

    config: Mapping[str, Any]  # the options of `recsys-topk fit`
    link: Path  # the symbolic link to publish; `export` and `index` are below it
    out: Path  # folder of the state
    gate: Gate  # what a new export must reach
    keep: int = 3  # number of published exports to keep
    share: float = 0.1  # newest requests of each part that are not trained on, and on which exports are compared
    catalogue: int = 7  # number of newest parts whose items and users are exported
    log_line: LogLine = print

    def __post_init__(self) -> None:
        if self.keep < 1 or self.catalogue < 1 or not 0 < self.share < 1:
            raise ValueError(
                f"--keep and --catalogue must be at least 1, and --newest must be a share between 0 and 1, got "
                f"{self.keep}, {self.catalogue} and {self.share}"
            )

    def repeat(self, seconds: float) -> None:
        """Call `advance` for ever, and wait after each call that found nothing."""
        while True:
            if self.advance() is None:
                time.sleep(seconds)

    def advance(self) -> bool | None:
        """Train on the parts that are complete and new, and publish the newest.

        Return whether the newest export passed the gate; None if there is nothing new.
        """
        from filelock import FileLock, Timeout

        self.out.mkdir(parents=True, exist_ok=True)
        lock = FileLock(self.out / ".lock")
        try:
            lock.acquire(timeout=0)
        except Timeout:
            raise ValueError(f"another process uses {str(self.out)!r}; wait for it, or give another --out") from None
        try:
            record = self.trial.read() or {**self.trial.identity(), "parts": []}
            entries, parts = record["parts"], self.parts.complete()
            last = entries[-1]["part"] if entries else ""
            for name in [name for name in parts if name > last]:
                entries.append(self._learn(name, parts[name], entries))
                self._write(record)
            if not entries or entries[-1].get("published") is not None:
                return None
            self._publish(record, parts)
            return bool(entries[-1]["published"])
        finally:
            lock.release()

    @cached_property
    def trial(self) -> Trial:
        """The config in its long form, and the file of the state."""
        seed = int(self.config.get("seed_everything", 42))
        trial = Competition({"online": {}}, self.config, 1, self.out).trial("online", {}, seed, "online", "", "online")
        return replace(trial, target=self.out / STATE)

    @cached_property
    def parts(self) -> Parts:
        """The place of the data."""
        return Parts.of(self.trial.config.get("data") or {"class_path": "recflow"})

    @cached_property
    def _described(self) -> Entry:
        data = TrainingRun({"config": [self.trial.config]}, trust=self.trial.trust).options()["data"]
        return {"class_path": data["class_path"], **data["init_args"]}

    def _data(self, parts: Mapping[str, str], vocabularies: Path | None) -> CascadeDataModule:
        from recsys_topk.datamodules.base import restore

        made = restore({**self._described, **self.parts.arguments(parts, vocabularies)}, trust=self.trial.trust)
        made.newest = self.share
        made.prepare_data()
        return made

    def _model(self, entry: Entry) -> CascadeModule:
        from recsys_topk.cascades.module import CascadeModule

        path = self.out / entry["checkpoint"]
        return CascadeModule.load_from_checkpoint(path, map_location="cpu", trust=self.trial.trust)

    def _learn(self, name: str, place: str, entries: Sequence[Entry]) -> Entry:
        """Test on a part with the model so far, train on the part, and save a checkpoint."""
        from lightning.pytorch import seed_everything

        before, trial = entries[-1] if entries else None, self.trial
        entry: Entry = {"part": name, "checkpoint": f"parts/{name}.ckpt"}
        entry["vocabularies"] = self._vocabularies(name, place, before)
        arguments = self.parts.arguments({name: place}, self.out / entry["vocabularies"])
        config = merge(trial.config, {"data": {"init_args": arguments}})
        run = replace(trial, config=config, place={**trial.place, "name": name}).run(**PROTOCOL)
        run.data.newest = self.share
        epochs = run.trainer.max_epochs
        if epochs is None or epochs < 1:
            raise ValueError(f"--trainer.max_epochs, the passes over a part, must be at least 1, got {epochs}")
        checkpoint = None
        if before is not None:
            data = self._data({name: place}, self.out / before["vocabularies"])
            (measured,) = run.trainer.test(self._model(before), datamodule=data, verbose=False)
            entry |= short_metrics(measured)
            checkpoint = self._grown(run, before, entry)
        seed_everything((trial.seed + len(entries) * SEED_STEP) % 2**32, verbose=False)
        run.trainer.fit_loop.max_epochs = epochs * (len(entries) + 1)
        run.trainer.fit(run.model, datamodule=run.data, ckpt_path=checkpoint and str(checkpoint.resolve()))
        if run.trainer.interrupted:
            raise KeyboardInterrupt
        run.trainer.save_checkpoint(self.out / entry["checkpoint"])
        found = ", ".join(f"{metric} {value:.4f}" for metric, value in entry.get("metrics", {}).items())
        self.log_line(f"{name}: {found or 'the first part, not tested'}; trained")
        return entry

    def _vocabularies(self, name: str, place: str, before: Entry | None) -> str:
        """Return the folder of the vocabularies to train a part with, relative to `out`. It is made if necessary."""
        earlier = None if before is None else self.out / before["vocabularies"]
        if earlier is not None and all(own.kind != "growing" for own in load_vocabularies(earlier).values()):
            return str(earlier.relative_to(self.out))
        target = self.out / "vocabularies" / name
        make_once(target, lambda folder: self.parts.start(self._data({name: place}, None), folder, earlier))
        return str(target.relative_to(self.out))

    def _grown(self, run: TrainingRun, before: Entry, after: Entry) -> Path:
        """Return the checkpoint of the part before, with the rows of the vocabularies of a part."""
        import torch

        from recsys_topk.cascades.growth import grow_tables

        if before["vocabularies"] == after["vocabularies"]:
            return self.out / str(before["checkpoint"])
        if type(run.trainer.strategy).__name__ == "TorchRecStrategy":
            raise ValueError("the tables of a growing vocabulary cannot be sharded; use --trainer.strategy auto")
        old, new = (load_vocabularies(self.out / one["vocabularies"]) for one in (before, after))
        fresh = {name: new[name].new_rows(own) for name, own in old.items() if own.kind == "growing"}
        content = torch.load(self.out / before["checkpoint"], map_location="cpu", weights_only=True)
        grow_tables(content, run.model, fresh)
        self.log_line("new rows: " + ", ".join(f"{len(rows):,} {table}" for table, rows in fresh.items()))
        with whole_file(self.out / "parts" / "grown.ckpt") as file:
            torch.save(content, file)
        return self.out / "parts" / "grown.ckpt"

    def _publish(self, record: Entry, parts: Mapping[str, str]) -> None:
        """Export the newest checkpoint, compare, swap the link if the export passes, and remove older files."""
        entries: list[Entry] = record["parts"]
        entry = entries[-1]
        name = entry["part"]
        target = self.out / "exports" / name
        make_once(target, lambda folder: self._export(entry, newest(parts, name, self.catalogue), folder))
        if "gate" not in entry:
            model, serving = self._model(entry), self._in_service(entries)
            values = [
                measure_export(self.out / "exports" / one["part"] / "export", model, data)
                for one in ([entry] if serving is None else [entry, serving])
                for data in [self._data({name: parts[name]}, self.out / one["vocabularies"])]
            ]
            entry["gate"] = self.gate.judge(model.monitor, values[0], values[1] if serving else {})
            self._write(record)
        gate = entry["gate"]
        if gate["passed"]:
            swap_link(self.link, target)
        entry["published"] = gate["passed"]
        self._write(record)
        old = "nothing" if gate["in_service"] is None else f"{gate['in_service']:.4f}"
        result = "published" if gate["passed"] else "refused, the link is unchanged"
        self.log_line(f"{name}: {gate['metric']} {gate['new']:.4f}, in service {old}: {result}")
        good = {self.link.resolve().name, *[one["part"] for one in entries if one.get("published")][-self.keep :]}
        used = {one["vocabularies"] for one in entries if one["part"] in {*good, name}}
        for one in entries:
            if one["part"] not in good:
                shutil.rmtree(self.out / "exports" / one["part"], ignore_errors=True)
            if one["part"] not in good | {name}:
                (self.out / one["checkpoint"]).unlink(missing_ok=True)
            if one["vocabularies"] not in used:
                shutil.rmtree(self.out / one["vocabularies"], ignore_errors=True)

    def _export(self, entry: Entry, parts: Mapping[str, str], folder: Path) -> None:
        """Write export and index of a checkpoint to a folder, and answer one request with them."""
        from recsys_topk.runs.deploy import export_checkpoint
        from recsys_topk.serving.index import build_index
        from recsys_topk.serving.recommend import CascadeRecommender

        changes = self.parts.arguments(parts, self.out / entry["vocabularies"])
        options: dict[str, Any] = {"programs": False, "trust": self.trial.trust, "changes": changes}
        report = export_checkpoint(self.out / entry["checkpoint"], folder / "export", **options)
        index = folder / "index" if report.manifest.stages[0].has_towers else None
        if index is not None:
            build_index(folder / "export", index)
        recommender = CascadeRecommender.from_export(folder / "export", index)
        users, items = recommender.users, recommender.items.names
        who: list[Any] = [{"history": items[:1].tolist()}] if users is None else users.names[:1].tolist()
        answer = recommender.recommend(who)[0]
        if not answer or not all(math.isfinite(score) for one in answer for score in one.scores.values()):
            raise RuntimeError(f"the export of {entry['part']} does not answer a request of {who[0]!r}: {answer}")

    def _in_service(self, entries: Sequence[Entry]) -> Entry | None:
        """Return the part whose export the link points to; None if there is no link."""
        if not self.link.is_symlink():
            return None
        current = self.link.resolve()
        for one in entries:
            if (self.out / "exports" / one["part"]).resolve() == current and current.is_dir():
                return one
        raise ValueError(
            f"{str(self.link)!r} points to {str(current)!r}, which is no export of {str(self.out)!r}; give another "
            f"--publish, or remove the link"
        )

    def _write(self, record: Entry) -> None:
        write_whole(self.out / STATE, json.dumps(record, indent=1))


def measure_export(export: Path, model: CascadeModule, data: CascadeDataModule) -> dict[str, float]:
    """Return the metrics of the ONNX files of an export on the newest requests of the data (`newest`)."""
    import torch

    from recsys_topk.serving.export import add_previous, onnx_scores

    stages = read_manifest(export, verify=False).stages
    scores = {stage.name: onnx_scores(export, stage) for stage in stages}
    scales = {stage.name: stage.previous_scale for stage in stages}
    metrics: dict[str, Any] = {}
    for batch in data.newest_requests(data.splits["train"][-1]):
        found = add_previous({name: torch.from_numpy(score(batch)) for name, score in scores.items()}, scales)
        metrics = model.update_metrics("test", found, batch)
    values = {name: float(metric.compute()) for name, metric in metrics.items()}
    for metric in metrics.values():
        metric.reset()
    return values


def roll_back(link: Path, part: str | None = None) -> str:
    """Point a published link to the export published before, or to that of `part`; return the name of the part."""
    target = link.resolve()
    state = target.parents[1] / STATE
    if not link.is_symlink() or not state.is_file():
        raise ValueError(f"{str(link)!r} is not a link that `recsys-topk online` published")
    entries = json.loads(state.read_text(encoding="utf-8"))["parts"]
    there = [one["part"] for one in entries if one.get("published") and (target.parent / one["part"]).is_dir()]
    chosen = part or max((name for name in there if name < target.name), default=None)
    if chosen is None or chosen not in there:
        wanted = part or f"before {target.name}"
        raise ValueError(f"there is no export {wanted} to roll back to; kept: {', '.join(there)}")
    swap_link(link, target.parent / chosen)
    return chosen
