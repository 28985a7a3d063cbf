"""Complex tensors of PyTorch as pairs of real numbers, for what cannot send them."""

from __future__ import annotations

from typing import Any

import torch


def as_pairs(tensor: Any) -> Any:
    """The real and imaginary parts: a view of shape (..., 2), or a copy, if the tensor is not contiguous or is a conjugate."""
    return torch.view_as_real(tensor.contiguous().resolve_conj())


def from_pairs(pairs: Any) -> Any:
    """A view of the complex tensor with these parts, given in the shape (..., 2)."""
    return torch.view_as_complex(pairs)
