"""The `recsys-topk` command."""
