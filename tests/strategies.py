"""Hypothesis strategies for batches of lists: any shape, any mask, ties, any k, small and large scores."""

import torch
from hypothesis import strategies as st

from recsys_topk.testing import Lists


@st.composite
def lists(draw):
    """Draw one to three lists of one to seven items; scores on a coarse grid (ties) or free, in float64."""
    b, n = draw(st.integers(1, 3)), draw(st.integers(1, 7))

    def table(elements):
        row = st.lists(elements, min_size=n, max_size=n)
        return torch.tensor(draw(st.lists(row, min_size=b, max_size=b)), dtype=torch.float64)

    grid, free = st.integers(-2, 2), st.floats(-4, 4, allow_subnormal=False)
    scores = table(draw(st.sampled_from([grid, free]))) * draw(st.sampled_from([1.0, 1e-3, 1e3]))
    mask = table(st.sampled_from([0, 1, 1, 1])).bool()
    return Lists(scores, table(st.integers(0, 3)), mask, k=draw(st.integers(0, n + 1)))
