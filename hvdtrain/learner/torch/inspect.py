"""Inspects a model: its layers, and a profile of its steps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch

from hvdtrain.learner.base import Layer, Profiler


def layers_of(model: torch.nn.Module) -> Iterator[Layer]:
    """The model and its modules, each with its direct parameters; a shared one belongs to the first module that has it."""
    seen: set[int] = set()
    for name, module in model.named_modules():
        params = {short: param for short, param in module.named_parameters(recurse=False) if id(param) not in seen}
        seen.update(map(id, params.values()))
        shapes = {short: tuple(param.shape) for short, param in params.items()}
        trainable = frozenset(short for short, param in params.items() if param.requires_grad)
        yield Layer(name, type(module).__name__, shapes, trainable)


class _Profiler:
    """PyTorch's profiler: CPU operators, and GPU kernels if there is a GPU."""

    def __init__(self, on_gpu: bool) -> None:
        from torch import profiler  # here, as few trainings are profiled

        activities = [profiler.ProfilerActivity.CPU, *([profiler.ProfilerActivity.CUDA] if on_gpu else [])]
        self._profile = profiler.profile(activities=activities)
        self._record = profiler.record_function

    def start(self) -> None:
        self._profile.start()

    def stop(self, file: Path) -> None:
        self._profile.stop()
        self._profile.export_chrome_trace(str(file))

    def range(self, name: str) -> AbstractContextManager[Any]:
        return self._record(name)


def profiler(on_gpu: bool) -> Profiler:
    return _Profiler(on_gpu)
