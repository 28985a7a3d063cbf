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

from hvdtrain.comm.base import Communicator
from hvdtrain.comm.groups import RankGroup, single_rank
from hvdtrain.config.keys import ALONE, Rule, Sections, key, not_negative, positive
from hvdtrain.errors import ConfigError, Problem, problem
from hvdtrain.learner.averaging import UpdateCounts, temporarily_average
from hvdtrain.learner.buffers import average_buffers, averaged_statistics
from hvdtrain.learner.compression import CompressionKeys, GradientCompressor, change_compressor
from hvdtrain.learner.keys import LearnerKeys
from hvdtrain.learner.model_state import ModelState, StatePart
from hvdtrain.learner.reducer import EpochStart, FinishedUpdate, GradientExchange, Numbers, Reducer
from hvdtrain.plugins.param_average.groups import make_groups
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
        step, seconds = self.sync_steps, self.sync_seconds
        if reduce_type == "grad" and (step != 1 or seconds is not None):
            name = "horovod_param_sync_step" if seconds is None else "horovod_param_sync_time_diff"
            return f"{name}: no effect with horovod_reduce_type = 'grad' (parameters are averaged with 'param')"
        if step != 1 and seconds is not None:
            return f"horovod_param_sync_step: no effect with horovod_param_sync_time_diff = {seconds:g} seconds"
        return ""

    def problems(self, sections: Sections = ALONE) -> list[Problem]:
        seconds, delay, parts = self.sync_seconds, self.sync_delay, self.sync_parts
        name = partial(sections.spelling, type(self))
        found = super().problems(sections)
        found += make_interval(self.sync_rule, self.sync_steps, seconds, name("sync_rule"), name("sync_seconds"))[1]
        found += make_outer(self.outer_optimizer, size=1, where=name("outer_optimizer"))[1]
        if seconds is None and parts > self.sync_steps:
            found += problem(
                "conflict", f"{name('sync_parts')}: expected at most {name('sync_steps')}, {self.sync_steps}, got {parts}"
            )
        if delay and seconds is not None:
            found += problem(
                "conflict", f"{name('sync_delay')}: expected without {name('sync_seconds')}, for which ranks wait, got both"
            )
        elif delay > self.sync_steps:
            found += problem(
                "conflict", f"{name('sync_delay')}: expected at most {name('sync_steps')}, {self.sync_steps}, got {delay}"
            )
        if self.group is not None and self.local_start:
            found += problem(
                "conflict",
                f"{name('local_start')}: expected 0 with {name('group')}, whose ranks average gradients throughout, got "
                f"{self.local_start}",
            )
        learner = sections.get(LearnerKeys)
        if learner is not None and learner.deterministic and seconds is not None:
            found += problem(
                "conflict",
                "deterministic: expected syncs after a number of steps, got horovod_param_sync_time_diff, which goes by the "
                "clock",
            )
        if learner is not None and learner.ema_decay is not None and (delay or parts > 1):
            found += problem(
                "conflict",
                f"ema_decay: expected {name('sync_delay')} = 0 and {name('sync_parts')} = 1, with which ranks have "
                f"the same weights after a sync, got {delay} and {parts}",
            )
        return found


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
        parts: the number of parts of the model.
        compressor: if it sends 16 bits, it sends the changes since the last sync. None: parameters are sent as they are.
    """

    keys = ParamAverageKeys

    def __init__(
        self,
        group: RankGroup,
        timer: Timer,
        interval: EveryUpdates | int,
        outer: OuterOptimizer | None = None,
        delay: int = 0,
        parts: int = 1,
        compressor: GradientCompressor | None = None,
    ) -> None:
        self._comm = group.whole
        self._group = group
        self._timer = timer
        self._interval = EveryUpdates(interval) if isinstance(interval, int) else interval
        self._outer = outer
        self._delay = delay
        self._compressor = GradientCompressor(group.between) if compressor is None else compressor
        self._sync = ParamSync(group, self._compressor, outer, parts, deltas=self._compressor.needs_changes)
        self._counts = UpdateCounts(single_rank(group.whole))  # since the ranks' buffers were the same
        self._updates_since_send = 0  # updates since the last cycle over the parts ended
        self._next_part = 0  # the part that is sent next
        self._warned = False

    @classmethod
    def from_keys(cls, keys: ParamAverageKeys, comm: Communicator, timer: Timer) -> Reducer:
        group = make_groups(comm, keys.group, "horovod_param_group")
        interval, _ = make_interval(keys.sync_rule, keys.sync_steps, keys.sync_seconds)
        outer, _ = make_outer(keys.outer_optimizer, group.between.size)
        delay, parts = keys.sync_delay, keys.sync_parts
        sync = cls(group, timer, interval, outer, delay, parts, change_compressor(group.between, keys))
        if group.between is comm:
            return Reducer(GradientExchange(comm, timer, steps=0), sync, sync.describe())
        gradients = GradientExchange(group.within, timer, "average", group=group.ranks)
        return Reducer(gradients, sync, sync.describe(), has_groups=True)

    def describe(self) -> str:
        """How and how often parameters are averaged, for the log."""
        text = f"parameters are averaged {self._interval.describe()} and at the end of an epoch{self._compressor.describe()}"
        if len(self._sync.parts) > 1:
            text += f", in {len(self._sync.parts)} parts in turn"
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
        self._sync.drop_unknown(state)
        if start.is_resumed:
            self._sync.share_frozen(state)
        else:
            self._sync.assign_anew()
        if not start.is_resumed or (ANCHOR not in state.shared and not self._counts.updates):
            self.keep_anchor(state)
        self.warn(start)

    def warn(self, start: EpochStart) -> None:
        """Warn, once in a training, if an epoch's only sync is at its end, or if it has too few syncs for the momentum."""
        if not self._warned and (warning := self._warning(start)) is not None:
            self._warned = True
            log.warning(warning)

    def take_over(self, state: ModelState) -> None:
        """Begin with the current model, which is the same on all ranks."""
        self._sync.drop_unknown(state)
        self.keep_anchor(state)

    def keep_anchor(self, state: ModelState) -> None:
        """Keep the current model, which is the same on all ranks, as the anchor."""
        if self._sync.needs_anchor:
            self._sync.set_anchor(state)

    def after_update(self, state: ModelState, update: FinishedUpdate) -> None:
        self._updates_since_send += 1
        for counts in (self._counts, *(part.counts for part in self._sync.parts)):
            counts.add(update)
        under_way = [part for part in self._sync.parts if part.is_under_way]
        for part in under_way:
            part.age += 1
        late = [part for part in under_way if part.age >= self._delay]
        if late:
            with self._timer.span("parameter sync"):
                self._sync.apply_averages(state, late)
        due = self._due_parts(update.learning_rate)
        if due:
            with self._timer.span("parameter sync"):
                (self._sync.send if self._delay else self._sync.average)(state, due)
                if self._syncs_whole_model:
                    self._finish_sync(state)
                elif self._next_part == len(self._sync.parts):
                    self._end_cycle()

    def end_of_epoch(self, state: ModelState) -> None:
        if not self._counts.updates:
            return
        with self._timer.span("parameter sync"):
            self._sync.apply_averages(state, [part for part in self._sync.parts if part.is_under_way])
            self._sync.average(state, [part for part in self._sync.parts if part.counts.updates])
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
        for part in self._sync.parts:
            self._sync.flush(state, part)

    def state(self) -> Numbers:
        parts = [part.state() for part in self._sync.parts]
        return {
            **self._counts.state(),
            **self._interval.state(),
            "since": self._updates_since_send,
            "next": self._next_part,
            "parts": parts,
            **({} if self._group.between is self._comm else {"group": list(self._group.ranks)}),
        }

    def restore(self, state: Numbers, same_ranks: bool = True) -> None:
        stored = state.get("parts", [])
        if not same_ranks:  # every rank starts from the average, which includes the parts that were under way
            for part in self._sync.parts:
                part.steps = max((part_state["steps"] for part_state in stored), default=0)
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
        if len(stored) == len(self._sync.parts):
            for part, part_state in zip(self._sync.parts, stored, strict=True):
                part.restore(part_state)
            self._updates_since_send, self._next_part = state["since"], state["next"]
        else:  # the checkpoint has no parts, or a different number of them
            for part in self._sync.parts:
                part.counts.restore(state)
            self._updates_since_send = self._counts.updates

    @property
    def _syncs_whole_model(self) -> bool:
        """Whether a sync makes the whole model the same on all ranks."""
        return self._delay == 0 and len(self._sync.parts) == 1

    def _due_parts(self, learning_rate: float) -> list[SyncBucket]:
        """The parts to send now: part p after (p + 1) / parts of the interval between two syncs, unless it is still under way."""
        between, parts = self._interval.updates(learning_rate), self._sync.parts
        due = []
        while self._next_part < len(parts) and self._updates_since_send * len(parts) >= between * (self._next_part + 1):
            if parts[self._next_part].is_under_way:
                break
            due.append(parts[self._next_part])
            self._next_part += 1
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
        updates, self._updates_since_send, self._next_part = self._updates_since_send, 0, 0
        self._interval.after_sync(self._comm, updates)

    def _warning(self, start: EpochStart) -> str | None:
        """The problem with the number of updates in an epoch; None: there is none."""
        between = self._interval.updates(start.learning_rate)
        if between > start.updates and self._group.between.size > 1:
            wanted = f"{between}" if between < NEVER else "more"
            return (
                f"horovod_param_sync_step: expected at most {start.updates}, the number of updates in epoch {start.epoch}, got "
                f"{wanted}: the ranks' parameters are only averaged at its end"
            )
        momentum = 0.0 if self._outer is None else self._outer.momentum
        syncs = -(-start.updates // between)
        if momentum and syncs * (1 - momentum) < 1 - 1e-9:
            return (
                f"horovod_param_outer.momentum: expected at least {1 / (1 - momentum):.0f} syncs in an epoch for {momentum:g}, "
                f"got {syncs} in epoch {start.epoch} (a smaller horovod_param_sync_step, or a smaller momentum)"
            )
        return None
