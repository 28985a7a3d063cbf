"""What several files ask of PyTorch's tensors: which of a model's are trained; and some to measure how fast tensors travel."""

from __future__ import annotations

import torch


def trained_of(model: torch.nn.Module) -> list[torch.nn.Parameter]:
    """The parameters that are trained, in the model's order."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def zeros(count: int, local_rank: int) -> torch.Tensor:
    """So many float32 zeros, on this rank's GPU where there is one."""
    gpus = torch.cuda.device_count()
    return torch.zeros(count, device=f"cuda:{local_rank % gpus}" if gpus else "cpu")


def size(tensor: torch.Tensor) -> int:
    """A tensor's bytes."""
    return tensor.nbytes


def wait_for(tensor: torch.Tensor) -> None:
    """Wait until a tensor's values are there: a GPU computes later than it is told to."""
    tensor.reshape(-1)[:1].tolist()
