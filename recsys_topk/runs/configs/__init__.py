"""Configs that come with the package; `--config NAME` takes them by name."""
