"""`python -m recsys_topk` is `recsys-topk`."""

from recsys_topk.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
