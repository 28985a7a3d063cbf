"""Sends gradients to the other ranks during the backward of an update's last batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge

from hvdtrain.errors import ConfigError
from hvdtrain.learner.buckets import buckets
from hvdtrain.learner.reducer import GradientExchange


class GradientStream:
    """Sends gradients to the other ranks in buckets, each as soon as backward has computed all of its gradients.

    What is in a bucket follows from the model. Buckets are sent in one order on all ranks: that in which backward completed them
    on the first rank that had a batch, in one of the first updates. The bucket with the first parameters is always the last one,
    as the flags travel with it, which say what parameters have a gradient: so the order changes no bit of a sum, and a training
    that resumes may find another one.

    A parameter without a gradient contributes zeros; one without a gradient on any rank has none afterwards, so that an optimizer
    skips it, as on a single rank. One that the graph of this backward does not reach holds back no bucket.

    Where a layer is used several times under reentrant checkpointing (torch.utils.checkpoint), backward adds to a gradient once
    for each use. So the first update's gradients are sent after backward, and all later ones, too, if one of them came in parts.
    What a graph reaches is not known either where such a layer has a separate graph.

    Args:
        trained: the parameters by name, in the model's order. If there are several ranks, each gets a hook.
        bucket_bytes, owners: as in `Gradients`.
    """

    def __init__(
        self,
        trained: Mapping[str, torch.nn.Parameter],
        exchange: GradientExchange,
        bucket_bytes: int,
        owners: Sequence[int] | None,
    ) -> None:
        self._exchange = exchange
        self._names = {id(parameter): name for name, parameter in trained.items()}
        self._parameters = parameters = list(trained.values())
        kinds = [(parameter.numel() * parameter.element_size(), parameter.dtype) for parameter in parameters]
        groups = buckets(kinds, bucket_bytes)
        self._buckets = [[parameters[number] for number in group] for group in groups]
        self._owners = [None if owners is None else [owners[number] for number in group] for group in groups]
        self._bucket_of = {id(parameter): i for i, bucket in enumerate(self._buckets) for parameter in bucket}
        self._order = list(range(len(groups)))
        self._is_agreed = False  # whether this is the order of a first backward, or there was none to agree on
        self._tries = 0  # to agree
        self._seen: set[int] = set()  # ids of the parameters that have had a gradient
        self._nodes: list[dict[int, Any]] = []  # by bucket: by a parameter's id, the node of graphs that adds to its gradient
        self._missing: list[dict[int, Any]] = []  # those of the gradients that backward has not computed yet
        self._arrived: list[int] = []  # for each gradient that it has computed, the bucket
        self._comes_in_parts: bool | None = None  # whether a gradient has; None: there was no backward yet
        self._graph: int | None = None  # of the first gradient
        self._has_inner_graphs = False  # whether gradients have come from several graphs in one backward
        self._handles: dict[int, Any] = {}  # by bucket, in the order in which they were sent
        self._has_grad: list[bool] = []  # whether this rank has a gradient of each parameter, in the order of the buckets
        self._flags_handle: Any = None  # their reduction, if they are a separate message
        self._counts: Any = None  # those that the last bucket takes along
        self._is_open = False
        if exchange.is_shared and len(groups) > 1:  # else all gradients leave after backward, whose last one completes them
            self._nodes = [{id(parameter): get_gradient_edge(parameter).node for parameter in bucket} for bucket in self._buckets]
            for parameter in parameters:
                parameter.register_post_accumulate_grad_hook(self._on_gradient)  # type: ignore[no-untyped-call]

    @property
    def takes_counts(self) -> bool:
        """Whether the last bucket can take numbers of elements along: its message is in float32, and for all ranks."""
        if not self._exchange.is_sent or self._exchange.compressor.narrow is not None or not self._buckets:
            return False
        return self._buckets[-1][0].dtype == torch.float32 and self._owners[-1] is None

    def begin(self, counts: Any) -> None:
        """Start to send gradients, with the next backward.

        Args:
            counts: a float64 tensor, or on a CPU numbers, to reduce as well; None: nothing else.
        """
        self._counts = counts
        self._missing = list(map(dict, self._nodes))
        self._arrived = []
        self._graph = None
        self._handles = {}
        self._is_open = self._exchange.is_sent

    def finish(self) -> Any:
        """Collective. Send the remaining buckets, wait for all, and put the reduced gradients into the parameters. Returns the
        reduced counts, if there were any.
        """
        self._is_open = False
        if not self._exchange.is_sent:
            for parameter in self._parameters:
                gradient = parameter.grad
                if gradient is not None and (gradient.is_sparse or not gradient.is_contiguous()):
                    parameter.grad = _dense(gradient)
            return None
        if self._arrived:
            self._comes_in_parts = self._comes_in_parts or False
        if not self._is_agreed:
            self._agree()
        while len(self._handles) < len(self._buckets):
            self._send_next()
        flags: list[torch.Tensor] = [] if self._flags_handle is None else self._exchange.finish(self._flags_handle)
        for number, handle in self._handles.items():
            bucket = self._buckets[number]
            tensors = self._exchange.finish(handle)
            flags += tensors[len(bucket) :]
            for parameter, reduced in zip(bucket, tensors[: len(bucket)], strict=True):
                if reduced is not parameter.grad:
                    parameter.grad = reduced
        # Otherwise no gradient has to be dropped, and reading the flags would only wait for the device.
        if not all(self._has_grad):
            parameters = (parameter for bucket in self._buckets for parameter in bucket)
            for parameter, has in zip(parameters, flags[0][: len(self._has_grad)].tolist(), strict=True):
                if not has:
                    parameter.grad = None
        if isinstance(self._counts, list):
            return _joined_numbers(flags[0].tolist()[len(self._has_grad) :])
        return None if self._counts is None else _joined(flags[1])

    def _agree(self) -> None:
        """Collective. Take over the order of the first rank with a backward: a bucket's place is that of its last gradient."""
        if self._exchange.compressor.joins_buckets or len(self._order) < 2:
            self._is_agreed = True
            return
        arrived = self._exchange.agree(self._arrived or None, [])
        self._tries += 1
        self._is_agreed = bool(arrived) or self._tries == TRIES  # none is seen where batches may be split
        *first_buckets, last = self._order
        used = [number for number in reversed(dict.fromkeys(reversed(arrived))) if number != last]
        self._order = [*used, *(number for number in first_buckets if number not in used), last]

    def _on_gradient(self, parameter: torch.Tensor) -> None:
        """Hook: backward has just added to this parameter's gradient."""
        if not self._is_open:
            return
        number = self._bucket_of[id(parameter)]
        if number in self._handles:
            raise ConfigError.of("wrong-result", SENT_TOO_EARLY.format(name=self._names[id(parameter)]))
        graph = torch._C._current_graph_task_id()
        self._graph = graph if self._graph is None else self._graph
        self._has_inner_graphs |= graph != self._graph
        self._seen.add(id(parameter))
        if self._missing[number].pop(id(parameter), None) is None:
            self._comes_in_parts = True
            return
        self._arrived.append(number)
        if self._comes_in_parts is False and self._is_agreed:
            while len(self._handles) < len(self._order) and self._is_complete(self._order[len(self._handles)]):
                self._send_next()

    def _is_complete(self, number: int) -> bool:
        """Whether this backward will not add to a gradient of a bucket any more. Called during backward.

        Only a parameter that never had a gradient holds back none where this graph does not reach it: that of another may come
        from the graph of a checkpoint within this one, which begins later.
        """
        missing = self._missing[number]
        if self._has_inner_graphs:
            return not missing
        return not any(number in self._seen or torch._C._will_engine_execute_node(node) for number, node in missing.items())

    def _send_next(self) -> None:
        number = self._order[len(self._handles)]
        gradients = []
        for parameter in self._buckets[number]:
            gradient = parameter.grad
            if gradient is None:
                gradient = torch.zeros_like(parameter, memory_format=torch.contiguous_format)
            gradients.append(_dense(gradient))
        owners = self._owners[number]
        if number == len(self._buckets) - 1:
            # When the last bucket is sent, it is final which parameters have a gradient: one that may still come holds back its
            # bucket, and all later ones. So the flags are part of the last bucket; but if each of its tensors goes to one rank
            # only, they are a separate message, as every rank needs them.
            self._has_grad = [parameter.grad is not None for bucket in self._buckets for parameter in bucket]
            if gradients[0].is_cpu:
                more = _parts_of_numbers(self._counts) if isinstance(self._counts, list) else []
                flags = torch.tensor([*map(float, self._has_grad), *more], dtype=gradients[0].dtype)
            else:
                flags = gradients[0].new_ones(len(self._has_grad))
                for place, has in enumerate(self._has_grad):
                    if not has:
                        flags[place].zero_()  # a kernel; a tensor made from a list would be a copy that waits for the device
            if owners is None:
                gradients.append(flags)
                if isinstance(self._counts, torch.Tensor):
                    gradients.append(_parts(self._counts))
            else:
                self._flags_handle = self._exchange.start([flags], name="gradient_flags")
        self._handles[number] = self._exchange.start(gradients, name=f"gradients.{number}", owners=owners)


def _dense(gradient: torch.Tensor) -> torch.Tensor:
    """The gradient in one block of memory, without a copy if it is."""
    return (gradient.to_dense() if gradient.is_sparse else gradient).contiguous()


TRIES = 3
"""How many updates the ranks wait for one with a backward whose order they can take."""


SENT_TOO_EARLY = (
    "train_step: expected a gradient that backward computes at once, as in the steps before, got more of {name} after it was "
    "sent (a layer that only some steps checkpoint, or use several times, needs torch.utils.checkpoint(use_reentrant=False))"
)


PART = 4096.0
"""Two float32 parts of an integer are exact, and so are their sums over up to 4096 ranks: one counts in this unit."""


def _parts(counts: torch.Tensor) -> torch.Tensor:
    """Numbers of elements as float32; shape (2, counts). Integers up to 2^36 are exact, also when they are added up.

    >>> large, small = torch.tensor([[16777217.0], [4095.0]], dtype=torch.float64)
    >>> _joined(_parts(large) + _parts(small)).item()
    16781312.0
    """
    high = torch.floor(counts / PART)
    return torch.stack([high, counts - PART * high]).float()


def _parts_of_numbers(counts: Sequence[float]) -> list[float]:
    """The same of numbers, one after the other.

    >>> _joined_numbers([a + b for a, b in zip(_parts_of_numbers([16777217.0]), _parts_of_numbers([4095.0]))])
    [16781312.0]
    """
    highs = [float(count // PART) for count in counts]
    return highs + [count - PART * high for count, high in zip(counts, highs, strict=True)]


def _joined_numbers(parts: Sequence[float]) -> list[float]:
    middle = len(parts) // 2
    return [PART * high + low for high, low in zip(parts[:middle], parts[middle:], strict=True)]


def _joined(parts: torch.Tensor) -> torch.Tensor:
    high, low = parts.double().unbind()
    return PART * high + low
