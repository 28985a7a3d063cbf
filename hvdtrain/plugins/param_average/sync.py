"""One sync of parameters: sending them, the step of an outer optimizer, and applying the result.

Between two syncs, every rank trains alone. The model after the last sync (the anchor) minus the average of the ranks' models is
the gradient of an outer optimizer; its step leads to the new anchor, from which all ranks continue. With learning rate 1 and no
momentum, the new anchor is the average itself.

For a sync, the model is divided into buckets. One is either averaged immediately, or sent, and its average applied some updates
later. `ParamAverage` decides when.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from hvdtrain.comm.base import Tensor, all_reduce, num_bytes
from hvdtrain.comm.groups import RankGroup
from hvdtrain.learner.averaging import UpdateCounts, apply_weight, changed, copy_tensors
from hvdtrain.learner.compression import GradientCompressor
from hvdtrain.learner.model_state import ModelState
from hvdtrain.learner.reducer import Numbers
from hvdtrain.plugins.param_average.outer import OuterOptimizer

ANCHOR = "anchor"
"""The name of the parameters after the last sync, among the tensors that are the same on all ranks."""


class SyncBucket:
    """A part of the model that is synced as a unit.

    Attributes:
        indices: the numbers of its parameters in the model's order.
        counts: the updates since it was last sent.
        steps: the number of steps of the outer optimizer.
        age: the number of updates since it was sent, until its average is applied; -1: nothing is under way.
        handle: the handle of a message under way; None: the average has arrived, or there is none.
        sent_name, average_name: the names of the sent parameters and of their average among the saved tensors.
    """

    def __init__(self, number: int, counts: UpdateCounts) -> None:
        self.number = number
        self.sent_name = f"sent.{number}"
        self.average_name = f"arrived.{number}"
        self.indices: list[int] = []
        self.counts = counts
        self.steps = 0
        self.age = -1
        self.handle: Any = None

    @property
    def is_under_way(self) -> bool:
        """Whether it was sent and its average has not been applied yet."""
        return self.age >= 0

    def state(self) -> Numbers:
        return {**self.counts.state(), "steps": self.steps, "age": self.age}

    def restore(self, state: Numbers) -> None:
        self.counts.restore(state)
        self.steps = state["steps"]
        self.age = state["age"]


class ParamSync:
    """Averages the model over the ranks, or over groups of them.

    Args:
        outer: computes the new parameters from the average; None: they are the average.
        num_buckets: into how many parts the model is divided.
        deltas: send the changes since the last sync instead of the parameters, which loses less precision in 16 bits.

    Attributes:
        buckets: contiguous, and about equal in bytes.
        num_syncs: the number of syncs so far, counted by bucket.
    """

    def __init__(
        self,
        group: RankGroup,
        compressor: GradientCompressor,
        outer: OuterOptimizer | None,
        num_buckets: int,
        deltas: bool = False,
    ) -> None:
        self._comm = group.between
        self._compressor = compressor
        self.num_syncs = 0
        self._outer = outer
        self._deltas = deltas
        self._moments = () if outer is None else outer.moments
        self.buckets = [SyncBucket(number, UpdateCounts(group)) for number in range(num_buckets)]

    @property
    def needs_anchor(self) -> bool:
        """Whether the parameters after the last sync are kept."""
        return self._outer is not None or self._deltas

    def set_anchor(self, state: ModelState) -> None:
        """Keep the parameters, which are the same on all ranks, as the anchor."""
        _, tensors = _parameters(state)
        state.shared[ANCHOR] = copy_tensors(tensors)
        shapes = [tuple(tensor.shape) for tensor in tensors]
        for name in self._moments:
            if [tuple(moment.shape) for moment in state.shared.get(name, ())] != shapes:  # the first, or another model's
                state.shared[name] = [tensor * 0 for tensor in tensors]
                for bucket in self.buckets:
                    bucket.steps = 0

    def assign_anew(self) -> None:
        """Assign parameters to buckets again when they are needed: a framework may change the model between two epochs."""
        for bucket in self.buckets:
            bucket.indices = []

    def share_frozen(self, state: ModelState) -> None:
        """Collective. Take frozen parameters from rank 0: if they are frozen only since a stop within an epoch, ranks may have
        different values, which no average would make equal."""
        if not (numbers := state.frozen_now()):
            return
        named = list(state.tensors("parameters").items())
        frozen = dict(named[number] for number in numbers)
        state.set_tensors("parameters", changed(frozen, partial(self._comm.broadcast, name="frozen_parameters")))

    def average(self, state: ModelState, buckets: Sequence[SyncBucket]) -> None:
        """Collective. Sync some buckets and wait. If all ranks have the same weight, nothing is copied for sending."""
        if not buckets:
            return
        names, tensors = _parameters(state)
        new: dict[int, Tensor] = {}
        frozen_values = _frozen_values(state, tensors)
        for bucket in buckets:
            parameters = [tensors[index] for index in self._indices(bucket, tensors)]
            handle = self._start(state, bucket, self._message(state, bucket, parameters))
            bucket.counts.reset()
            new |= self._new_parameters(state, bucket, self._compressor.finish(handle), frozen_values)
        state.set_tensors("parameters", {names[index]: tensor for index, tensor in new.items()})

    def send(self, state: ModelState, buckets: Sequence[SyncBucket]) -> None:
        """Collective. Start to send some buckets."""
        _, tensors = _parameters(state)
        for bucket in buckets:
            sent = copy_tensors([tensors[index] for index in self._indices(bucket, tensors)])
            state.own[bucket.sent_name] = sent
            message = self._message(state, bucket, sent)
            if message and message[0] is sent[0]:
                message = copy_tensors(message)  # it may be overwritten
            bucket.handle = self._start(state, bucket, message)
            bucket.age = 0
            bucket.counts.reset()

    def apply_averages(self, state: ModelState, buckets: Sequence[SyncBucket]) -> None:
        """Add to some buckets the change that a sync would have made when they were sent. Updates since then are kept."""
        if not buckets:
            return
        names, tensors = _parameters(state)
        new: dict[int, Tensor] = {}
        frozen_values = _frozen_values(state, tensors)
        for bucket in buckets:
            self.flush(state, bucket)
            self._indices(bucket, tensors)
            targets = self._new_parameters(state, bucket, state.shared.pop(bucket.average_name), frozen_values)
            for (index, target), old in zip(targets.items(), state.own.pop(bucket.sent_name), strict=True):
                # Without updates since then, the target itself: sums would be rounded differently on each rank.
                new[index] = tensors[index] + (target - old) if bucket.counts.updates else target
            bucket.age = -1
        state.set_tensors("parameters", {names[index]: tensor for index, tensor in new.items()})

    def flush(self, state: ModelState, bucket: SyncBucket) -> None:
        """Wait for a bucket that is under way; its average is then among the tensors that are the same on all ranks."""
        if bucket.handle is not None:
            state.shared[bucket.average_name] = self._compressor.finish(bucket.handle)
            bucket.handle = None

    def average_to_save(self, state: ModelState) -> dict[str, Tensor]:
        """Collective. The average of the ranks' current parameters, by name."""
        names, tensors = _parameters(state)
        averages: dict[str, Tensor] = {}
        frozen_values = _frozen_values(state, tensors)
        for bucket in self.buckets:
            # The average includes the updates before it was sent.
            weight = 1.0 if bucket.is_under_way else bucket.counts.weight()
            weighted = apply_weight([tensors[index] for index in self._indices(bucket, tensors)], weight)
            name = f"average.saved.{self._name(bucket).removeprefix('average.')}"
            for index, new in zip(bucket.indices, all_reduce(self._comm, weighted, "average", name=name), strict=True):
                averages[names[index]] = frozen_values.get(index, new)
        return averages

    def drop_unused(self, state: ModelState) -> None:
        """Drop a checkpoint's tensors that belong to other keys, or to messages of a different number of ranks."""
        under_way = [bucket for bucket in self.buckets if bucket.is_under_way]
        used = {name for bucket in under_way for name in (bucket.sent_name, bucket.average_name)}
        used |= {ANCHOR, *self._moments} if self.needs_anchor else set()
        self._compressor.begin(state, used)

    def _message(self, state: ModelState, bucket: SyncBucket, parameters: list[Tensor]) -> list[Tensor]:
        """The tensors to average: a rank's parameters, or their changes since the last sync, times the rank's weight."""
        if self._deltas and ANCHOR in state.shared:
            anchor = state.shared[ANCHOR]
            parameters = [anchor[index] - tensor for index, tensor in zip(bucket.indices, parameters, strict=True)]
        return apply_weight(parameters, bucket.counts.weight())

    def _start(self, state: ModelState, bucket: SyncBucket, message: list[Tensor]) -> Any:
        """Collective. Start to average the tensors from `_message`. Only changes are sent in 16 bits, never parameters."""
        return self._compressor.start(message, "average", name=self._name(bucket), exact=ANCHOR not in state.shared)

    def _new_parameters(
        self, state: ModelState, bucket: SyncBucket, arrived: Sequence[Tensor], frozen_values: Mapping[int, Tensor]
    ) -> dict[int, Tensor]:
        """Step the outer optimizer; return the new parameters of a bucket by number, the same on all ranks."""
        self.num_syncs += 1
        targets = {index: frozen_values.get(index, mean) for index, mean in zip(bucket.indices, arrived, strict=True)}
        if not self.needs_anchor or ANCHOR not in state.shared:  # the key was set in the middle of an epoch
            return targets
        bucket.steps += 1
        anchor = state.shared[ANCHOR]
        for index, mean in targets.items():
            if index in frozen_values:
                continue
            target = anchor[index] - mean if self._deltas else mean
            if self._outer is not None:
                before = [state.shared[name][index] for name in self._moments]
                target, moments = self._outer.step(anchor[index], target, before, bucket.steps)
                for name, moment in zip(self._moments, moments, strict=True):
                    state.shared[name][index] = moment
            anchor[index] = target * 1
            targets[index] = target
        return targets

    def _indices(self, bucket: SyncBucket, tensors: Sequence[Tensor]) -> list[int]:
        """The numbers of a bucket's parameters; assigns them on the first call."""
        if not any(each.indices for each in self.buckets):
            whole = max(1, num_bytes(tensors))
            done = 0
            for index, tensor in enumerate(tensors):
                size = num_bytes([tensor])
                number = int((done + size / 2) * len(self.buckets) / whole)
                self.buckets[min(number, len(self.buckets) - 1)].indices.append(index)
                done += size
        return bucket.indices

    def _name(self, bucket: SyncBucket) -> str:
        return "average.parameters" + (f".{bucket.number}" if len(self.buckets) > 1 else "")


def _parameters(state: ModelState) -> tuple[list[str], list[Tensor]]:
    """Their names and values, which some frameworks fetch: once for a sync."""
    named = state.tensors("parameters")
    return list(named), list(named.values())


def _frozen_values(state: ModelState, tensors: Sequence[Tensor]) -> dict[int, Tensor]:
    """By number, copies of the parameters that are still frozen. All ranks have the same values, but an average of equal numbers
    is rounded, and an outer optimizer may enlarge the difference."""
    numbers = list(state.frozen_now())
    return dict(zip(numbers, copy_tensors([tensors[number] for number in numbers]), strict=True))
