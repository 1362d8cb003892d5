"""What `make test-gpu` runs: see __main__."""
