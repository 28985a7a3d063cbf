"""What the engine may ask of a learner, and the keys that configure one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from hvdtrain.comm.base import Tensor
from hvdtrain.config.keys import ALONE, REQUIRED, Section, Sections, key, not_negative, positive, share
from hvdtrain.data.types import Array, Batch
from hvdtrain.errors import CheckpointError, ConfigError
from hvdtrain.runtime.scores import Scores

FILE_SUFFIX = {"torch": "pt", "tensorflow": "npz"}
"""By backend, that of its checkpoints."""

Kind = Literal["parameters", "frozen", "statistics", "counters"]
"""Trainable parameters; those that are not trained; floating buffers such as BatchNorm's running mean; integer buffers."""

Shapes = Mapping[str, tuple[int, ...]]
"""By name, the shape of a parameter or buffer."""

Then = Literal["accumulate", "update"]
"""What comes after a batch's gradients: those of more batches, or an update of the parameters."""


@dataclass(frozen=True)
class Chosen:
    """What to take over from another model's file.

    Attributes:
        found: by our name, the file's.
        here: by the name that it would have here, every name of the file that is not to be ignored.
    """

    found: Mapping[str, str]
    here: Mapping[str, str]


Make = Callable[[str, tuple[int, ...], Mapping[str, Tensor]], Any]
"""Makes the values of one of ours that a file lacks, from its name, its shape, and what the file has by the names it would have
here; None: leave it as it is."""


class Take(Protocol):
    """Takes parameters over: a learner's `preload`, or what does so before there is a learner."""

    def __call__(
        self, file: Path, entry: str | None, chosen: Callable[[Shapes, Shapes], Chosen], make: Make | None
    ) -> tuple[list[str], list[str]]: ...


Part = Kind | Literal["optimizer"]
"""What a rank may have to save of its own, as it differs between ranks."""


@dataclass(frozen=True)
class NotFinite:
    """A loss of a training step that is no finite number.

    Attributes:
        step: steps done before it in the whole training.
        indices: the batch's sequences in the dataset.
        parameters: names of those that held such numbers when the loss was looked at: on a CPU before the step's update.
    """

    step: int
    loss: str
    value: float
    indices: tuple[int, ...]
    parameters: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class LearnerKeys(Section):
    """The model and how it is updated."""

    get_model: Callable[..., Any] | str = key(
        REQUIRED, "function (*, epoch, step, device, **_) that returns the model; in JSON 'module:name'"
    )
    train_step: Callable[..., Any] | str = key(
        REQUIRED, "function (*, model, extern_data, **_) that marks the losses of a batch; used for evaluation, too"
    )
    forward_step: Callable[..., Any] | str | None = key(
        None, "task forward or search: function (*, model, extern_data, **_) that marks a batch's outputs"
    )
    optimizer: dict[str, Any] | str | Callable[..., Any] = key(
        {"class": "adam"}, "the optimizer's class by name and its options, or a function (parameters) that returns one"
    )
    gradient_clip_global_norm: float | None = key(
        None, "scale gradients down to this global norm, after they were reduced over the ranks", positive
    )
    gradient_clip: float | None = key(None, "cut every gradient element off at plus or minus this, after the reduction", positive)
    gradient_noise: float = key(
        0.0,
        "add normally distributed numbers of this standard deviation, cut off at twice that, to the gradients, after they were "
        "reduced and before they are clipped",
        not_negative,
    )
    num_allowed_consec_invalid_gradient_steps: int | None = key(
        None,
        "leave an update out, on all ranks together, when a gradient is no finite number after the reduction, and end when more "
        "than so many follow each other; None: none is left out",
        positive,
    )
    ema_decay: float | None = key(
        None,
        "evaluate, and save as the model, an exponential moving average of the weights that keeps so much of itself at every "
        "update, such as 0.999; at first less",
        share,
    )
    sync_batch_norm: bool = key(
        False, "let the statistics of BatchNorm be those of all ranks' batches together (with horovod_reduce_type 'grad')"
    )
    torch_compile: bool | dict[str, Any] = key(
        False,
        "compile the model (torch.compile, in place): True, or a dict of torch.compile's options, and of modules: classes of "
        "modules, or their names, that are compiled one by one instead of the whole model",
    )
    device: str | None = key(None, "cpu, cuda or cuda:N; None: this rank's GPU where there is one, else the CPU")

    def problems(self, others: Sections = ALONE) -> list[str]:
        if isinstance(self.optimizer, dict):
            if "class" not in self.optimizer:
                return ["optimizer: expected a dict with the entry 'class' (the optimizer's name), got none"]
            rates = sorted({"lr", "learning_rate"} & set(self.optimizer))
            if rates:
                return [f"optimizer.{rates[0]}: expected the learning rate in the key learning_rate, got it in the optimizer"]
        if self.torch_compile is not False and self.sync_batch_norm:
            return ["torch_compile: expected sync_batch_norm = False beside it, got both (an exchange cannot be compiled)"]
        return []


class Learner(Protocol):
    """A model, its optimizer and its losses. Model and optimizer are the config's own objects, neither wrapped nor patched.

    `backward` and `update` are collective where the reducer is: all ranks call them equally often.
    """

    model: Any
    num_parameters: int
    device_name: str
    file_suffix: str
    """Of checkpoints: 'pt' for PyTorch, 'npz' for TensorFlow."""

    @property
    def loss_scale(self) -> float | None:
        """What losses are multiplied by before backward, where they are."""
        ...

    def begin_epoch(self, epoch: int, step: int) -> None:
        """Be told where training stands: the epoch from 1, and the batches of a rank (steps) done so far."""
        ...

    def backward(self, batch: Batch | None, then: Then = "update") -> None:
        """Add the batch's gradients to what will be applied by the next update. None: a rank without a batch adds zeros.

        Args:
            then: 'update': `update` is called next, so gradients may leave for the other ranks while the last are computed.
        """
        ...

    def update(self, learning_rate: float) -> None:
        """Finish the reduction of the gradients and let the optimizer apply them."""
        ...

    def average_weights(self, updates: int) -> None:
        """Be told that the ranks' models are one again, after so many updates: their average over time (`ema_decay`) follows."""
        ...

    def averaged(self) -> AbstractContextManager[None]:
        """Inside the `with` block the model has the average over time as its weights, if one is kept. For evaluating; what is
        saved meanwhile is the same as otherwise."""
        ...

    def evaluate(self, batch: Batch) -> None:
        """Compute a batch's losses and errors, changing nothing."""
        ...

    def forward(self, batch: Batch) -> list[dict[str, Array]]:
        """What the config's forward_step marks as outputs, by name, for every sequence of a batch.

        Raises:
            ConfigError: it marks none, or something that has not one entry for every sequence.
        """
        ...

    def take_scores(self) -> Scores:
        """Sums and counts of the losses and errors of the batches since the last call."""
        ...

    def take_step_seconds(self) -> float:
        """Seconds spent in `backward` and `update` since the last call, as the device sees it."""
        ...

    def peak_memory(self) -> int | None:
        """Bytes that the device's memory had to give at most so far; None where the device is the CPU."""
        ...

    def arrays(self) -> Iterator[tuple[str, Array]]:
        """The parameters, trained or not, one after the other: names, and copies of their values as floating numbers."""
        ...

    def map_tensors(self, kind: Kind, change: Callable[[list[Tensor]], list[Tensor]]) -> None:
        """Replace the values of the model's tensors of one kind by what `change` makes of them, in the model's order."""
        ...

    def gather_state(self) -> None:
        """Collective. To be called before `save`, which only one rank calls: bring together what the ranks hold apart."""
        ...

    def save(self, model_file: Path, optimizer_file: Path, progress: dict[str, Any], state: Any | None = None) -> None:
        """Write the model with `progress` beside it, and what else the optimizer needs to go on. Where an average over time is
        kept, it is the model, and the weights that are trained stand beside the optimizer.

        Args:
            state: write what `copied` returned instead of what is there now; from any thread.
        """
        ...

    def copied(self) -> Any:
        """A copy of everything that `save` writes, in memory that training leaves alone."""
        ...

    def load(self, model_file: Path, optimizer_file: Path | None) -> dict[str, Any]:
        """Read what `save` wrote, or another program in the same format; return what is there beside the model.

        Without a file for the optimizer only the model is read. Code in the files is never run. Raises: CheckpointError.
        """
        ...

    def preload(
        self, file: Path, entry: str | None, chosen: Callable[[Shapes, Shapes], Chosen], make: Make | None
    ) -> tuple[list[str], list[str]]:
        """Take parameters and buffers over from a file, if there is such an entry, from that entry of it.

        Args:
            chosen: is told our names and shapes and the file's.
            make: is asked for what the file lacks.

        Returns: the names of all of ours, and of those that were taken over.

        Raises:
            CheckpointError: the file cannot be read, or what was made has another shape.
        """
        ...

    def save_own(self, file: Path, parts: Sequence[Part]) -> None:
        """Write this rank's own tensors of some kinds, and its optimizer's state where that is among the parts."""
        ...

    def load_own(self, file: Path) -> None:
        """Read what `save_own` wrote. Raises: CheckpointError."""
        ...

    def numbers(self, values: Sequence[float]) -> Tensor:
        """Some numbers as a tensor that can be sent to other ranks; iterating over it gives something `float` understands."""
        ...

    def take_not_finite(self) -> list[NotFinite]:
        """The losses that were no finite numbers among those that have been looked at since the last call.

        On a GPU they are looked at when scores are taken or many have gathered: no step waits for the device.
        """
        ...


def as_function(value: Any, name: str) -> Any:
    """The function a key holds or names. Raises: ConfigError."""
    from hvdtrain.config.reference import is_reference, resolve  # here, so that the keys above stay light to import

    if not isinstance(value, str):
        return value
    if not is_reference(value):
        raise ConfigError([f"{name}: expected a function or its name as 'module:name', got {value!r}"])
    try:
        return resolve(value)
    except ImportError as error:
        raise ConfigError([f"{name}: expected a function that can be imported, got {error}"]) from error


def check_made(name: str, expected: tuple[int, ...], got: tuple[int, ...]) -> None:
    """Raises: CheckpointError, if what a config's own function made for a parameter has another shape."""
    if expected != got:
        raise CheckpointError(f"custom_missing_load_func: expected values of shape {expected} for {name}, got {got}")
