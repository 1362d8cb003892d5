"""The export that a service uses, and its replacement by a newer one without dropped requests."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path

from recsys_topk.serving.manifest import FILE, ManifestError
from recsys_topk.serving.recommend import CascadeRecommender

log = logging.getLogger(__name__)


class CurrentExport:
    """Opens an export, and opens it again when the manifest at its path changes.

    To publish a new export, write it to a new folder and update a symbolic link: ``ln -sfn export-2 current``. The new
    export is opened and checked in the background. The old export answers requests until the new one is ready. If the
    new export cannot be opened, the old one stays in use and the reason is logged. `loaded` is called after each
    attempt, with whether it succeeded.
    """

    def __init__(
        self,
        export: str | Path,
        index: str | Path | None = None,
        threads: int = 1,
        loaded: Callable[[bool], object] = lambda success: None,
    ) -> None:
        self.export, self.index, self._threads, self._loaded = Path(export), index, threads, loaded
        self._stamp = self._look()
        self._lock = threading.Lock()
        self._recommender = self._open()

    @property
    def recommender(self) -> CascadeRecommender:
        """The recommender in use. Use the same object for a whole request."""
        return self._recommender

    def refresh(self, force: bool = False) -> bool:
        """Open the export again if it changed. Return whether a new one is in use. Thread-safe."""
        with self._lock:
            stamp = self._look()
            if stamp is None or (stamp == self._stamp and not force):
                return False
            self._stamp = stamp
            try:
                fresh = self._open()
            except (ManifestError, ValueError, OSError) as error:
                log.error("cannot load the export at %s, the old one stays in use: %s", self.export, error)
                self._loaded(False)
                return False
            changed = fresh.manifest.identity != self._recommender.manifest.identity
            self._recommender = fresh
            self._loaded(True)
            return changed

    def _open(self) -> CascadeRecommender:
        # The link may change while files are read, so it is resolved first.
        index = None if self.index is None else Path(self.index).resolve()
        return CascadeRecommender.from_export(self.export.resolve(), index, self._threads)

    def _look(self) -> tuple[str, int, int] | None:
        path = self.export.resolve() / FILE
        try:
            found = path.stat()
        except OSError:
            return None
        return str(path), found.st_mtime_ns, found.st_ino
