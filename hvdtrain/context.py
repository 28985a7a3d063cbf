"""The context in which a config's `train_step` and `forward_step` run: `hvdtrain.get_run_ctx().mark_as_loss(...)`.

The terms for the parts of a training, here and everywhere else:

- A **step** is one batch on every rank; a rank that has none left takes part without one. `global_train_step` and all other
  step numbers count these, over the whole training.
- An **update** is one optimizer step. It ends every step, unless gradients are accumulated (`accum_grad_multiple_step`): then it
  ends the last of several.
- An **epoch** is one pass over the training data, or over a part of it (`partition_epoch`). Epochs are counted from 1.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from hvdtrain.errors import ConfigError


@dataclass(slots=True)  # not frozen, which would take three times as long
class Loss:
    """A loss or an error that the config marked.

    Attributes:
        value: one number per element, not summed; any shape.
        count: number of elements to normalize by, if it is not the number of elements of `value`.
        seq_lens: the number of elements of each sequence, or the one number of all; None: unknown.
    """

    value: Any
    scale: float
    as_error: bool
    use_normalized_loss: bool
    count: Any | None
    seq_lens: Any | None = None


@dataclass(frozen=True)
class Output:
    """An output that the config computed for a batch.

    Attributes:
        value: shape (batch, ...); a tensor, an array, or a list with one entry per sequence.
        seq_lens: length of each sequence along the second axis, shape (batch,); None if nothing is padded.
    """

    value: Any
    seq_lens: Any | None


@dataclass(slots=True)
class RunContext:
    """One call of `train_step` or `forward_step`. With TensorFlow, one tracing of it, in which epoch and step are tensors.

    Attributes:
        epoch: counted from 1.
        step: the number of training steps done in the whole training before this call.
        train_flag: False in an evaluation.
        seq_tags: asks the dataset for the tags of the batch's sequences; None where a framework's graph is traced.
        dataset: the name of the dataset that the batch is of: 'train', 'dev', ...; None where a framework's graph is traced.
        extra_models: the models of the key `extra_models`, by name.
        num_items: of a batch that `collate` made, the number of its items that are not None, which is its weight.
    """

    epoch: int
    step: int
    train_flag: bool
    losses: dict[str, Loss] = field(default_factory=dict)
    outputs: dict[str, Output] = field(default_factory=dict)
    statistics: dict[str, Any] = field(default_factory=dict)
    seq_tags: Callable[[], list[str]] | None = None
    dataset: str | None = None
    extra_models: Mapping[str, Any] = field(default_factory=dict)
    num_items: int = 0

    def mark_as_loss(
        self,
        loss: Any,
        name: str,
        *,
        scale: float = 1.0,
        as_error: bool = False,
        use_normalized_loss: bool = False,
        custom_inv_norm_factor: Any | None = None,
        seq_lens: Any | None = None,
    ) -> None:
        """Mark a loss to be minimized, or an error to be reported.

        Args:
            loss: a tensor with one number per element (frame, label or sequence), without padding and not reduced. The
                elements are summed; the reported value is the sum over all batches and ranks, divided by the count.
            name: name in the log.
            scale: weight in the total loss.
            as_error: report only, do not minimize.
            use_normalized_loss: minimize the mean over the elements of all ranks' batches instead of the sum.
            custom_inv_norm_factor: the count, if it is not the number of elements (for example, the number of reference
                phones for an edit distance per word): a number, or a tensor that is summed.
            seq_lens: the number of elements of each sequence, where `loss` has those of one sequence after the other, as indexing
                with a mask returns them; 1 if it has one per sequence. The scores of each dataset of a mix need it
                (docs/datasets.md#mixingdataset).

        Raises:
            ConfigError: the name is already taken.
        """
        if name in self.losses:
            raise ConfigError.of("wrong-result", f"train_step: expected a unique name for every loss, got {name!r} twice")
        self.losses[name] = Loss(loss, scale, as_error, use_normalized_loss, custom_inv_norm_factor, seq_lens)

    def mark_as_statistics(self, numbers: Any, name: str) -> None:
        """Mark numbers from which a score of the whole dataset is computed, such as BLEU: a function of `epoch_scores` gets their
        sum over all sequences.

        Args:
            numbers: a tensor, an array or a list, with one row for each sequence: of shape (sequences,), of which the function
                gets a float, or (sequences, N), of which it gets an array of shape (N,), float64.
            name: that of the function's parameter.

        Raises:
            ConfigError: the name is already taken.
        """
        if name in self.statistics:
            raise ConfigError.of("duplicate", f"train_step: expected a unique name for every statistic, got {name!r} twice")
        self.statistics[name] = numbers

    def mark_as_output(self, tensor: Any, name: str, *, seq_lens: Any | None = None) -> None:
        """Mark an output of `forward_step`, to be written to a file or passed to `forward_callback`.

        Args:
            tensor: shape (batch, ...).
            name: 'output' becomes the data key 'data' of an HDF file; any other name becomes the data key of that name.
            seq_lens: number of frames (second axis) of each sequence, such as `extern_data["data"].seq_lens`. Default: the
                whole axis belongs to every sequence; a tensor of floats of shape (batch, features) has no frames, so that a file
                gets one frame of these features for each sequence.

        Raises:
            ConfigError: the name is already taken.
        """
        if name in self.outputs:
            raise ConfigError.of("duplicate", f"forward_step: expected a unique name for every output, got {name!r} twice")
        self.outputs[name] = Output(tensor, seq_lens)

    def mark_as_default_output(self, tensor: Any, *, seq_lens: Any | None = None) -> None:
        """Mark the output with the name 'output'."""
        self.mark_as_output(tensor, "output", seq_lens=seq_lens)


STATISTIC = ":sum"


def statistic_name(name: str, column: int) -> str:
    """The name, among the scores, of one number of a statistic."""
    return f"{name}{STATISTIC}{column}"


_current: ContextVar[RunContext] = ContextVar("hvdtrain_run_context")


def get_run_ctx() -> RunContext:
    """The context of the running step. Raises: ConfigError, outside of a step."""
    try:
        return _current.get()
    except LookupError:
        raise ConfigError.of(
            "wrong-call", "get_run_ctx: expected to be called inside train_step, got called outside of a step"
        ) from None


class Running:
    """Makes `context` what `get_run_ctx()` returns inside a `with` block."""

    def __init__(self, context: RunContext) -> None:
        self._context = context

    def __enter__(self) -> RunContext:
        self._before = _current.set(self._context)
        return self._context

    def __exit__(self, *_: object) -> None:
        _current.reset(self._before)
