"""Kernels that numba compiles. Their modules import numba at the top, so import them only where it is installed."""
