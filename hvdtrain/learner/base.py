"""The contract of a learner.

A learner has four parts. `Learner` itself trains: forward, backward and update. Its `state` is what checkpoints and other ranks
need: weights, buffers and the optimizer's state. Its `meter` measures: scores, seconds, memory. Its `staging` copies batches to
the device ahead of their steps. Saving code and reducers see only the state; reporting code sees only the meter.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from hvdtrain.comm.base import Tensor
from hvdtrain.errors import ConfigError
from hvdtrain.learner.epoch_scores import SCORING

if TYPE_CHECKING:
    from hvdtrain.data.read_ahead import Staging
    from hvdtrain.data.types import Array, Batch
    from hvdtrain.learner.meter import BatchOutputs, Meter
    from hvdtrain.learner.state_base import StateBase

Total = Callable[[list[Tensor]], list[Tensor]]
"""Collective. Sums tensors over the ranks."""

Observer = Callable[[Iterator[tuple[str, "Array"]]], None]
"""Receives arrays by name."""


TRAIN = "train"
"""The name of the dataset that is trained on."""


class Learner(ABC):
    """A model, its optimizer and its losses. Model and optimizer are the config's objects, neither wrapped nor patched.

    A step is one batch on every rank; an update is one optimizer step, after one or more steps. `backward` and `update` are
    collective if the reducer is: all ranks call them equally often.

    Args:
        seed: the training's seed, and the rank. With the step, they determine a step's random numbers (dropout): they differ
            between ranks, and are the same after a resume.

    Attributes:
        model, optimizer: the config's objects, of the framework. A sharded optimizer holds this rank's shard.
        state: what checkpoints and other ranks need.
        meter: scores, seconds and memory.
        device_name: the GPU's name, or "CPU".
        observer: called in every update with the gradients that this rank applies (with a sharded optimizer, its shard), by
            parameter name: reduced over the ranks, before noise and clipping, float32. None: not called.
        staging: copies batches to the device ahead of their steps; None: steps use batches as read.
        keys_of_epoch: called before an epoch is planned, with its number; returns the keys that have another value in this epoch,
            because of the model (see `keys_of_epoch` in a config). None: keys do not depend on the model.
        scoring: computes the scores of a dataset.
        dataset: the name of the one that batches are of.
    """

    model: Any
    optimizer: Any
    num_parameters: int
    device_name: str
    staging: Staging | None = None
    keys_of_epoch: Callable[[int], Mapping[str, Any]] | None = None
    scoring = SCORING
    dataset = TRAIN
    _may_freeze = True  # whether the config's code may freeze parameters while training runs

    def __init__(self, state: StateBase, meter: Meter, seed: tuple[int, int] = (0, 0)) -> None:
        self.state = state
        self.meter = meter
        self.observer: Observer | None = None
        self._seed = seed
        self._epoch = 0
        self._step = 0
        self._checks_after_update = False
        self._trained = {id(parameter): name for name, parameter in self._trainable()}

    def begin_epoch(self, epoch: int, step: int) -> None:
        """Set the position in the training: the epoch, counted from 1, and the number of steps done so far.

        Raises:
            ConfigError: the config's code has changed which parameters are trained; also `update` and `flush`.
        """
        self._check_trained()
        self._checks_after_update = True  # a first call of the model can create layers
        self._epoch = epoch
        self._step = step
        self.state.start_average()

    @contextmanager
    def evaluating(self, dataset: str) -> Iterator[None]:
        """Inside the `with` block, batches are those of another dataset than `train`."""
        before, self.dataset = self.dataset, dataset
        try:
            yield
        finally:
            self.dataset = before

    @abstractmethod
    def backward(self, batch: Batch | None, completes_update: bool = True) -> None:
        """Run one step: compute a batch's gradients and add them to those of the next update.

        Args:
            batch: None if this rank has no batch left; it then adds zeros.
            completes_update: whether `update` is called next; gradients can then be sent while backward is still running.
        """

    def update(self, learning_rate: float) -> None:
        """Finish reducing the gradients and let the optimizer apply them.

        Raises:
            TrainingError: more consecutive updates had non-finite gradients than the config allows. If a GPU decides which
                updates to skip, the error is raised one update late, or by `flush`.
        """
        self._update(learning_rate)
        if self._checks_after_update:
            self._checks_after_update = False
            self._check_trained()

    @abstractmethod
    def _update(self, learning_rate: float) -> None:
        """`update`, without its check of what is trained."""

    def flush(self) -> None:
        """Wait until the outcome of every update is known: applied or skipped. Called by all ranks at the end of an epoch and
        before saving.

        Raises:
            TrainingError: as in `update`.
        """
        self._check_trained()

    @abstractmethod
    def evaluate(self, batch: Batch) -> None:
        """Compute a batch's losses and errors. Only the scores change."""

    @abstractmethod
    def try_batch(self, batch: Batch) -> bool:
        """Compute a batch's losses and gradients and drop them; False if memory does not suffice."""

    @abstractmethod
    def forward(self, batch: Batch) -> BatchOutputs:
        """Run the config's forward_step; return the outputs that it marks. The meter gets the losses and errors, if the framework
        computes them with the outputs.

        Raises:
            ConfigError: it marks none.
        """

    @abstractmethod
    def modules(self) -> Iterator[tuple[str, Any]]:
        """The model's modules or layers, itself included, by the names of the attributes that lead to them."""

    def kinds_of_modules(self) -> Iterator[tuple[str, str]]:
        """What the modules compute as far as their text says it, by name in the model's order."""
        return ((name, type(module).__qualname__) for name, module in self.modules())

    def trained_now(self) -> dict[str, str]:
        """By the name of a parameter, whether it is trained in the next step, as text: a callback may have changed that."""
        return {}

    @abstractmethod
    def layers(self) -> Iterator[Layer]:
        """The model and its layers, in the model's order, each with the parameters it holds directly. A shared parameter belongs
        to the first layer that has it."""

    def trial(self, batch: Batch) -> AbstractContextManager[Callable[[], None]]:
        """Inside the `with` block, a function that computes a batch's gradients without the other ranks and drops them. Not every
        framework has it."""
        raise NotImplementedError(type(self).__name__)

    @abstractmethod
    def numbers(self, values: Sequence[float]) -> Tensor:
        """A float64 tensor of shape (len(values),) on the CPU that can be sent to other ranks, and that numpy.asarray accepts."""

    def _trainable(self) -> Iterable[tuple[str, Any]]:
        """The parameters that the model's code has not frozen, by name; empty: it cannot change which these are."""
        return ()

    def _check_trained(self) -> None:
        """Check that the optimizer has all trained parameters: others would silently keep their values."""
        trainable = {id(parameter): name for name, parameter in self._trainable()}
        new = [name for number, name in trainable.items() if number not in self._trained]
        frozen = [] if self._may_freeze else [name for number, name in self._trained.items() if number not in trainable]
        if new or frozen:
            got = f"others since training began: {', '.join(new)}" if new else f"some that are frozen since: {', '.join(frozen)}"
            how = "for some time by freeze_until_step or in epoch_start" if self._may_freeze else "there or never"
            raise ConfigError.of(
                "wrong-result",
                f"get_model: expected the parameters that are trained, got {got} (the optimizer has those that were trainable "
                f"there: make layers there, and freeze parameters {how})",
            )


class Profiler(Protocol):
    """A framework's profiler, for the steps of one rank."""

    def start(self) -> None: ...

    def stop(self, file: Path) -> None:
        """Stop, and write a trace that Perfetto and Chrome can open: JSON, compressed with gzip."""
        ...

    def range(self, name: str) -> AbstractContextManager[Any]:
        """A named range of the trace."""
        ...


@dataclass(frozen=True)
class Exported:
    """One format of an exported model.

    Attributes:
        name: of the file, or of the folder.
        problem: why it was not written; None: it was.
        how_to_load: Python code.
        takes: the inputs, with the axes that may have any size and those that are fixed; '': it has no inputs.
    """

    name: str
    problem: str | None
    how_to_load: str = ""
    takes: str = ""


@dataclass(frozen=True)
class Layer:
    """A layer of a model.

    Attributes:
        name: the names of the attributes that lead to it; '' for the model itself.
        type: of the layer, such as 'Linear'.
        parameters: the shapes of the parameters it holds directly, by name, trained or not.
        trainable: the names of those that are trained.
    """

    name: str
    type: str
    parameters: Mapping[str, tuple[int, ...]]
    trainable: frozenset[str]
