"""What the rest of the program may ask of a learner, and the keys that configure one.

A learner has three parts. `Learner` itself trains: forward, backward and update. Its `state` is everything that a checkpoint or
another rank has to know of it: weights, buffers, the optimizer's state. Its `meter` says what happened: scores, seconds, memory.
Who saves sees the state only, and so do reducers; who reports sees the meter only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from hvdtrain.comm.base import Tensor
from hvdtrain.config.keys import ALONE, REQUIRED, Section, Sections, key, not_negative, positive, share
from hvdtrain.errors import Problem, problem

if TYPE_CHECKING:
    from hvdtrain.data.feed import Staging
    from hvdtrain.data.types import Array, Batch
    from hvdtrain.learner.state_base import StateBase
    from hvdtrain.runtime.scores import Scores

Observer = Callable[[Iterator[tuple[str, "Array"]]], None]
"""Gets arrays by name."""


class Outputs(dict[str, "Array"]):
    """The outputs of a sequence by name.

    Attributes:
        vectors: the names of those that are the features of the whole sequence, shape (features,), and have no axis of frames.
    """

    def __init__(self, vectors: frozenset[str]) -> None:
        super().__init__()
        self.vectors = vectors


class Learner(Protocol):
    """A model, its optimizer and its losses. Model and optimizer are the config's own objects, neither wrapped nor patched.

    A step is one batch on every rank; an update is one optimizer step, after one or more steps. `backward` and `update` are
    collective where the reducer is: all ranks call them equally often.

    Attributes:
        model, optimizer: the config's own, the framework's. With a sharded optimizer, what holds this rank's share.
        device_name: the GPU's name, or "CPU".
        observer: called in every update with the gradients that this rank applies (of a sharded optimizer, those of its share),
            by the parameters' names: reduced over the ranks, before noise and clipping, float32. None: nobody looks at them.
        staging: copies batches to the device ahead of their steps; None: steps use batches as they were read.
    """

    model: Any
    optimizer: Any
    num_parameters: int
    device_name: str
    observer: Observer | None
    staging: Staging | None

    @property
    def state(self) -> StateBase:
        """What checkpoints and other ranks need."""
        ...

    @property
    def meter(self) -> Meter:
        """Scores, seconds and memory."""
        ...

    def begin_epoch(self, epoch: int, step: int) -> None:
        """Set where training stands: the epoch, counted from 1, and the number of steps done in the whole training."""
        ...

    def backward(self, batch: Batch | None, is_last_microbatch: bool = True) -> None:
        """Compute a batch's gradients and add them to those of the next update. This is one step.

        Args:
            batch: this rank's; None if it has none left, which adds zeros.
            is_last_microbatch: whether `update` is called next: gradients may then be sent while the last of them are computed.
        """
        ...

    def update(self, learning_rate: float) -> None:
        """Finish the reduction of the gradients and apply them with the optimizer.

        Raises:
            TrainingError: more updates in a row had gradients that are not finite than the config allows. Where a GPU decides
                which updates are skipped, this is raised one update late, or by `flush`.
        """
        ...

    def flush(self) -> None:
        """Wait until it is known which updates were skipped. Called by all ranks at the end of an epoch and before saving.

        Raises:
            TrainingError: as in `update`.
        """
        ...

    def evaluate(self, batch: Batch) -> None:
        """Compute a batch's losses and errors. Nothing but the scores changes."""
        ...

    def forward(self, batch: Batch) -> list[Outputs]:
        """The outputs that the config's forward_step marks, by name, for each sequence of a batch.

        Raises:
            ConfigError: it marks none, or an output has not one entry for each sequence.
        """
        ...

    def modules(self) -> Iterator[tuple[str, Any]]:
        """The model's modules or layers, itself included, by the names of the attributes that lead to them."""
        ...

    def layers(self) -> Iterator[Layer]:
        """The model and its layers in its order, each with its own parameters. A shared parameter belongs to the first layer that
        has it."""
        ...

    def output_shapes(self, batch: Batch) -> dict[str, list[tuple[int, ...]]]:
        """Evaluate a batch; the shapes of the tensors that each layer returned when it was first called, by the layer's name.
        Empty where the framework cannot tell."""
        ...

    def export(self, batch: Batch, folder: Path) -> list[Exported]:
        """Write the model for use without hvdtrain in each form that the framework has. The batch says what its inputs are."""
        ...

    def numbers(self, values: Sequence[float]) -> Tensor:
        """A float64 tensor of shape (len(values),) on the CPU that can be sent to other ranks. numpy.asarray takes it."""
        ...


class Meter(Protocol):
    """What a learner's steps cost and what came out of them. On a GPU, asking waits for the device, except for what has arrived
    from there; steps never wait."""

    @property
    def loss_scale(self) -> float | None:
        """The factor that losses are multiplied by before backward; None: they are not scaled."""
        ...

    def take_scores(self) -> Scores:
        """The sums and counts of losses and errors of all batches since the last call of this or of `drain_ready`."""
        ...

    def drain_ready(self) -> Scores:
        """The same of those batches whose numbers can be read without waiting for the device. Where it cannot be asked, all."""
        ...

    def take_not_finite(self) -> list[NotFinite]:
        """The losses that were not finite, of those that were read from the device since the last call.

        On a GPU, losses are read a few steps late: when they have arrived, or when scores are taken.
        """
        ...

    def take_step_seconds(self) -> float:
        """The seconds of `backward` and `update` since the last call, measured on the device."""
        ...

    def step_seconds(self) -> float:
        """The seconds of `backward` and `update` since the learner was made, of those steps that are known to be done; does not
        wait for the device."""
        ...

    def gradient_norm(self) -> float | None:
        """The global norm of the gradients before clipping, in the newest update of which it is known without waiting for the
        device; where nobody knows what has arrived, in the last one. None without `gradient_clip_global_norm`."""
        ...

    def peak_memory(self) -> int | None:
        """The largest number of bytes of the device's memory in use so far; None on a CPU."""
        ...


class Profiler(Protocol):
    """A framework's profiler, for the steps of one rank."""

    def start(self) -> None: ...

    def stop(self, file: Path) -> None:
        """Stop, and write what was recorded as a trace that Perfetto and Chrome open: JSON, compressed with gzip."""
        ...

    def range(self, name: str) -> AbstractContextManager[Any]:
        """A range of the trace with a name of our own."""
        ...


@dataclass(frozen=True)
class Exported:
    """One form of an exported model.

    Attributes:
        name: of the file, or of the folder.
        problem: why it was not written; None: it was.
        how_to_load: Python code.
        takes: what its inputs are, along which axes they may have any size, and along which not; '': it takes none.
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
        parameters: the shapes of its own parameters by name, trained or not.
        trainable: the names of those that are trained.
    """

    name: str
    type: str
    parameters: Mapping[str, tuple[int, ...]]
    trainable: frozenset[str]


@dataclass(frozen=True)
class NotFinite:
    """A training loss that is not finite.

    Attributes:
        step: steps done before its step in the whole training.
        indices: the batch's sequences in the dataset.
        parameters: the names of the parameters that were not finite when the loss was read: on a CPU, before the update; on a
            GPU, a few updates later.
    """

    step: int
    loss: str
    value: float
    indices: tuple[int, ...]
    parameters: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class LearnerKeys(Section):
    """The model and its updates."""

    get_model: Callable[..., Any] | str = key(
        REQUIRED, "function {signature} that returns the model; in JSON 'module:name'", signature="*, epoch, step, device, **_"
    )
    train_step: Callable[..., Any] | str = key(
        REQUIRED,
        "function {signature} that marks the losses of a batch; used for evaluation, too (not for the tasks forward and search)",
        signature="*, model, extern_data, **_",
    )
    forward_step: Callable[..., Any] | str | None = key(
        None, "task forward or search: function {signature} that marks a batch's outputs", signature="*, model, extern_data, **_"
    )
    optimizer: dict[str, Any] | str | Callable[..., Any] = key(
        {"class": "adam"},
        "the optimizer's class by name (or 'package.module.Class') and its options, or a function {signature} that returns one",
        signature="parameters",
    )
    gradient_clip_global_norm: float | None = key(
        None, "scale gradients down to this global norm, after they were reduced over the ranks", positive
    )
    gradient_clip: float | None = key(None, "clip each element of the gradients to [-V, V], after the reduction", positive)
    gradient_noise: float = key(
        0.0,
        "add normal noise with this standard deviation, truncated at two deviations, to the gradients, after the reduction and "
        "before clipping",
        not_negative,
    )
    num_allowed_consec_invalid_gradient_steps: int | None = key(
        None,
        "skip an update, on all ranks, if a gradient is not finite after the reduction, and end the training when more than N "
        "updates in a row were skipped; None: no update is skipped",
        positive,
    )
    ema_decay: float | None = key(
        None,
        "evaluate, and save as the model, an exponential moving average of the weights with this decay per update, such as "
        "0.999; the decay starts lower",
        share,
    )
    sync_batch_norm: bool = key(
        False,
        "compute BatchNorm's statistics over the batches of all ranks (with horovod_reduce_type 'grad')",
        needs="torch",
    )
    torch_compile: bool | dict[str, Any] = key(
        False,
        "compile the model in place: True, or a dict of the options of torch.compile and `modules`: the classes of modules, or "
        "their names, that are compiled one by one instead of the whole model",
        needs="torch",
        instead="Keras models have jit_compile",
    )
    checkpoint_modules: list[str] = key(
        [],
        "modules, by patterns of their names such as 'encoder.*', whose activations are not kept for backward but computed again "
        "(torch.utils.checkpoint): less memory, more time",
        needs="torch",
        instead="TensorFlow traces the step as one graph: use tf.recompute_grad in the model, or keras.RematScope in get_model",
    )
    deterministic: bool = key(
        False,
        "compute with operations that give the same bits in every run on the same hardware, and end with an error where there is "
        "none: torch.use_deterministic_algorithms, cuDNN and cuBLAS, or TensorFlow's op determinism; some steps take longer",
    )
    device: str | None = key(None, "cpu, cuda or cuda:N; None: this rank's GPU where there is one, else the CPU")

    def problems(self, others: Sections = ALONE) -> list[Problem]:
        if isinstance(self.optimizer, dict):
            if "class" not in self.optimizer:
                return problem("wrong-type", "optimizer: expected a dict with the entry 'class' (the optimizer's name), got none")
            rates = sorted({"lr", "learning_rate"} & set(self.optimizer))
            if rates:
                return problem(
                    "conflict",
                    f"optimizer.{rates[0]}: expected the learning rate in the key learning_rate, got it in the optimizer",
                )
        if self.torch_compile is not False and self.checkpoint_modules:
            return problem(
                "conflict",
                "checkpoint_modules: expected torch_compile = False beside it, got both (a compiled graph decides what it keeps)",
            )
        if self.torch_compile is not False and self.sync_batch_norm:
            return problem(
                "conflict", "torch_compile: expected sync_batch_norm = False beside it, got both (an exchange cannot be compiled)"
            )
        return []
