"""Optimizers with `train()` and `eval()`, such as schedule-free ones: training and evaluation use different weights.

Such an optimizer moves the parameters between two points. It has to be in its training mode for an update, and in the other for
an evaluation and for the model's file. Switching back and forth rounds, so the trained weights are kept and restored: results do
not depend on when and how often a training is evaluated and saved.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any

import torch

from hvdtrain.comm.base import Communicator
from hvdtrain.errors import ConfigError, Problem, problem
from hvdtrain.learner.frameworks import Extend
from hvdtrain.learner.torch.assembly import Assembly, DividedOptimizer
from hvdtrain.learner.torch.several_optimizers import AnyOptimizer, name_of
from hvdtrain.learner.torch.tensors import named_trained
from hvdtrain.learner.weight_average import EvaluationWeights
from hvdtrain.settings import Settings


def with_modes(settings: Settings, comm: Communicator) -> Extend:
    """Of the table `learner_extensions`: an optimizer may have modes; whether it has shows when it is made."""
    return extend


def extend(assembly: Assembly) -> None:
    """Have the learner ask for the weights of an optimizer with modes here."""
    assembly.weights_of_modes = partial(weights_of, assembly)


def weights_of(assembly: Assembly, optimizer: AnyOptimizer, divided: DividedOptimizer | None) -> OptimizerModes:
    """Raises: ConfigError."""
    check_modes(optimizer, assembly.keys.ema_decay, assembly.exchange.keeps_ranks_alike)
    exchange = None if divided is None else divided.exchange
    return OptimizerModes(named_trained(assembly.model), optimizer, exchange)


def check_modes(optimizer: AnyOptimizer, ema_decay: float | None, is_synced_every_update: bool) -> None:
    """Raises: ConfigError, if another feature would give an optimizer with modes the wrong weights."""
    name = name_of(optimizer)
    problems = []
    if ema_decay is not None:
        problems.append(
            Problem.of(
                "conflict",
                f"ema_decay: expected None with {name}, which has separate weights for evaluations, got {ema_decay:g}",
            )
        )
    if not is_synced_every_update:
        problems += problem(
            "conflict",
            f"horovod_reduce_type: expected 'grad' with {name}, as its eval() computes the weights from the optimizer's state, "
            "which is the same on all ranks only then",
        )
    if problems:
        raise ConfigError(problems)


class OptimizerModes(EvaluationWeights):
    """The weights computed by an optimizer's `eval()`.

    Args:
        named: the trained parameters by name.
        optimizer: with `train()` and `eval()`, which may have a share of the parameters only.
        exchange: collective; sends this rank's share of the parameters to the others; None: every rank has all.
    """

    def __init__(
        self, named: Mapping[str, torch.nn.Parameter], optimizer: Any, exchange: Callable[[], None] | None = None
    ) -> None:
        super().__init__()
        self._parameters = dict(named)
        self._optimizer = optimizer
        self._exchange = exchange
        self._gathered: dict[str, torch.Tensor] | None = None  # the weights for evaluations, for the next checkpoint
        self._trained: dict[str, torch.Tensor] = {}  # within `use`
        self._has_started = False

    @property
    def has_started(self) -> bool:
        return self._has_started

    def start(self, updates: int = 0) -> None:
        self._optimizer.train()
        self._has_started = True

    def follow(self, updates: int) -> None:
        """Does nothing: the optimizer does it."""

    def evaluated_and_trained(self) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        trained = self._copies()
        gathered, self._gathered = self._gathered, None
        if gathered is not None:
            return gathered, trained
        with self.use():
            return self._copies(), trained

    def exact(self) -> dict[str, torch.Tensor]:
        """They have the model's types."""
        return {}

    def restore(self, exact: Mapping[str, torch.Tensor]) -> None:
        """Does nothing: the optimizer's state has them."""

    def gather(self, keep: bool) -> None:
        if self.has_started:
            with self.use():
                self._gathered = self._copies() if keep else None

    def adopt(self, changed: Collection[str]) -> None:
        """Does nothing: values that were set from outside are the trained weights."""

    def _enter(self) -> None:
        """Collective, if the optimizer is sharded."""
        self._trained = self._copies()
        self._optimizer.eval()
        if self._exchange is not None:
            self._exchange()

    def _leave(self) -> None:
        trained, self._trained = self._trained, {}
        self._optimizer.train()
        with torch.no_grad():
            for name, parameter in self._parameters.items():
                parameter.copy_(trained[name])

    def _copies(self) -> dict[str, torch.Tensor]:
        return {name: parameter.detach().clone() for name, parameter in self._parameters.items()}
