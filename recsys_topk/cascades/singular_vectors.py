"""Item vectors from the users' sequences, as the start of an embedding table."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from recsys_topk.types import Array


def singular_vectors(user: Array, item: Array, size: int, dim: int) -> tuple[Tensor, Tensor]:
    """Return vectors of the items that have interactions, and which items these are.

    The vectors are the rows of V S^1/2, scaled to length 1, where U S V^T is the truncated singular value
    decomposition of the matrix of users and items with the entries 1 / sqrt(items of the user x users of the item).
    Items of the same users get similar vectors (PureSVD: Cremonesi et al. 2010). They are turned by a random
    rotation, so that no column has more weight than another. Cost: O(n dim) for n interactions, a few times.

    Args:
        user: (n,) integers, equal for the interactions of one user.
        item: (n,) the item of each interaction, below `size`.
        size: Number of items, V.
        dim: Width of the vectors, D.

    Returns:
        The vectors, (V, D), and a mask of the items that have interactions, (V,). The result is the same in each call.

    Example:
        >>> vectors, known = singular_vectors(np.array([0, 0, 1, 1]), np.array([0, 1, 2, 3]), 5, 2)
        >>> known.tolist()
        [True, True, True, True, False]
        >>> (vectors @ vectors.T).round()[0].tolist()
        [1.0, 1.0, 0.0, 0.0, 0.0]
    """
    users, number = np.unique(user, return_inverse=True)
    pair = np.unique(number * size + item)
    row, column = pair // size, pair % size
    of_user, of_item = np.bincount(row), np.bincount(column, minlength=size)
    entry = torch.from_numpy((of_user[row] * of_item[column]) ** -0.5).float()
    place, shape = torch.from_numpy(np.stack([row, column])), (len(users), size)
    matrix = torch.sparse_coo_tensor(place, entry, shape, check_invariants=False).coalesce()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        _, singular, vectors = torch.svd_lowrank(matrix, q=min(dim + 16, *shape), niter=4)
        rotation = torch.linalg.qr(torch.randn(dim, dim))[0]
    vectors = torch.nn.functional.normalize((vectors * singular.sqrt())[:, :dim], dim=1)
    return vectors @ rotation[: vectors.shape[1]], torch.from_numpy(of_item > 0)
