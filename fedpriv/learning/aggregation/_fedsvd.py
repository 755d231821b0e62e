"""FedSVD: the product B A in another basis, in which clients train B alone.

Between rounds the server writes the product in the basis of its singular vectors. The function stays the same: only
what clients train next are other coordinates of it. The rows of the new A span what those of the old one span, so with
A orthonormal from the start the new A is a rotation of the old one.
"""

from dataclasses import replace

import torch
from torch import Tensor

from fedpriv.learning.adapters import A_SUFFIX, B_SUFFIX, factors_of
from fedpriv.learning.aggregation._fedavg import GlobalModel


def rebased(model: GlobalModel) -> GlobalModel:
    """The same model, each product B A = U S V^T as B = U S and A = V^T, and the moments of B in the same coordinates.

    The rows of A are orthonormal, by falling singular value. Where the product has a lower rank than A, the last rows
    complete the row space of the old A. While B is zero, A stays as it is.

    Args:
        model: with ranks of at most each layer's number of inputs; its optimizer's moments are linear in the uploads.

    Source: Lee et al. 2025, Algorithm 1; that moments follow the basis is ours.
    """
    adapter = dict(model.adapter)
    state = {moment: dict(tensors) for moment, tensors in model.optimizer_state.items()}
    for layer, (b, a) in factors_of(model.adapter).items():
        if not b.any():
            continue
        change, adapter[layer + A_SUFFIX] = _new_basis(b, a)
        for tensors in (adapter, *state.values()):
            if layer + B_SUFFIX in tensors:
                tensors[layer + B_SUFFIX] = (tensors[layer + B_SUFFIX].double() @ change).float()
    return replace(model, adapter=adapter, optimizer_state=state)


def _new_basis(b: Tensor, a: Tensor) -> tuple[Tensor, Tensor]:
    """The factor of B from the right, float64 [r, r], and the new A, [r, in]."""
    rows, triangle = torch.linalg.qr(a.double().T)
    # The small factor of a QR has the product's singular values, and all r right vectors however few its rows are.
    small = torch.linalg.qr(b.double() @ triangle.T).R
    vectors = torch.linalg.svd(small).Vh
    return triangle.T @ vectors.T, (vectors @ rows.T).float()
