"""A registry imports the module of a name alone; the others are imported when they are needed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from recsys_topk.registry import Registry, UnknownNameError

BASE = """
from recsys_topk.registry import Registry

class Shape:
    def __init_subclass__(cls):
        registry.register(cls.name, cls)

registry = Registry("shape", "{package}", "{package}.shapes", Shape)
"""
SHAPE = """
from {package}.base import Shape

class {cls}(Shape):
    name = "{name}"
"""


@pytest.fixture
def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Registry[object]:
    package = f"shapes_of_{abs(hash(request.node.name))}"
    folder = tmp_path / package
    folder.mkdir()
    (folder / "__init__.py").touch()
    (folder / "base.py").write_text(BASE.format(package=package))
    (folder / "circle.py").write_text(SHAPE.format(package=package, cls="Circle", name="circle"))
    (folder / "polygons.py").write_text(SHAPE.format(package=package, cls="Square", name="square"))
    monkeypatch.syspath_prepend(tmp_path)
    made: Registry[object] = __import__(f"{package}.base", fromlist=["registry"]).registry
    return made


def test_resolving_a_name_imports_its_module_only(registry: Registry[object]) -> None:
    circle = registry.resolve("circle")
    assert circle.__name__ == "Circle"
    assert f"{registry.package}.polygons" not in sys.modules
    assert registry.resolve(f"{registry.package}.circle.Circle") is circle
    assert f"{registry.package}.polygons" not in sys.modules
    assert registry.available() == ("circle", "square")


def test_name_without_a_module_of_its_own_is_found(registry: Registry[object]) -> None:
    assert registry.resolve("square").__name__ == "Square"
    assert registry.resolve("Circle").__name__ == "Circle"


def test_module_without_a_class_is_no_name(registry: Registry[object]) -> None:
    with pytest.raises(UnknownNameError, match=r"unknown shape 'polygons'.*circle, square"):
        registry.resolve("polygons")
