"""The export that a service uses now, and a newer one when it appears, without a request being dropped."""

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

    To publish a new export, write it to a folder of its own and let a link point at it: ``ln -sfn export-2 current``.
    The new one is opened and checked in the background; requests are answered by the old one until it is ready. If
    it cannot be opened, the old one stays, and the reason is logged.

    Args:
        export: Path of the export; may be a link.
        index: Path of the index, or None for exact search; may be a link.
        threads: Threads of one call of a model.
        loaded: Called after each attempt with whether it succeeded.
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
        """The export in use. Keep it for the whole of a request."""
        return self._recommender

    def refresh(self, force: bool = False) -> bool:
        """Open the export again if it changed; return whether a new one is in use now. May be called by any thread."""
        with self._lock:
            stamp = self._look()
            if stamp is None or (stamp == self._stamp and not force):
                return False
            self._stamp = stamp
            try:
                fresh = self._open()
            except (ManifestError, ValueError, OSError) as error:
                log.error("the export at %s was not loaded, the old one stays: %s", self.export, error)
                self._loaded(False)
                return False
            changed = fresh.manifest.identity != self._recommender.manifest.identity
            self._recommender = fresh
            self._loaded(True)
            return changed

    def _open(self) -> CascadeRecommender:
        # A link may be changed between two files, so the folder behind it is settled first.
        index = None if self.index is None else Path(self.index).resolve()
        return CascadeRecommender.from_export(self.export.resolve(), index, self._threads)

    def _look(self) -> tuple[str, int, int] | None:
        path = self.export.resolve() / FILE
        try:
            found = path.stat()
        except OSError:
            return None
        return str(path), found.st_mtime_ns, found.st_ino
