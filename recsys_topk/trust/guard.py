"""jsonargparse under guard: it reads documents within bounds, and imports what a file may name and nothing else.

Configs are inspected before they get here (`recsys_topk.trust.documents`). The guard holds for what that cannot know:
which options take a class or a function depends on their types, and their values may be paths of other configs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from jsonargparse import _common as settings
from jsonargparse import get_loader, set_loader, set_parsing_settings
from jsonargparse._loaders_dumpers import get_loader_exceptions

from recsys_topk.trust import UntrustedError, locate, names_for_parser, trusted
from recsys_topk.trust.documents import check_bounds


@contextmanager
def guarded() -> Iterator[None]:
    """Let jsonargparse import only what `recsys_topk.trust` allows inside the enclosing `reading`.

    Its settings are global; they are restored at the end.
    """
    before = dict(settings.parsing_settings)
    load, exceptions = get_loader("yaml"), get_loader_exceptions("yaml")

    def load_within_bounds(text: str) -> Any:
        try:
            check_bounds(text, "a config")
        except UntrustedError:
            raise
        except ValueError:
            pass  # the loader's own error says more
        return load(text)

    set_loader("yaml", load_within_bounds, exceptions)
    set_parsing_settings(
        instantiate_subclass_spec_in_any=False,
        import_path_denylist=["*"],
        import_path_allowlist=[*names_for_parser(), *_definitions()],
    )
    try:
        yield
    finally:
        settings.parsing_settings.clear()
        settings.parsing_settings.update(before)
        set_loader("yaml", load, exceptions)


def _definitions() -> list[str]:
    """Return where the single classes that are trusted are defined, which the parser checks too."""
    found = []
    for name in trusted():
        if "." in name:
            try:
                named = locate(name)
            except ImportError:
                continue  # the parser says so
            found.append(f"{named.__module__}.{named.__qualname__}" if hasattr(named, "__qualname__") else name)
    return found
