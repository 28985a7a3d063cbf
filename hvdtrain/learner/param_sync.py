"""One sync of parameters: what is sent, what is made of the average, and when it is applied.

The model is divided into parts. A part is either averaged at once, or sent, and its average applied some updates later.
`ParamAverage` says when.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hvdtrain.comm.base import Communicator, Tensor, all_reduce, num_bytes
from hvdtrain.learner.base import ModelState
from hvdtrain.learner.outer import OuterOptimizer
from hvdtrain.learner.reducer import Numbers, Traffic, UpdateCounts, copies, weighted

ANCHOR = "anchor"
"""The parameters after the last sync, among the tensors that all ranks share."""


class Part:
    """The part of the model that is synced at once.

    Attributes:
        indices: of its parameters in the model's order.
        counts: the updates since it was last sent.
        steps: steps of the outer optimizer.
        age: updates since it was sent, if its average has not been applied yet; -1: nothing is under way.
        handle: of what is under way; None: it has arrived, or there is nothing.
        sent, arrived: the names of what was sent and of its average among the tensors that are saved.
    """

    def __init__(self, number: int, size: int) -> None:
        self.number = number
        self.sent, self.arrived = f"sent.{number}", f"arrived.{number}"
        self.indices: list[int] = []
        self.counts = UpdateCounts(size)
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
        self.steps, self.age = state["steps"], state["age"]


class ParamSync:
    """Averages parts of the model over the ranks. Its methods take and return all parameters, in the model's order,
    as `ModelState.map_tensors` has them.

    Args:
        outer: what makes the new parameters of the average; None: they are the average.
        num_parts: the number of parts of the model.
        deltas: send the changes since the last sync instead of the parameters, which loses less if they are sent in 16 bits.

    Attributes:
        parts: contiguous, and about equal in bytes.
    """

    def __init__(
        self, comm: Communicator, traffic: Traffic, outer: OuterOptimizer | None, num_parts: int, deltas: bool = False
    ) -> None:
        self._comm = comm
        self._traffic = traffic
        self._outer = outer
        self._deltas = deltas
        self._moments = () if outer is None else outer.moments
        self.parts = [Part(number, comm.size) for number in range(num_parts)]

    @property
    def needs_anchor(self) -> bool:
        """Whether the parameters after the last sync are kept."""
        return self._outer is not None or self._deltas

    def anchored(self, state: ModelState, tensors: list[Tensor]) -> list[Tensor]:
        """Keep the parameters, which are the same on all ranks. Changes nothing."""
        state.shared[ANCHOR] = copies(tensors)
        for name in self._moments:
            if name not in state.shared:
                state.shared[name] = [tensor * 0 for tensor in tensors]
        return tensors

    def averaged(self, state: ModelState, tensors: list[Tensor], parts: Sequence[Part]) -> list[Tensor]:
        """Collective. Sync some parts at once. What is sent is not copied, if all ranks have the same weight."""
        changed = list(tensors)
        for part in parts:
            own = [tensors[index] for index in self._indices(part, tensors)]
            handle = self._start(state, part, self._message(state, part, own))
            part.counts.reset()
            new = self._targets(state, part, self._traffic.finish(handle))
            for index, target in zip(part.indices, new, strict=True):
                changed[index] = target
        return changed

    def sent(self, state: ModelState, tensors: list[Tensor], parts: Sequence[Part]) -> list[Tensor]:
        """Collective. Send some parts. Changes nothing yet."""
        for part in parts:
            own = copies([tensors[index] for index in self._indices(part, tensors)])
            state.own[part.sent] = own
            message = self._message(state, part, own)
            if message and message[0] is own[0]:
                message = copies(message)  # it may be overwritten
            part.handle = self._start(state, part, message)
            part.age = 0
            part.counts.reset()
        return tensors

    def applied(self, state: ModelState, tensors: list[Tensor], parts: Sequence[Part]) -> list[Tensor]:
        """Add to some parts what a sync would have changed when they were sent. What was learned since then is kept."""
        changed = list(tensors)
        for part in parts:
            self.settle(state, part)
            indices = self._indices(part, tensors)
            new, before = self._targets(state, part, state.shared.pop(part.arrived)), state.own.pop(part.sent)
            for index, target, old in zip(indices, new, before, strict=True):
                # Without updates since then, the target itself: sums would be rounded differently on each rank.
                changed[index] = tensors[index] + (target - old) if part.counts.updates else target
            part.age = -1
        return changed

    def settle(self, state: ModelState, part: Part) -> None:
        """Wait for a part that is under way; its average is then among the tensors that all ranks share."""
        if part.handle is not None:
            state.shared[part.arrived] = self._traffic.finish(part.handle)
            part.handle = None

    def average_to_save(self, tensors: list[Tensor]) -> list[Tensor]:
        """Collective. The average of the ranks' parameters as they are now."""
        changed = list(tensors)
        for part in self.parts:
            weight = 1.0 if part.is_under_way else part.counts.weight()  # what was learned before it was sent counts, too
            own = weighted([tensors[index] for index in self._indices(part, tensors)], weight)
            name = f"average.saved.{self._name(part).removeprefix('average.')}"
            for index, new in zip(part.indices, all_reduce(self._comm, own, "average", name=name), strict=True):
                changed[index] = new
        return changed

    def drop_unknown(self, state: ModelState) -> None:
        """Forget tensors in a checkpoint that belong to other keys, or to what another number of ranks had under way."""
        under_way = [part for part in self.parts if part.is_under_way]
        known = {name for part in under_way for name in (part.sent, part.arrived)}
        known |= {ANCHOR, *self._moments} if self.needs_anchor else set()
        for tensors in (state.shared, state.own):
            for name in tensors.keys() - known:
                del tensors[name]

    def _message(self, state: ModelState, part: Part, own: list[Tensor]) -> list[Tensor]:
        """What is averaged: a rank's parameters, or their change since the last sync; times the rank's weight."""
        if self._deltas and ANCHOR in state.shared:
            anchor = state.shared[ANCHOR]
            own = [anchor[index] - tensor for index, tensor in zip(part.indices, own, strict=True)]
        return weighted(own, part.counts.weight())

    def _start(self, state: ModelState, part: Part, message: list[Tensor]) -> Any:
        """Collective. Start to average what `_message` made. Parameters themselves are never sent in 16 bits."""
        return self._traffic.start(message, "average", name=self._name(part), exact=ANCHOR not in state.shared)

    def _targets(self, state: ModelState, part: Part, arrived: list[Tensor]) -> list[Tensor]:
        """The new parameters of a part, the same on all ranks."""
        self._traffic.syncs += 1
        if not self.needs_anchor or ANCHOR not in state.shared:  # the key is new, in the midst of an epoch
            return arrived
        part.steps += 1
        anchor = state.shared[ANCHOR]
        targets = []
        for index, mean in zip(part.indices, arrived, strict=True):
            target = anchor[index] - mean if self._deltas else mean
            if self._outer is not None:
                before = [state.shared[name][index] for name in self._moments]
                target, moments = self._outer.step(anchor[index], target, before, part.steps)
                for name, moment in zip(self._moments, moments, strict=True):
                    state.shared[name][index] = moment
            anchor[index] = target * 1
            targets.append(target)
        return targets

    def _indices(self, part: Part, tensors: Sequence[Tensor]) -> list[int]:
        """The numbers of a part's parameters."""
        if not any(one.indices for one in self.parts):
            whole, done = max(1, num_bytes(tensors)), 0
            for index, tensor in enumerate(tensors):
                size = num_bytes([tensor])
                number = int((done + size / 2) * len(self.parts) / whole)
                self.parts[min(number, len(self.parts) - 1)].indices.append(index)
                done += size
        return part.indices

    def _name(self, part: Part) -> str:
        return "average.parameters" + (f".{part.number}" if len(self.parts) > 1 else "")
