"""Records of the packages that the user trusted when a run started, so that resuming the run needs no `--trust`.

A run directory may come from somebody else, so its run.json is not trusted. When a run starts, a random token is
written to its run.json and to a record in the user's own state folder, together with the path of the directory and the
trusted packages (typed class paths and `--trust`). When the run is resumed, these packages are trusted again if path
and token match a record. A directory that was copied or moved has no record and needs `--trust` again.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from recsys_topk.files import write_whole

TOKEN = "trust_token"
MAX_BYTES = 1_000_000


def state_home() -> Path:
    """Return the folder of the records: recsys_topk in XDG_STATE_HOME or in ~/.local/state."""
    chosen = os.environ.get("XDG_STATE_HOME")
    return (Path(chosen).expanduser() if chosen else Path.home() / ".local" / "state") / "recsys_topk" / "runs"


def remember(run: Path, trusted: Sequence[str]) -> dict[str, Any]:
    """Record the packages that a run trusts. Return the entries for its run.json."""
    names = list(dict.fromkeys(trusted))
    if not names:
        return {}
    token = secrets.token_hex(16)
    record = {"path": str(run.resolve()), "token": token, "trusted": names}
    try:
        state_home().mkdir(parents=True, exist_ok=True, mode=0o700)
        write_whole(_record(run), json.dumps(record, indent=1) + "\n")
    except OSError:
        return {"trusted": names}  # for information only; without a record, resuming needs --trust
    return {"trusted": names, TOKEN: token}


def recall(path: str | Path) -> tuple[str, ...]:
    """Return the packages that were trusted when this user started the run on this machine; empty for any other run.

    `path` is the run directory, or a file in it or in its checkpoint folder.
    """
    for run in (Path(path), Path(path).parent, Path(path).parent.parent):
        token = _read(run / "run.json").get(TOKEN)
        if isinstance(token, str):
            record = _read(_record(run), mine=True)
            same = record.get("path") == str(run.resolve()) and secrets.compare_digest(
                str(record.get("token")).encode(), token.encode()
            )
            return tuple(str(name) for name in record["trusted"]) if same else ()
    return ()


def _record(run: Path) -> Path:
    return state_home() / f"{hashlib.sha256(str(run.resolve()).encode()).hexdigest()[:32]}.json"


def _read(path: Path, mine: bool = False) -> dict[str, Any]:
    """Return a JSON object from a file; empty if there is none, or with `mine` if another user owns the file."""
    try:
        with path.open("rb") as file:
            if mine and hasattr(os, "getuid") and os.fstat(file.fileno()).st_uid != os.getuid():
                return {}
            content = json.loads(file.read(MAX_BYTES))
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}
