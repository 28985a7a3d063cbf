"""What the learner for PyTorch is built from, and what plug-ins may add to it (the table `learner_extensions`)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch

from hvdtrain.data.types import Batch
from hvdtrain.learner.frameworks import BuildOptions
from hvdtrain.learner.keys import LearnerKeys
from hvdtrain.learner.reducer import GradientExchange
from hvdtrain.learner.torch.device import NOTHING
from hvdtrain.learner.torch.optimizer import make_optimizer
from hvdtrain.learner.torch.several_optimizers import AnyOptimizer
from hvdtrain.learner.weight_average import EvaluationWeights

Watch = Callable[[], AbstractContextManager[None]]
"""Creates the context around calls of the config's functions that use the model."""


class BatchNormExchange(Protocol):
    """Sums over the ranks within forward and backward, in which a rank without a batch takes part."""

    def end_pass(self, device: torch.device) -> None:
        """Collective. Signal to the ranks without a batch that a forward or a backward has no more sums. Raises: ConfigError."""
        ...

    def join_without_batch(self, device: torch.device, forward: bool) -> None:
        """Collective, on a rank without a batch. Take part in the sums of a forward, or of a backward."""
        ...

    def pause(self) -> AbstractContextManager[None]:
        """Inside the `with` block, each rank computes alone."""
        ...


class Splitter(Protocol):
    """Runs steps on batches, and on pieces of those that do not fit into memory."""

    def run(self, batch: Batch, step: Callable[[Batch], None]) -> None:
        """Run a step, which changes nothing if it fails, on a batch or on its pieces."""
        ...

    def check_loss(self, name: str, is_scalar: bool, num_sequences: int) -> None:
        """Called with every loss that is minimized. Raises: ConfigError, if it cannot be split."""
        ...

    def take(self) -> int:
        """The number of batches that were split since the last call."""
        ...


class Freezing(Protocol):
    """Freezes trained parameters before their first step."""

    def apply(self, step: int) -> None:
        """Called at the beginning of an update, after N steps of the training."""
        ...

    def frozen_now(self) -> list[int]:
        """The numbers of the trained parameters that have been frozen since the first step."""
        ...


class Metric(Protocol):
    """What train_step updates, and whose states are sums over batches."""

    def reset(self) -> None:
        """Begin a batch."""
        ...

    def states(self) -> Mapping[str, torch.Tensor]:
        """The states since `reset`, as rows, by the names of statistics; empty, if it was not updated since then."""
        ...


class Base(Protocol):
    """Parameters that are not trained, and that the model's file may leave out.

    Attributes:
        names: of those that it leaves out.
        entry: of the file, by which a later start recognizes them; None: the file leaves out nothing.
    """

    names: frozenset[str]
    entry: dict[str, Any] | None

    def check(self) -> None:
        """Raises: ConfigError, if a parameter that is left out has changed: nothing would save it."""
        ...

    def left_out(self, stored: dict[str, Any], tensors: Mapping[str, Any], file: Path) -> Mapping[str, torch.Tensor]:
        """See `StateBase._left_out`."""
        ...


class DividedOptimizer(ABC):
    """An optimizer whose state is divided among the ranks. It saves and loads that of all parameters, like an undivided one.

    A gradient is reduced only to the rank that owns its parameter; on other ranks its values are undefined.

    Attributes:
        inner: the config's optimizer, with this rank's share of the parameters.
        whole_groups: the parameters of all ranks, by group.
        is_gathered: whether this rank holds the state that `gather` collected.
    """

    inner: AnyOptimizer
    whole_groups: list[list[torch.Tensor]]

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The optimizer's groups, with this rank's parameters."""
        return self.inner.param_groups

    @property
    @abstractmethod
    def is_gathered(self) -> bool: ...

    @abstractmethod
    def owners(self, parameters: Sequence[torch.Tensor]) -> list[int]:
        """For each parameter, the rank that keeps its state, the only one to need its reduced gradient. Rank 0 for parameters
        that are not in the optimizer."""

    @abstractmethod
    def norms(self, parameters: Sequence[torch.Tensor], order: float) -> list[torch.Tensor]:
        """Collective. The norm of each gradient, of the parameters that have one: the same as if all ranks had all gradients."""

    @abstractmethod
    def step(self) -> None:
        """Collective. Update this rank's parameters and send them to the others."""

    @abstractmethod
    def exchange(self) -> None:
        """Collective. Send this rank's parameters to the others."""

    @abstractmethod
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients of all parameters, including those of other ranks."""

    @abstractmethod
    def gather(self) -> None:
        """Collective. Collect the whole state on rank 0, which then calls `state_dict` once."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """The state that `gather` collected."""

    @abstractmethod
    def load_state_dict(self, whole: dict[str, Any]) -> None:
        """Load this rank's share of an undivided optimizer's state. Raises: KeyError, ValueError, if it is of another one."""


Optimizer = AnyOptimizer | DividedOptimizer


@dataclass
class Assembly:
    """What the learner for PyTorch is built from. Extensions get it as soon as there is a model, and may change all of it.

    Attributes:
        model: on its device; the optimizer is not made yet.
        constants: the names of parameters that are neither trained nor saved.
        watch: the context around the calls of the config's functions.
        batch_norm: the exchange between the ranks' BatchNorms; None: there is none.
        splitter: splits batches that do not fit into memory; None: such a batch is an error.
        make_base: makes what knows the parameters that the model's file leaves out; None: it leaves out none.
        freeze: makes what freezes some of the trained parameters until a step, given these by name; None: none are.
        extra_models: models by name that are neither trained nor saved.
        make_optimizer: makes the optimizer of the key's value and the model; and whether a fused implementation is preferred.
        divide: makes the optimizer one whose state is divided among the ranks; None: each rank has all of it.
        weights_of_modes: makes the weights for evaluations of an optimizer with `train()` and `eval()`, given that of the config
            and what `divide` made of it, if anything.
    """

    keys: LearnerKeys
    options: BuildOptions
    exchange: GradientExchange
    model: torch.nn.Module
    device: torch.device
    constants: frozenset[str] = frozenset()
    watch: Watch = lambda: NOTHING
    batch_norm: BatchNormExchange | None = None
    splitter: Splitter | None = None
    make_base: Callable[[], Base] | None = None
    freeze: Callable[[Mapping[str, torch.nn.Parameter]], Freezing] | None = None
    extra_models: Mapping[str, torch.nn.Module] = field(default_factory=dict)
    make_optimizer: Callable[[Any, torch.nn.Module, bool], AnyOptimizer] = make_optimizer
    divide: Callable[[AnyOptimizer], DividedOptimizer] | None = None
    weights_of_modes: Callable[[AnyOptimizer, DividedOptimizer | None], EvaluationWeights] | None = None
