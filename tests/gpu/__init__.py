"""The checks that `make test-gpu` runs; see __main__."""
