"""The parser of the training commands."""

from __future__ import annotations

import re
from typing import Any, NoReturn

from lightning.pytorch.cli import LightningArgumentParser

from recsys_topk.cli.console import warn
from recsys_topk.registry import nearest


class Parser(LightningArgumentParser):  # type: ignore[misc]  # lightning is untyped here
    """LightningCLI's parser with errors of one line, and without guessing at abbreviated options."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, allow_abbrev=False, **kwargs)

    def error(self, message: str, ex: BaseException | None = None) -> NoReturn:
        """Say what is wrong, with the nearest option where one was misspelt, and exit with status 2."""
        text = " ".join(str(ex if ex is not None else message).split())
        denied = re.search(r"Importing '([\w.]+)' is not allowed, denied by", text)
        if denied:
            package = denied.group(1).partition(".")[0]
            text = (
                f"an option or a config names {denied.group(1)!r}, which a file may not name; nothing of it was "
                f"imported. If you know the package, add --trust {package}"
            )
        unknown = re.search(r"(--[\w.-]+)", text) if "nrecognized" in text or "not accepted" in text else None
        if unknown:
            options = [option for action in self._actions for option in action.option_strings]
            close = nearest(unknown.group(1), [*options, "--resume"])
            text += f"; did you mean {close}?" if close else ""
        warn(f"recsys-topk: {text}")
        raise SystemExit(2)

    def whole(self, options: Any) -> str:
        """Return all options as YAML, unset ones too."""
        return str(self.dump(options, "yaml", False))  # by position: the keyword's name depends on the version
