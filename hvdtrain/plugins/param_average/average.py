"""Local updates: every rank trains alone, and the ranks' parameters are averaged from time to time.

This file and `interval.py` decide when to sync; `sync.py` does a sync and computes the new model.
docs/communication.md describes all of it for users.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal

from hvdtrain.comm.groups import RankGroup, single_rank
from hvdtrain.config.keys import ALONE, Rule, Sections, key, not_negative, positive
from hvdtrain.errors import ConfigError, Problem, problem
from hvdtrain.learner.averaging import UpdateCounts, temporarily_average
from hvdtrain.learner.buffers import average_buffers, averaged_statistics
from hvdtrain.learner.compression import CompressionKeys, GradientCompressor
from hvdtrain.learner.keys import LearnerKeys
from hvdtrain.learner.model_state import ModelState, StatePart
from hvdtrain.learner.reducer import EpochStart, FinishedUpdate, Numbers
from hvdtrain.plugins.param_average.interval import NEVER, EveryUpdates, SyncRuleKeys, make_interval
from hvdtrain.plugins.param_average.outer import OuterKeys, OuterOptimizer, make_outer
from hvdtrain.plugins.param_average.sync import ANCHOR, ParamSync, SyncBucket
from hvdtrain.runtime import log
from hvdtrain.runtime.timer import Timer


@dataclass(frozen=True, kw_only=True)
class ParamAverageKeys(CompressionKeys):
    """Averaging parameters."""

    sync_steps: int = key(
        1,
        "param: average the parameters after every N updates of an epoch, and at its end; 100 is a good value",
        positive,
        names=("horovod_param_sync_step", "torch_distributed.param_sync_step"),
    )
    sync_seconds: float | None = key(
        None,
        "param: average the parameters about every N seconds instead of every horovod_param_sync_step updates",
        positive,
        names=("horovod_param_sync_time_diff", "torch_distributed.param_sync_time_diff"),
    )
    sync_rule: dict[str, Any] | str | None = key(
        None,
        "param: how the number of updates between two syncs changes: {'class': 'quadratic', 'alpha': A} lets it grow as the "
        "learning rate falls; None: it does not",
        names=("horovod_param_sync_rule", "torch_distributed.param_sync_rule"),
    )
    sync_delay: int = key(
        0,
        "param: send the parameters while the next N updates run, and apply their average after these; 0: training waits for it",
        not_negative,
        names=("horovod_param_sync_delay", "torch_distributed.param_sync_delay"),
    )
    sync_parts: int = key(
        1,
        "param: sync N parts of the model in turn, each after every horovod_param_sync_step updates",
        positive,
        names=("horovod_param_sync_parts", "torch_distributed.param_sync_parts"),
    )
    outer_optimizer: dict[str, Any] | str | None = key(
        None,
        "param: the optimizer to which a sync's change of the average is a gradient: {'class': 'bmuf', 'nesterov', 'sgd' or "
        "'adam', 'learning_rate': ..., 'momentum': ...}; None: the average is the new model",
        names=("horovod_param_outer", "torch_distributed.param_outer"),
    )
    group: int | Literal["host"] | None = key(
        None,
        "param: N ranks, or the ranks of each host ('host'), average gradients in every update and are one model; parameters are "
        "averaged between these groups; None: each rank updates alone",
        Rule("a positive number of ranks or 'host'", lambda value: value == "host" or (isinstance(value, int) and value > 0)),
        names=("horovod_param_group", "torch_distributed.param_group"),
    )
    local_start: int = key(
        0,
        "param: average gradients in every update of the first N steps of the training; ranks update alone after these",
        not_negative,
        names=("horovod_param_start", "torch_distributed.param_start"),
    )

    dicts: ClassVar[Mapping[str, type]] = {"horovod_param_outer": OuterKeys, "horovod_param_sync_rule": SyncRuleKeys}
    only: ClassVar[tuple[str, ...]] = ("outer_optimizer", "sync_rule", "sync_delay", "sync_parts", "local_start", "group")

    @property
    def updates_alone(self) -> bool:
        return self.group is None and not self.local_start

    @property
    def starts_with_gradients(self) -> bool:
        return self.local_start > 0

    @property
    def needs_groups(self) -> bool:
        return self.group is not None

    @property
    def sends_vary(self) -> bool:
        return self.sync_parts > 1 or self.local_start > 0

    def ignored_key_line(self, reduce_type: str) -> str:
        seconds = self.sync_seconds
        if reduce_type == "grad" and (self.sync_steps != 1 or seconds is not None):
            name = "horovod_param_sync_step" if seconds is None else "horovod_param_sync_time_diff"
            return f"{name}: no effect with horovod_reduce_type = 'grad' (parameters are averaged with 'param')"
        if self.sync_steps != 1 and seconds is not None:
            return f"horovod_param_sync_step: no effect with horovod_param_sync_time_diff = {seconds:g} seconds"
        return ""

    def problems(self, sections: Sections = ALONE) -> list[Problem]:
        seconds = self.sync_seconds
        delay = self.sync_delay
        parts = self.sync_parts
        name = partial(sections.spelling, type(self))
        problems = super().problems(sections)
        problems += make_interval(self.sync_rule, self.sync_steps, seconds, name("sync_rule"), name("sync_seconds"))[1]
        problems += make_outer(self.outer_optimizer, size=1, where=name("outer_optimizer"))[1]
        if seconds is None and parts > self.sync_steps:
            problems += problem(
                "conflict", f"{name('sync_parts')}: expected at most {name('sync_steps')}, {self.sync_steps}, got {parts}"
            )
        if delay and seconds is not None:
            problems += problem(
                "conflict", f"{name('sync_delay')}: expected without {name('sync_seconds')}, for which ranks wait, got both"
            )
        elif delay > self.sync_steps:
            problems += problem(
                "conflict", f"{name('sync_delay')}: expected at most {name('sync_steps')}, {self.sync_steps}, got {delay}"
            )
        if self.group is not None and self.local_start:
            problems += problem(
                "conflict",
                f"{name('local_start')}: expected 0 with {name('group')}, whose ranks average gradients throughout, got "
                f"{self.local_start}",
            )
        learner = sections.get(LearnerKeys)
        if learner is not None and learner.deterministic and seconds is not None:
            problems += problem(
                "conflict",
                "deterministic: expected syncs after a number of steps, got horovod_param_sync_time_diff, which goes by the "
                "clock",
            )
        if learner is not None and learner.ema_decay is not None and (delay or parts > 1):
            problems += problem(
                "conflict",
                f"ema_decay: expected {name('sync_delay')} = 0 and {name('sync_parts')} = 1, with which ranks have "
                f"the same weights after a sync, got {delay} and {parts}",
            )
        return problems


class ParamAverage:
    """Every rank updates alone; after N updates, and at the end of an epoch, parameters and floating-point buffers are averaged.

    A rank's weight in the average is the number of updates since the last one for which it had a batch. With plain SGD and an
    average after every update, this equals averaging gradients. (Local SGD: Stich, 2019.)

    A group of ranks, which average gradients, takes the place of a rank: its ranks are one model, and its weight is the number of
    their batches. Buffers differ within a group as well, and are averaged over all ranks. (PyTorch's HierarchicalModelAverager.)

    With a delay, training does not wait: a sync adds to each rank's parameters the change that it would have made to the
    parameters that were sent, so updates made since then are kept (Shen et al., 2019). It does so after a fixed number of
    updates, no matter when the average arrives. Parts of the model are sent in turn, at equal distances (both as in streaming
    DiLoCo: Douillard et al., 2025). Buffers are then averaged only at the end of the epoch, since training does not read them.

    Args:
        group: the ranks that are one model.
        interval: the number of updates between two syncs.
        outer: computes the new model from the average; None: the average is the new model.
        delay: the number of updates until an average is applied; 0: training waits for it.
        num_buckets: the number of parts of the model.
        compressor: if it sends 16 bits, it sends the changes since the last sync.
    """

    def __init__(
        self,
        group: RankGroup,
        timer: Timer,
        interval: EveryUpdates,
        outer: OuterOptimizer | None,
        delay: int,
        num_buckets: int,
        compressor: GradientCompressor,
    ) -> None:
        self._comm = group.whole
        self._group = group
        self._timer = timer
        self._interval = interval
        self._outer = outer
        self._delay = delay
        self._compressor = compressor
        self._sync = ParamSync(group, compressor, outer, num_buckets, deltas=compressor.needs_changes)
        self._counts = UpdateCounts(single_rank(group.whole))  # since the ranks' buffers were the same
        self._updates_since_send = 0  # updates since the last cycle over the buckets ended
        self._next_bucket = 0  # the one that is sent next
        self._warned = False

    def describe(self) -> str:
        """How and how often parameters are averaged, for the log."""
        text = f"parameters are averaged {self._interval.describe()} and at the end of an epoch{self._compressor.describe()}"
        if len(self._sync.buckets) > 1:
            text += f", in {len(self._sync.buckets)} parts in turn"
        if self._delay:
            text += f", applied {self._delay} updates after they were sent"
        if self._group.between is not self._comm:
            count = self._group.between.size
            groups = "all ranks, which are one group" if count == 1 else f"{count} groups of ranks"
            text = f"gradients are averaged for every update within {groups}; between groups, {text}"
        return text if self._outer is None else f"{text}; outer optimizer: {self._outer.describe()}"

    @property
    def num_syncs(self) -> int:
        return self._sync.num_syncs

    @property
    def sent(self) -> int:
        return self._compressor.sent

    @property
    def alike(self) -> Sequence[int]:
        return self._group.ranks

    def begin_epoch(self, state: ModelState, start: EpochStart) -> None:
        self._sync.drop_unused(state)
        if start.is_resumed:
            self._sync.share_frozen(state)
        else:
            self._sync.assign_anew()
        if not start.is_resumed or (ANCHOR not in state.shared and not self._counts.updates):
            self.keep_anchor(state)
        self.warn(start)

    def warn(self, start: EpochStart) -> None:
        """Warn, once in a training, if an epoch's only sync is at its end, or if it has too few syncs for the momentum."""
        between = self._interval.updates(start.learning_rate)
        momentum = 0.0 if self._outer is None else self._outer.momentum
        syncs = -(-start.updates // between)
        if self._warned:
            return
        if between > start.updates and self._group.between.size > 1:
            log.warning(
                f"horovod_param_sync_step: expected at most {start.updates}, the number of updates in epoch {start.epoch}, got "
                f"{between if between < NEVER else 'more'}: the ranks' parameters are only averaged at its end"
            )
            self._warned = True
        elif momentum and syncs * (1 - momentum) < 1 - 1e-9:
            log.warning(
                f"horovod_param_outer.momentum: expected at least {1 / (1 - momentum):.0f} syncs in an epoch for {momentum:g}, "
                f"got {syncs} in epoch {start.epoch} (a smaller horovod_param_sync_step, or a smaller momentum)"
            )
            self._warned = True

    def take_over(self, state: ModelState) -> None:
        """Begin with the current model."""
        self._sync.drop_unused(state)
        self.keep_anchor(state)

    def keep_anchor(self, state: ModelState) -> None:
        """Keep the current model, which is the same on all ranks, as the anchor."""
        if self._sync.needs_anchor:
            self._sync.set_anchor(state)

    def after_update(self, state: ModelState, update: FinishedUpdate) -> None:
        self._updates_since_send += 1
        for counts in (self._counts, *(bucket.counts for bucket in self._sync.buckets)):
            counts.add(update)
        under_way = [bucket for bucket in self._sync.buckets if bucket.is_under_way]
        for bucket in under_way:
            bucket.age += 1
        late = [bucket for bucket in under_way if bucket.age >= self._delay]
        if late:
            with self._timer.span("parameter sync"):
                self._sync.apply_averages(state, late)
        due = self._due_buckets(update.learning_rate)
        if due:
            with self._timer.span("parameter sync"):
                (self._sync.send if self._delay else self._sync.average)(state, due)
                if not self._delay and len(self._sync.buckets) == 1:  # the whole model is the same on all ranks
                    self._finish_sync(state)
                elif self._next_bucket == len(self._sync.buckets):
                    self._end_cycle()

    def end_of_epoch(self, state: ModelState) -> None:
        if not self._counts.updates:
            return
        with self._timer.span("parameter sync"):
            self._sync.apply_averages(state, [bucket for bucket in self._sync.buckets if bucket.is_under_way])
            self._sync.average(state, [bucket for bucket in self._sync.buckets if bucket.counts.updates])
            self._finish_sync(state)

    def rank_local_state(self) -> tuple[StatePart, ...]:
        always: tuple[StatePart, ...] = ("optimizer",)  # its state is never averaged
        return ("parameters", "statistics", "counters", *always) if self._counts.updates else always

    def averaged_model(self, state: ModelState) -> AbstractContextManager[None]:
        """See `EpochSync`. Between two syncs this is the plain average: the outer optimizer steps only at a sync."""
        if not self._counts.updates:
            return nullcontext()
        statistics = partial(averaged_statistics, self._comm, state, self._counts)
        return temporarily_average(state, {"parameters": partial(self._sync.average_to_save, state), "statistics": statistics})

    def flush(self, state: ModelState) -> None:
        for bucket in self._sync.buckets:
            self._sync.flush(state, bucket)

    def state(self) -> Numbers:
        buckets = [bucket.state() for bucket in self._sync.buckets]
        return {
            **self._counts.state(),
            **self._interval.state(),
            "since": self._updates_since_send,
            "next": self._next_bucket,
            "parts": buckets,
            **({} if self._group.between is self._comm else {"group": list(self._group.ranks)}),
        }

    def restore(self, state: Numbers, same_ranks: bool = True) -> None:
        stored = state.get("parts", [])
        if not same_ranks:  # every rank starts from the average, which includes the parts that were under way
            for bucket in self._sync.buckets:
                bucket.steps = max((bucket_state["steps"] for bucket_state in stored), default=0)
            self._compressor.forget()
            return
        group = list(self._group.ranks)
        if state["rounds"] and (begun := state.get("group", group)) != group:  # its counts are those of a group
            raise ConfigError.of(
                "conflict",
                f"horovod_param_group: expected {len(begun)} ranks in a group, as when the epoch began, got {len(group)} (change "
                "it between two epochs)",
            )
        self._counts.restore(state)
        self._interval.restore(state)
        if len(stored) == len(self._sync.buckets):
            for bucket, bucket_state in zip(self._sync.buckets, stored, strict=True):
                bucket.restore(bucket_state)
            self._updates_since_send = state["since"]
            self._next_bucket = state["next"]
        else:  # the checkpoint has no parts, or a different number of them
            for bucket in self._sync.buckets:
                bucket.counts.restore(state)
            self._updates_since_send = self._counts.updates

    def _due_buckets(self, learning_rate: float) -> list[SyncBucket]:
        """Those to send now: bucket b after (b + 1) / buckets of the interval between two syncs, unless it is still under way."""
        between = self._interval.updates(learning_rate)
        buckets = self._sync.buckets
        due = []
        while self._next_bucket < len(buckets) and self._updates_since_send * len(buckets) >= between * (self._next_bucket + 1):
            if buckets[self._next_bucket].is_under_way:
                break
            due.append(buckets[self._next_bucket])
            self._next_bucket += 1
        return due

    def _finish_sync(self, state: ModelState) -> None:
        """Collective. Finish a sync, once all parameters are the same on all ranks."""
        updates = self._counts.updates
        average_buffers(self._comm, state, self._counts)
        self._counts.reset()
        state.average_weights(updates)
        if self._sync.needs_anchor and ANCHOR not in state.shared:
            self.keep_anchor(state)
        self._end_cycle()

    def _end_cycle(self) -> None:
        self._interval.after_sync(self._comm, self._updates_since_send)
        self._updates_since_send = 0
        self._next_bucket = 0
