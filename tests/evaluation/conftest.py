"""The checkpoint and the export of the tests of serving."""

from __future__ import annotations

from tests.serving.conftest import checkpoint, export

__all__ = ["checkpoint", "export"]
