"""Sphinx configuration: `make docs` builds the site into docs/_build/html. Nothing is loaded from elsewhere."""

from __future__ import annotations

import inspect
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from generate import write_pages
from run_notebooks import write_notebooks

import recsys_topk
from recsys_topk.spec import Recorded

project = "recsys_topk"
author = copyright = "The recsys_topk authors"
version = release = recsys_topk.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]
source_suffix = {".md": "markdown"}
myst_heading_anchors = 3
myst_enable_extensions = ["colon_fence"]
suppress_warnings = ["myst.header"]  # a page may begin with a table of contents

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_default_options = {"members": True, "show-inheritance": True}
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_custom_sections = [("Class attributes", "params_style")]
default_role = "code"

html_theme = "furo"
html_title = f"recsys_topk {version}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sourcelink = False
highlight_language = "none"  # an indented block is a command or its output
pygments_style = "friendly"
pygments_dark_style = "monokai"


def plain_formulas(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Keep |x| in the formulas of docstrings from being read as a substitution of reStructuredText."""
    lines[:] = [line if line.lstrip().startswith((">>>", "...")) else line.replace("|", "\\|") for line in lines]


def real_signature(app: Any, what: str, name: str, obj: Any, options: Any, given: Any, returns: Any) -> Any:
    """Show the arguments of a class that records them (`recsys_topk.spec.Recorded`), not those of the recorder."""
    if what == "class" and issubclass(obj, Recorded):
        parameters = list(inspect.signature(obj.__init__).parameters.values())[1:]
        shown = [parameter.replace(annotation=inspect.Parameter.empty) for parameter in parameters]
        return str(inspect.Signature(shown)), returns
    return None


def setup(app: Any) -> None:
    """Write the pages that are made from the registries before Sphinx looks for sources."""
    write_pages(Path(__file__).parent / "generated")
    write_notebooks(Path(__file__).parent / "generated" / "notebooks")
    app.connect("autodoc-process-signature", real_signature)
    app.connect("autodoc-process-docstring", plain_formulas, priority=400)  # before napoleon
