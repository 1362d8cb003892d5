"""Every operator against other people's implementations, value and vector-Jacobian product."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from recsys_topk.numerics import full_mask
from recsys_topk.operators import get
from recsys_topk.operators.perturbed import noised_topk
from recsys_topk.ops.selection.membership import Law, membership_logs
from tests.operators.peer_vectors import compare, load, tensors

PEERS: list[tuple[str, str, dict[str, Any]]] = [
    ("dftopk", "op_dftopk_dftopkrepo", {}),
    ("lapsum", "op_lapsum_dftopkrepo", {"tau": 0.5}),
    ("lapsum", "op_lapsum_autograd_dftopkrepo", {"tau": 0.5}),
    ("lapsum", "op_lapsum_gmum", {"tau": 0.5}),
    ("sparse", "op_sparse_topk_dykstra_dftopkrepo", {}),
    ("sparse", "op_sparse_topk_dykstra_google", {}),
    ("sparse", "op_sparse_topk_pav_p2_google", {}),
    ("sinkhorn", "op_soft_ot_xie", {"tau": 0.1}),
    ("softsort", "op_softsort_dftopkrepo", {"normalised": False}),
    ("softsort", "op_softsort_p1_sprillo", {"normalised": False}),
    ("softsort", "op_softsort_smooth_softtorch", {"normalised": False}),
    ("neuralsort", "op_neuralsort_dftopkrepo", {"normalised": False}),
    ("neuralsort", "op_neuralsort_sprillo", {"normalised": False}),
    ("diffsort", "op_difftopk_odd_even_cauchy_difftopk", {"tau": 0.1, "network": "odd_even"}),
    *(
        ("diffsort", f"op_diffsort_{network}_{law}_diffsort", {"tau": 0.1, "network": network, "distribution": law})
        for network, laws in {
            "bitonic": ("cauchy", "logistic", "logistic_phi", "optimal"),
            "odd_even": ("cauchy", "gaussian", "logistic", "logistic_phi", "optimal", "reciprocal"),
        }.items()
        for law in laws
    ),
]


@pytest.mark.parametrize(("name", "file", "arguments"), PEERS, ids=[file for _, file, _ in PEERS])
def test_matches_peer(name: str, file: str, arguments: dict[str, Any]) -> None:
    vectors = load(file)
    for case in vectors["cases"]:
        # logistic_phi has slope |d|^(-1/4) at a tie, which amplifies the rounding error of d to 1e-7.
        steep = "logistic_phi" in file and case["name"] == "open_ties"
        compare(get(name, **arguments), case, 1e-6 if steep else vectors["suggested_tolerance"])


@pytest.mark.parametrize("file", ["op_softsort_dftopkrepo", "op_neuralsort_dftopkrepo"])
def test_normalised_form_equals_the_peers_matrix_divided_by_its_column_sums(file: str) -> None:
    operator = get(file.split("_")[1])
    for case in load(file)["cases"]:
        if "permutation" not in case or not case["output_unique"]:
            continue
        scores, mask = tensors(case)
        matrix = torch.tensor(case["permutation"], dtype=torch.float64)
        expected = matrix[:, : case["k"]].sum(1) / matrix.sum(1)
        selection = operator(scores, case["k"], mask)
        torch.testing.assert_close(selection.p, expected, atol=1e-9, rtol=1e-9)
        torch.testing.assert_close(selection.log_q.exp(), 1.0 - expected, atol=1e-9, rtol=1e-9)


def test_lapsum_with_a_fractional_k_matches_peer() -> None:
    for case in load("op_lapsum_fractional_k_gmum")["cases"]:
        k = case["k"] + 0.25
        for given in (k, torch.tensor(k), torch.full((len(case["scores"]),), k)):
            compare(get("lapsum", tau=0.5), {**case, "k": given}, 1e-9)


@pytest.mark.parametrize(("k", "error"), [(-0.5, ValueError), (float("nan"), ValueError), (torch.ones(3), ValueError)])
def test_invalid_fractional_k_raises(k: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="k must be"):
        get("lapsum")(torch.zeros(2, 4), k)


def test_hard_matches_peer() -> None:
    for case in load("hard_topk_label_dftopkrepo")["cases"]:
        scores, mask = tensors(case)
        assert torch.equal(get("hard")(scores, case["k"], mask).p, torch.tensor(case["output"], dtype=torch.float64))


def test_perturbed_matches_peer_with_the_same_noise() -> None:
    for case in load("op_perturbed_topk_google")["cases"]:
        scores, _ = tensors(case)
        noises = torch.tensor(case["noise"], dtype=torch.float64).unbind(1)
        k = torch.full((len(scores),), case["k"])
        mean = torch.stack([noised_topk(scores, k, noise, 0.5).double() for noise in noises]).mean(0)
        torch.testing.assert_close(mean, torch.tensor(case["output"], dtype=torch.float64))


def test_sigmoid_operator_matches_standardised_transport_of_qfeval() -> None:
    # Anchors -1 and 1 after standardisation: cost difference 4 s, so the temperature is epsilon c / 4.
    vectors = load("op_soft_ot_qfeval")
    for case in vectors["cases"]:
        if case.get("mask") is not None:
            continue
        scores, _ = tensors(case)
        scores.requires_grad_()
        standard = (scores - scores.mean(1, keepdim=True)) / scores.std(1, keepdim=True).clamp_min(1e-6)
        largest = (standard.abs() + 1.0).square().amax(1, keepdim=True).detach()
        taus = 0.1 * largest / 4.0
        p = membership_logs(standard, case["k"], full_mask(standard), Law("logistic", 0.1), taus)[0].exp()
        torch.testing.assert_close(p, torch.tensor(case["output"], dtype=torch.float64), atol=1e-6, rtol=1e-6)
        p.backward(torch.tensor(case["cotangent"], dtype=torch.float64))
        torch.testing.assert_close(scores.grad, torch.tensor(case["grad"], dtype=torch.float64), atol=1e-6, rtol=1e-5)
