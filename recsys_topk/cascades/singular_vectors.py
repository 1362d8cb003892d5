"""Item vectors from the users' sequences, as the start of an embedding table."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from recsys_topk.types import Array


def singular_vectors(user: Array, item: Array, size: int, dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the decomposition of the matrix of users and items: which items have the same users.

    U S V^T is the truncated singular value decomposition of the matrix with the entries 1 / sqrt(items of the user x
    users of the item) (PureSVD: Cremonesi et al. 2010). Cost: a few times O(n dim) for n interactions.

    Args:
        user: (n,) integers, equal for the interactions of one user.
        item: (n,) the item of each interaction, below `size`.
        size: Number of items, V.
        dim: Largest number of singular values, D.

    Returns:
        V, (V, D), with zeros in the rows of items without interactions and in the columns beyond the rank; the
        singular values, (D,); the number of users of each item, (V,). The result is the same in each call.
    """
    users, user_row = np.unique(user, return_inverse=True)
    pair = np.unique(user_row * size + item)
    row, column = pair // size, pair % size
    of_user, of_item = np.bincount(row), np.bincount(column, minlength=size)
    entry = torch.from_numpy((of_user[row] * of_item[column]) ** -0.5).float()
    index, shape = torch.from_numpy(np.stack([row, column])), (len(users), size)
    matrix = torch.sparse_coo_tensor(index, entry, shape, check_invariants=False).coalesce()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        _, singular, vectors = torch.svd_lowrank(matrix, q=min(dim + 16, *shape), niter=4)
    missing = max(0, dim - len(singular))
    vectors = torch.nn.functional.pad(vectors[:, :dim], (0, missing))
    return vectors, torch.nn.functional.pad(singular[:dim], (0, missing)), torch.from_numpy(of_item)


def unit_vectors(user: Array, item: Array, size: int, dim: int) -> tuple[Tensor, Tensor]:
    """Return vectors of length 1 of the items that have interactions, (V, D), and which items these are, (V,).

    The vectors are the rows of V S^1/2 (see `singular_vectors`), turned by a random rotation, so that no column has
    more weight than another. Items of the same users get similar vectors.

    Example:
        >>> vectors, known = unit_vectors(np.array([0, 0, 1, 1]), np.array([0, 1, 2, 3]), 5, 2)
        >>> known.tolist()
        [True, True, True, True, False]
        >>> (vectors @ vectors.T).round().abs()[0].tolist()
        [1.0, 1.0, 0.0, 0.0, 0.0]
    """
    vectors, singular, users = singular_vectors(user, item, size, dim)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        rotation = torch.linalg.qr(torch.randn(dim, dim))[0]
    return torch.nn.functional.normalize(vectors * singular.sqrt(), dim=1) @ rotation, users > 0
