"""Loops that numba compiles. The modules here import it at the top, so they are imported only where it is installed."""
