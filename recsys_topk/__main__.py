"""Entry point of `python -m recsys_topk`, the same command line as `recsys-topk`."""

from recsys_topk.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
