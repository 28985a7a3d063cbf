"""From losses to the gradients that the optimizer applies: accumulated over batches, normalized, and reduced over the ranks.

The learner uses `Gradients`. `GradientStream` (gradient_stream.py) sends gradients to the other ranks while backward runs;
`LossGradients` accumulates the gradients of several normalized losses separately.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from hvdtrain.context import Loss
from hvdtrain.learner.marks import Marks
from hvdtrain.learner.meter import TINY, NormalizedLosses, check_same_normalized, normalized_losses, nothing_to_minimize
from hvdtrain.learner.reducer import GradientExchange
from hvdtrain.learner.torch.gradient_stream import GradientStream
from hvdtrain.learner.torch.tensors import Factor, counts_of, run_backward, terms_of, total_of


class Gradients:
    """Computes the gradients of the steps of an update and reduces them over the ranks.

    A normalized loss is its sum divided by its number of elements, both over all batches and ranks of an update. If it is the
    only loss, the gradients of its sum are divided after the reduction of both, so that no rank waits for the others between
    forward and backward. Otherwise the numbers of elements are reduced before the update's last backward.

    Args:
        trained: the parameters by name, in the model's order.
        bucket_bytes: the size of a message with gradients.
        owners: for each parameter, the only rank that needs its reduced gradient; None: all ranks need all.
    """

    def __init__(
        self,
        trained: Mapping[str, torch.nn.Parameter],
        exchange: GradientExchange,
        device: torch.device,
        bucket_bytes: int,
        owners: Sequence[int] | None = None,
    ) -> None:
        self._parameters = list(trained.values())
        self._exchange = exchange
        self._device = device
        self._stream = GradientStream(trained, exchange, bucket_bytes, owners)
        self._loss_gradients = LossGradients(self._parameters)
        self._normalized: NormalizedLosses | None = None  # known after the first step
        self._checked: Marks | None = None  # the marks last compared with `_normalized`
        self._begins_epoch = True
        self._counts: Counts | None = None  # of the normalized losses, over this rank's batches since the last update
        self._count_handle: Any = None  # the reduction of the count by which reduced gradients are divided

    @property
    def are_exchanged(self) -> bool:
        """Whether a rank without a batch applies the next update as well."""
        return self._exchange.is_active

    def begin_epoch(self) -> None:
        """The losses that are normalized may be others from the next step on, except within an update that has begun."""
        self._begins_epoch = self._counts is None

    def add(self, losses: dict[str, Loss] | None, marks: Marks | None, scale: Factor, completes_update: bool) -> None:
        """Add the gradients of one batch. Collective in the first step of an epoch and in the last of an update.

        Args:
            losses, marks: the losses that train_step marked; None: this rank has no batch.
            scale: the factor on all losses.

        Raises:
            ConfigError: no loss depends on a parameter, or the normalized losses differ from those of the epoch's first step.
        """
        normalized = self._agree(losses, marks)
        if losses is not None:
            self._count(losses, normalized)
        if completes_update:
            self._send(losses, marks, normalized, scale)
        elif losses is not None and marks is not None:
            self._accumulate(losses, marks, normalized, scale)

    def add_piece(self, losses: dict[str, Loss], marks: Marks, scale: Factor) -> None:
        """Add the gradients of one batch, or of a piece of it, and send none; changes nothing if memory does not suffice.

        Collective in the first step of an epoch. The rest is as in `add`.
        """
        normalized = self._agree(losses, marks)
        names = () if normalized.is_only_loss else normalized.names
        sums = self._loss_gradients.compute(losses, marks, names, scale)
        self._count(losses, normalized)
        if names:
            self._loss_gradients.add(sums)
            return
        for parameter, gradient in zip(self._parameters, sums.get(None, ()), strict=True):
            if gradient is None:
                continue
            if parameter.grad is None:
                parameter.grad = gradient
            else:
                parameter.grad += gradient

    def compute(self, losses: dict[str, Loss], marks: Marks, scale: Factor) -> None:
        """Compute the gradients of a batch and drop them: needs the memory of a step."""
        normalized = marks.normalized
        self._loss_gradients.compute(losses, marks, () if normalized.is_only_loss else normalized.names, scale)

    def finish(self) -> None:
        """Collective. Wait for the reduction; the gradients are then in the parameters."""
        counts = self._stream.finish()
        if self._count_handle is not None:
            [counts] = self._exchange.finish(self._count_handle)
            self._count_handle = None
        if counts is None:
            return
        gradients = [gradient for parameter in self._parameters if (gradient := parameter.grad) is not None]
        if gradients:  # else all ranks have left out their batches (skip_broken)
            torch._foreach_div_(gradients, _divisor(counts, gradients))

    def _agree(self, losses: dict[str, Loss] | None, marks: Marks | None) -> NormalizedLosses:
        """Collective in the first step: a rank without a batch learns from the others which losses are normalized."""
        agreed = self._normalized
        if self._begins_epoch or agreed is None:
            here = None if losses is None else normalized_losses(losses, agreed.names if agreed is not None else ())
            first = self._exchange.agree(here, agreed)
            agreed = agreed if agreed is not None and agreed.names == first.names else first
            self._normalized = agreed
            self._begins_epoch = False
            self._checked = None
        if losses is not None and marks is not None and marks is not self._checked:
            check_same_normalized(agreed, marks.normalized, losses)
            self._checked = marks
        return agreed

    def _count(self, losses: dict[str, Loss], normalized: NormalizedLosses) -> None:
        """Add the numbers of elements of a batch."""
        if normalized.names:
            counts = counts_of([losses[name] for name in normalized.names], self._device)
            self._counts = counts if self._counts is None else _added(self._counts, counts)

    def _accumulate(self, losses: dict[str, Loss], marks: Marks, normalized: NormalizedLosses, scale: Factor) -> None:
        """Compute the gradients of a batch that is not the update's last."""
        if normalized.names and not normalized.is_only_loss:
            self._loss_gradients.add(self._loss_gradients.compute(losses, marks, normalized.names, scale))
        else:
            run_backward(total_of(losses, marks.minimized, NO_DIVISORS, scale))

    def _send(self, losses: dict[str, Loss] | None, marks: Marks | None, normalized: NormalizedLosses, scale: Factor) -> None:
        """Collective. Compute the gradients of the update's last batch, and send each as soon as it is complete."""
        counts = self._take_counts(normalized)
        divisors = NO_DIVISORS
        if counts is not None and not (normalized.is_only_loss and self._stream.takes_counts):
            divisors = self._start_counts(normalized, counts)
            counts = None
        self._loss_gradients.combine(divisors)
        self._stream.begin(counts)
        if losses is not None and marks is not None:
            run_backward(total_of(losses, marks.minimized, divisors, scale))

    def _take_counts(self, normalized: NormalizedLosses) -> Counts | None:
        """The numbers of elements of this rank's batches since the last update; None: no loss is normalized."""
        if not normalized.names:
            return None
        counts, self._counts = self._counts, None
        return counts_of([NO_ELEMENTS] * len(normalized.names), self._device) if counts is None else counts

    def _start_counts(self, normalized: NormalizedLosses, counts: Counts) -> Mapping[str, torch.Tensor]:
        """Collective. Reduce the numbers of elements; return them by loss, unless gradients are divided after their reduction."""
        if isinstance(counts, list) and self._exchange.is_sent:
            counts = torch.tensor(counts, dtype=torch.float64)
        handle = self._exchange.start([counts], name="loss_counts")
        if normalized.is_only_loss:
            self._count_handle = handle
            return NO_DIVISORS
        [totals] = self._exchange.finish(handle)
        return dict(zip(normalized.names, _divisors(totals), strict=True))


NO_DIVISORS: Mapping[str, torch.Tensor] = {}

NO_ELEMENTS = Loss(torch.zeros(0), 1.0, False, True, None)

Counts = torch.Tensor | list[float]
"""Numbers of elements: float64 of shape (losses,) on a GPU, and numbers on a CPU."""


def _added(counts: Any, more: Any) -> Counts:
    return list(map(operator.add, counts, more)) if isinstance(counts, list) else counts + more


def _divisors(counts: Counts) -> Sequence[torch.Tensor]:
    """A scalar for each loss, float64."""
    if isinstance(counts, list):
        return [torch.tensor(max(count, TINY), dtype=torch.float64) for count in counts]
    return list(counts.clamp(min=TINY))


def _divisor(counts: Counts, gradients: Sequence[torch.Tensor]) -> Any:
    """That of all gradients, if there is one normalized loss."""
    if isinstance(counts, list):
        return max(counts[0], TINY)
    # float32: the same quotients, but a few GPU kernels instead of one for each gradient
    dtype = torch.float32 if all(gradient.dtype == torch.float32 for gradient in gradients) else torch.float64
    return counts.clamp(min=TINY).to(dtype)[0]


class LossGradients:
    """Accumulated gradients of several losses, some of them normalized: one set for each of these until the update's last batch.

    The divisors of normalized losses differ, and are known only after the last batch. So each normalized loss costs a backward
    pass and memory of the parameters' size, and all other losses together cost the same once.
    """

    def __init__(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        self._parameters = list(parameters)
        self._sums: dict[str | None, list[torch.Tensor | None]] = {}  # None: all losses that are not normalized

    def add(self, sums: Mapping[str | None, list[torch.Tensor | None]]) -> None:
        """Add gradients from `compute`, in place: without memory for the results."""
        for key, gradients in sums.items():
            before = self._sums.setdefault(key, [None] * len(gradients))
            for number, gradient in enumerate(gradients):
                so_far = before[number]
                if so_far is None:
                    before[number] = gradient
                elif gradient is not None:
                    so_far += gradient

    def compute(
        self, losses: Mapping[str, Loss], marks: Marks, names: Sequence[str], scale: Factor
    ) -> dict[str | None, list[torch.Tensor | None]]:
        """The gradients of a batch, dense, by normalized loss; None: of all other losses.

        Args:
            names: the normalized losses.
            scale: the factor on all losses.

        Raises:
            ConfigError: no loss depends on a parameter.
        """
        groups: dict[str | None, torch.Tensor] = {}
        for name, term in terms_of(losses, marks.minimized, scale):
            key = name if name in names else None
            groups[key] = groups[key] + term if key in groups else term
        groups = {key: total for key, total in groups.items() if total.requires_grad}
        if not groups:
            raise nothing_to_minimize()
        computed: dict[str | None, list[torch.Tensor | None]] = {}
        for remaining, (key, total) in zip(reversed(range(len(groups))), groups.items(), strict=True):
            computed[key] = self._backward(total, retain_graph=remaining > 0)
        return computed

    def _backward(self, total: torch.Tensor, retain_graph: bool) -> list[torch.Tensor | None]:
        """The gradients of a scalar, dense. (Reentrant checkpointing does not work with torch.autograd.grad.)"""
        before = [parameter.grad for parameter in self._parameters]
        for parameter in self._parameters:
            parameter.grad = None
        try:
            total.backward(retain_graph=retain_graph)  # type: ignore[no-untyped-call]
            return [_sum(None, parameter.grad) for parameter in self._parameters]
        finally:
            for parameter, gradient in zip(self._parameters, before, strict=True):
                parameter.grad = gradient

    def combine(self, divisors: Mapping[str, torch.Tensor]) -> None:
        """Divide each normalized loss's gradients by its divisor, and add all gradients to those of the parameters."""
        if not self._sums:
            return
        for key, gradients in self._sums.items():
            for parameter, gradient in zip(self._parameters, gradients, strict=True):
                if gradient is not None:
                    term = gradient if key is None else gradient / divisors[key].to(gradient.dtype)
                    parameter.grad = _sum(parameter.grad, term)
        self._sums = {}


def _sum(before: torch.Tensor | None, more: torch.Tensor | None) -> torch.Tensor | None:
    dense = more.to_dense() if more is not None and more.is_sparse else more
    return dense if before is None else before if dense is None else before + dense
