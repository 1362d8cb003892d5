"""Checks of the class paths in checkpoints, configs and run directories before they are imported.

A *name* is a class path such as ``"my_package.MyLoss"``. Its source decides which classes are allowed:

- typed by the user or written in the user's program: any importable class that is a subclass of the expected base;
- read from a file: a class of this package that configures a run (`OWN`), a class of `HARMLESS` (Lightning and torch),
  a class of an installed plug-in (entry points of `recsys_topk.*`), a class that the program registered itself, or a
  class of a package that the user trusts (``--trust my_package``, ``trust=["my_package"]``).

Names that are resolved inside `reading` come from a file. `inspect_names` checks plain values before a parser sees
them. `documents` reads YAML within limits, `guard` restricts jsonargparse to the allowed classes, `typed` finds the
packages that a typed config trusts, and `own_runs` records them when a run starts.
"""

from recsys_topk.trust.allowed import allow_registered as allow_registered
from recsys_topk.trust.allowed import check_name as check_name
from recsys_topk.trust.allowed import is_allowed as is_allowed
from recsys_topk.trust.allowed import load_class as load_class
from recsys_topk.trust.class_paths import class_path as class_path
from recsys_topk.trust.inspection import inspect_names as inspect_names
from recsys_topk.trust.lists import HARMLESS as HARMLESS
from recsys_topk.trust.source import UntrustedError as UntrustedError
from recsys_topk.trust.source import from_file as from_file
from recsys_topk.trust.source import loading as loading
from recsys_topk.trust.source import reading as reading
