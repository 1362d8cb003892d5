"""Options of losses whose default depends on the labels of the data."""

from __future__ import annotations

from typing import Any, Literal, TypeVar

LabelKind = Literal["grades", "places"]
Option = TypeVar("Option")


class LabelDefaults:
    """Mixin of losses: the threshold of positive items, and options that depend on the kind of labels."""

    def _set_threshold(self, positive_above: float | None) -> None:
        self.positive_above = 0.0 if positive_above is None else float(positive_above)
        self._open_threshold = positive_above is None
        self._open_options: dict[str, dict[LabelKind, Any]] = {}

    def set_label_defaults(self, kind: LabelKind, positive_above: float) -> None:
        """Set the options that the constructor left at None from the labels of the data.

        Options that were passed to the constructor, including 0, do not change. `CascadeModule` calls this with the
        labels of its schema, so that a loss built in Python equals one built on the command line.

        Args:
            kind: ``"grades"`` (a small scale, such as 0 to 4) or ``"places"`` (places in a ranking, bigger is better).
            positive_above: Items with a label above this are positive.

        Example:
            >>> from recsys_topk.losses import LambdaLoss
            >>> loss = LambdaLoss(k=10)
            >>> loss.set_label_defaults("places", positive_above=7.0)
            >>> loss.gain, loss.positive_above
            ('linear', 7.0)
        """
        if self._open_threshold:
            self.positive_above = float(positive_above)
        for name, values in self._open_options.items():
            setattr(self, name, values[kind])

    def _by_labels(self, name: str, given: Option | None, *, grades: Option, places: Option) -> Option:
        """Return `given`, or if it is None the default for grades, which `set_label_defaults` may change later."""
        if given is not None:
            return given
        self._open_options[name] = {"grades": grades, "places": places}
        return grades
