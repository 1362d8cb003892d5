"""The export that a service uses, and its replacement by a newer one without dropped requests."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path

from recsys_topk.serving.funnel import first_line
from recsys_topk.serving.recommend import CascadeRecommender
from recsys_topk.serving.vector_store import is_store
from recsys_topk.text import printable

log = logging.getLogger(__name__)


class CurrentExport:
    """Opens an export, and opens it again when a file or a link of it or of its index changes.

    To publish a new export, write it to a new folder and update a symbolic link: ``ln -sfn export-2 current``. The new
    export is opened, checked and tried out in the background. The old export answers requests until the new one is
    ready. If the new export cannot be used, the old one stays in use, the reason is logged and is in `failed`, and the
    next change of a file or link starts another attempt. `loaded` is called after each attempt, with whether it
    succeeded.
    """

    def __init__(
        self,
        export: str | Path,
        index: str | Path | None = None,
        threads: int = 1,
        loaded: Callable[[bool], object] = lambda success: None,
    ) -> None:
        self.export, self.index, self._threads, self._loaded = Path(export), index, threads, loaded
        self.failed: dict[str, str | float] | None = None  # reason and time of the last attempt, if it failed
        self._stamp = self._look()
        self._lock = threading.Lock()
        self._recommender = self._open()

    @property
    def recommender(self) -> CascadeRecommender:
        """The recommender in use. Use the same object for a whole request."""
        return self._recommender

    def refresh(self, force: bool = False) -> bool:
        """Open the export again if it changed. Return whether a new one is in use. Thread-safe; does not raise."""
        with self._lock:
            stamp = self._look()
            if stamp == self._stamp and not force:
                return False
            self._stamp = stamp
            try:
                fresh = self._open()
            except Exception as error:  # whatever is wrong with the new export, the old one must stay in use
                reason = printable(first_line(error))
                self.failed = {"reason": reason, "time": time.time()}
                log.error("cannot load the export at %s, the old one stays in use: %s", self.export, reason)
                self._loaded(False)
                return False
            changed = fresh.manifest.identity != self._recommender.manifest.identity
            self._recommender, self.failed = fresh, None
            self._loaded(True)
            return changed

    async def watch(self, seconds: float) -> None:
        """Look for a newer export from time to time, until the task is cancelled."""
        while True:
            await asyncio.sleep(seconds)
            try:
                if await asyncio.to_thread(self.refresh):
                    log.info("now serving export %s", self.recommender.manifest.identity)
            except Exception:  # the watcher must not end
                log.exception("cannot look for a newer export")

    def _open(self) -> CascadeRecommender:
        # The link may change while files are read, so it is resolved first.
        index = self.index if self.index is None or is_store(self.index) else Path(self.index).resolve()
        made = CascadeRecommender.from_export(self.export.resolve(), index, self._threads)
        made.try_out()
        return made

    def _look(self) -> set[tuple[str, int, int]]:
        """Return path, time and inode of every file of the export and of the index."""
        given = [self.export] if self.index is None or is_store(self.index) else [self.export, self.index]
        folders = [Path(folder).resolve() for folder in given]
        found = {(str(folder), 0, 0) for folder in folders}
        for path in (path for folder in folders for path in folder.rglob("*")):
            with contextlib.suppress(OSError):  # removed in the meantime, or a link to nowhere
                found.add((str(path), path.stat().st_mtime_ns, path.stat().st_ino))
        return found
