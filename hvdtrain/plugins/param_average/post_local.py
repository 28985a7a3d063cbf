"""The reducer of the plug-in, which may begin with averaged gradients."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager

from hvdtrain.comm.base import Communicator
from hvdtrain.learner.compression import change_compressor, gradient_compressor
from hvdtrain.learner.grad_reduce import GradReduce, describe_gradients
from hvdtrain.learner.model_state import ModelState, StatePart
from hvdtrain.learner.reducer import EpochStart, EpochSync, FinishedUpdate, GradientExchange, Numbers, Reducer
from hvdtrain.plugins.param_average.average import ParamAverage, ParamAverageKeys
from hvdtrain.plugins.param_average.groups import make_groups
from hvdtrain.plugins.param_average.interval import make_interval
from hvdtrain.plugins.param_average.outer import make_outer
from hvdtrain.runtime.timer import Timer


class PostLocal:
    """Averages gradients at first; then every rank trains alone (post-local SGD: Lin et al., 2020).

    Weights change most at the beginning, so models that are trained alone drift apart most there. At the switch, the optimizers
    have the same state on all ranks. An update belongs to the phase of its first step.

    Args:
        gradients: averages gradients in its first `steps`; switched on and off here.
        shared_phase: the sync of that phase.
        local_phase: the sync of the phase after that.
    """

    def __init__(self, gradients: GradientExchange, shared_phase: EpochSync, local_phase: ParamAverage) -> None:
        self._gradients = gradients
        self._shared_phase = shared_phase
        self._local_phase = local_phase

    @property
    def _phase(self) -> EpochSync:
        return self._shared_phase if self._gradients.is_active else self._local_phase

    @property
    def num_syncs(self) -> int:
        return self._local_phase.num_syncs

    @property
    def sent(self) -> int:
        return self._local_phase.sent

    @property
    def alike(self) -> Sequence[int]:
        return self._local_phase.alike

    def begin_epoch(self, state: ModelState, start: EpochStart) -> None:
        self._gradients.is_active = start.step < (self._gradients.steps or 0)
        self._phase.begin_epoch(state, start)
        self._local_phase.warn(start)

    def after_update(self, state: ModelState, update: FinishedUpdate) -> None:
        self._phase.after_update(state, update)
        if self._gradients.is_active and update.step >= (self._gradients.steps or 0):
            self._shared_phase.end_of_epoch(state)  # buffers become the same, too
            self._local_phase.take_over(state)
            self._gradients.is_active = False

    def end_of_epoch(self, state: ModelState) -> None:
        self._phase.end_of_epoch(state)

    def rank_local_state(self) -> tuple[StatePart, ...]:
        return self._phase.rank_local_state()

    def averaged_model(self, state: ModelState) -> AbstractContextManager[None]:
        return self._phase.averaged_model(state)

    def flush(self, state: ModelState) -> None:
        self._phase.flush(state)

    def state(self) -> Numbers:
        return {**self._phase.state(), "gradients": self._gradients.is_active}

    def restore(self, state: Numbers, same_ranks: bool = True) -> None:
        (self._shared_phase if state.get("gradients") else self._local_phase).restore(state, same_ranks)


class LocalUpdates:
    """What the value 'param' makes: averaged parameters from the beginning, or after some steps with averaged gradients."""

    keys = ParamAverageKeys

    @classmethod
    def from_keys(cls, keys: ParamAverageKeys, comm: Communicator, timer: Timer) -> Reducer:
        group = make_groups(comm, keys.group, "horovod_param_group")
        interval, _ = make_interval(keys.sync_rule, keys.sync_steps, keys.sync_seconds)
        outer, _ = make_outer(keys.outer_optimizer, group.between.size)
        compressor = change_compressor(group.between, keys)
        local = ParamAverage(group, timer, interval, outer, keys.sync_delay, keys.sync_parts, compressor)
        if group.between is not comm:
            gradients = GradientExchange(group.within, timer, "average", group=group.ranks)
            return Reducer(gradients, local, local.describe(), has_groups=True)
        steps = keys.local_start
        if not steps:
            return Reducer(GradientExchange(comm, timer, steps=0), local, local.describe())
        gradients = GradientExchange(comm, timer, "average", gradient_compressor(comm, keys), steps)
        sync = PostLocal(gradients, GradReduce(comm, timer, gradients.compressor), local)
        return Reducer(gradients, sync, f"{describe_gradients(gradients)} of the first {steps} steps; then {local.describe()}")
