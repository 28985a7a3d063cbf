"""Sending gradients to the reducer while backward still computes the others."""

from __future__ import annotations

from typing import Any

import torch

from hvdtrain.learner.buckets import buckets
from hvdtrain.reduce import Reducer


class GradientStream:
    """Hands gradients over in buckets, each as soon as backward has all of its gradients.

    Buckets go in the order in which backward usually meets the parameters (last layer first), and bucket n only after
    bucket n - 1, so that all ranks send the same in the same order. A parameter without a gradient contributes zeros.

    Args:
        parameters: the trainable ones, in the model's order. A hook is registered on each; nothing else is changed.
    """

    def __init__(self, parameters: list[torch.nn.Parameter], reducer: Reducer) -> None:
        self._reducer = reducer
        self._buckets = _buckets(parameters)
        self._bucket_of = {id(parameter): i for i, bucket in enumerate(self._buckets) for parameter in bucket}
        self._missing: list[int] = []
        self._handles: list[Any] = []
        self._open = False
        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(self._arrived)  # type: ignore[no-untyped-call]

    def begin(self) -> None:
        """Be ready for the gradients of a backward that is about to start."""
        self._missing = [len(bucket) for bucket in self._buckets]
        self._handles = []
        self._open = True

    def finish(self) -> None:
        """Collective. Send what has not been sent, wait for all, and leave the reduced gradients in the parameters."""
        self._open = False
        while len(self._handles) < len(self._buckets):
            self._send()
        for bucket, handle in zip(self._buckets, self._handles, strict=True):
            for parameter, reduced in zip(bucket, self._reducer.finish_gradients(handle), strict=True):
                if reduced is not parameter.grad:
                    parameter.grad = reduced

    def _arrived(self, parameter: torch.Tensor) -> None:
        """Hook: backward has just added this parameter's gradient."""
        if self._open:
            self._missing[self._bucket_of[id(parameter)]] -= 1
            while len(self._handles) < len(self._buckets) and self._missing[len(self._handles)] == 0:
                self._send()

    def _send(self) -> None:
        number = len(self._handles)
        gradients = []
        for parameter in self._buckets[number]:
            gradient = parameter.grad
            if gradient is None:
                gradient = torch.zeros_like(parameter, memory_format=torch.contiguous_format)
            elif gradient.is_sparse:
                gradient = gradient.to_dense()
            gradients.append(gradient.contiguous())
        self._handles.append(self._reducer.start_gradients(gradients, name=f"gradients.{number}"))


def _buckets(parameters: list[torch.nn.Parameter]) -> list[list[torch.nn.Parameter]]:
    kinds = [(parameter.numel() * parameter.element_size(), parameter.dtype) for parameter in parameters]
    return [[parameters[number] for number in group] for group in buckets(kinds)]
