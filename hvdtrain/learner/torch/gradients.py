"""Gradients on their way to the other ranks: added up over batches, and sent while backward runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from hvdtrain.context import Loss
from hvdtrain.learner.marked import nothing_to_minimize
from hvdtrain.learner.reduce import Reducer, buckets
from hvdtrain.learner.torch.tensors import terms_of


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


class LossGradients:
    """Gradients of several losses of which some are to be means, one set for each of these until the last batch.

    A mean is the loss's sum over all batches and ranks divided by its count over all of them, which is known when the last
    batch has been counted. Where there is one loss, gradients of its sum can be divided afterwards; of several, each has another
    count. Costs a backward pass and the parameters' memory for each such loss, and one of both for all others.
    """

    def __init__(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        self._parameters = list(parameters)
        self._sums: dict[str | None, list[torch.Tensor | None]] = {}  # None: of the losses that are no means, together

    def add(self, losses: Mapping[str, Loss], means: Sequence[str], scale: float) -> None:
        """A batch's gradients. Raises: ConfigError, where no loss depends on a parameter.

        Args:
            means: the names of the losses that are to be means.
            scale: what all of them are multiplied by.
        """
        groups: dict[str | None, torch.Tensor] = {}
        for name, term in terms_of(losses, scale).items():
            key = name if name in means else None
            groups[key] = groups[key] + term if key in groups else term
        groups = {key: total for key, total in groups.items() if total.requires_grad}
        if not groups:
            raise nothing_to_minimize()
        for left, (key, total) in zip(reversed(range(len(groups))), groups.items(), strict=True):
            found = torch.autograd.grad(total, self._parameters, retain_graph=left > 0, allow_unused=True)
            before = self._sums.get(key, [None] * len(found))
            self._sums[key] = [_sum(one, other) for one, other in zip(before, found, strict=True)]

    def combine(self, divisors: Mapping[str, torch.Tensor]) -> None:
        """Divide each loss's gradients by its count, and add them to the parameters' own."""
        for key, gradients in self._sums.items():
            for parameter, gradient in zip(self._parameters, gradients, strict=True):
                if gradient is not None:
                    part = gradient if key is None else gradient / divisors[key].to(gradient.dtype)
                    parameter.grad = _sum(parameter.grad, part)
        self._sums = {}


def _sum(one: torch.Tensor | None, other: torch.Tensor | None) -> torch.Tensor | None:
    dense = other.to_dense() if other is not None and other.is_sparse else other
    return dense if one is None else one if dense is None else one + dense
