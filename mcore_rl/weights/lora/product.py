"""Adds the product of two factors to a matrix: the only place where W0 + s B A is computed."""

import torch
from torch import Tensor


@torch.no_grad()
def add_product(weight_RC: Tensor, a_rC: Tensor, b_Rr: Tensor, scale: float) -> None:
    """Add s B A to W in place; product and sum in float32, rounded once to the dtype of W."""
    merged = torch.addmm(weight_RC.float(), b_Rr.float(), a_rC.float(), alpha=scale)
    weight_RC.copy_(merged)
