"""A guard around jsonargparse: it reads documents within limits, and imports only the classes that a file may name.

Configs are checked before parsing (`recsys_topk.trust.documents`). The guard covers the cases that this check cannot
know: the types of options decide which of them are classes or functions, and values may be paths of other configs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from jsonargparse import _common as settings
from jsonargparse import get_loader, set_loader, set_parsing_settings
from jsonargparse._loaders_dumpers import get_loader_exceptions

from recsys_topk.trust.allowed import names_for_parser
from recsys_topk.trust.class_paths import locate
from recsys_topk.trust.documents import check_bounds
from recsys_topk.trust.source import UntrustedError, trusted


@contextmanager
def guarded() -> Iterator[None]:
    """Restrict jsonargparse to the classes that `recsys_topk.trust` allows inside the enclosing `reading`.

    The settings of jsonargparse are global. They are restored at the end.
    """
    before = dict(settings.parsing_settings)
    load, exceptions = get_loader("yaml"), get_loader_exceptions("yaml")

    def load_within_bounds(text: str) -> Any:
        try:
            check_bounds(text, "a config")
        except UntrustedError:
            raise
        except ValueError:
            pass  # the loader raises a more detailed error
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
    """Return the defining paths of the trusted classes, because the parser checks those as well."""
    paths = []
    for name in trusted():
        if "." in name:
            try:
                named = locate(name)
            except ImportError:
                continue  # the parser raises the error
            paths.append(f"{named.__module__}.{named.__qualname__}" if hasattr(named, "__qualname__") else name)
    return paths
