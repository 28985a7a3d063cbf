"""The metrics of torchmetrics in a module: their states, which are put together for the hooks at the end of an epoch."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

import hvdtrain

State = tuple[int, dict[str, Any]]
"""How often a metric was updated, and its states, on the CPU."""


class Untouched(int):
    """A metric's number of updates as it was noted: each update, and a reset, puts a plain number there."""


class Metrics:
    """The metrics of a module and of its parts, by their names there.

    Those that steps update differ between ranks. Between `put_together` and `release`, each rank has the states of all. Others,
    such as a maximum of the epochs' values, are updated by hooks on all ranks alike, and need nothing.
    """

    def __init__(self, module: Any) -> None:
        self._by_name = {name: submodule for name, submodule in module.named_modules() if is_metric(submodule)}
        for metric in self._by_name.values():
            metric.sync_on_compute = metric._to_sync = False  # the states are put together here; `compute` reads the latter
        self._differing: set[str] = set()  # what steps have updated
        self._of_rank: dict[str, State] = {}  # this rank's states of those that have the states of all ranks
        self._before: tuple[dict[str, State], list[str]] | None = None  # as in `state`, when an evaluation began

    def name_of(self, metric: Any) -> str | None:
        return next((name for name, present in self._by_name.items() if present is metric), None)

    def __getitem__(self, name: str) -> Any:
        return self._by_name[name]

    def begin_evaluation(self) -> None:
        self._note_updates(by_steps=True)
        self._before = self.state()

    def end_hooks(self) -> None:
        """After hooks outside of steps: what they have updated is alike on all ranks."""
        self._note_updates(by_steps=False)

    def _note_updates(self, by_steps: bool) -> None:
        for name, metric in self._by_name.items():
            count = metric._update_count
            if not count:
                self._differing.discard(name)
            elif by_steps and not isinstance(count, Untouched):
                self._differing.add(name)
            metric._update_count = Untouched(count)

    def states(self) -> dict[str, State]:
        """After the last step: this rank's states of those that steps have updated."""
        self._note_updates(by_steps=True)
        return {name: state_of(self._by_name[name]) for name in sorted(self._differing)}

    def put_together(self, by_rank: Sequence[Mapping[str, State]]) -> None:
        """Give each metric what `states` returned on all ranks."""
        for name in dict.fromkeys(name for states in by_rank for name in states) if len(by_rank) > 1 else ():
            metric = self._by_name[name]
            self._of_rank[name] = state_of(metric)
            set_state(metric, merged(metric, [states[name] for states in by_rank if name in states]))
            metric._update_count = Untouched(metric._update_count)

    def release(self) -> None:
        """After the hooks at the end: metrics that they did not change have this rank's state again."""
        for name, state in self._of_rank.items():
            metric = self._by_name[name]
            if isinstance(metric._update_count, Untouched):
                set_state(metric, state)
            elif hvdtrain.rank():  # a hook has changed it: rank 0 goes on with what it has become
                metric.reset()
        self._of_rank = {}
        self._before = None
        self.end_hooks()

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """After the `with` block, metrics are as before."""
        before = {name: (metric._update_count, state_of(metric)) for name, metric in self._by_name.items()}
        yield
        for name, (count, state) in before.items():
            set_state(self._by_name[name], state)
            self._by_name[name]._update_count = count

    def state(self) -> tuple[dict[str, State], list[str]]:
        """The states of training; and which of them differ between ranks."""
        if self._before is not None:
            return self._before
        self._note_updates(by_steps=True)
        states = {name: state_of(metric) for name, metric in self._by_name.items() if metric._update_count}
        return states, sorted(self._differing)

    def load(self, alike: Mapping[str, State], by_rank: Sequence[Mapping[str, State]], differing: Collection[str]) -> None:
        """Continue from what `state` returned: in those that differ, from the ranks whose steps this one continues."""
        self._differing = set(differing)
        for name, metric in self._by_name.items():
            states = [states[name] for states in (by_rank if name in differing else [alike]) if name in states]
            if states:
                set_state(metric, states[0] if len(states) == 1 else merged(metric, states))
        self._note_updates(by_steps=False)


def is_metric(value: Any) -> bool:
    return hasattr(value, "_reductions")


def state_of(metric: Any) -> State:
    values = {name: getattr(metric, name) for name in metric._defaults}
    return int(metric._update_count), {
        name: [entry.detach().cpu() for entry in value] if isinstance(value, list) else value.detach().cpu().clone()
        for name, value in values.items()
    }


def set_state(metric: Any, state: State) -> None:
    metric._update_count, values = state
    metric._computed = None
    for name, value in values.items():
        moved = [entry.to(metric.device) for entry in value] if isinstance(value, list) else value.to(metric.device)
        setattr(metric, name, moved)


def merged(metric: Any, states: Sequence[State]) -> State:
    """The state of a metric that was updated on several ranks, as torchmetrics reduces it; means by the numbers of updates."""
    counts = [count for count, _ in states]
    values: dict[str, Any] = {}
    for name, reduction in metric._reductions.items():
        by_rank = [state[name] for _, state in states]
        if isinstance(metric._defaults[name], list):
            values[name] = [entry for value in by_rank for entry in (value if isinstance(value, list) else [value])]
        elif getattr(reduction, "__name__", "") == "dim_zero_mean":
            values[name] = sum(value * count for value, count in zip(by_rank, counts, strict=True)) / max(1, sum(counts))
        elif len(by_rank) == 1:
            values[name] = by_rank[0]
        else:
            together = torch.stack(by_rank)
            values[name] = together if reduction is None else reduction(together)
    return sum(counts), values
