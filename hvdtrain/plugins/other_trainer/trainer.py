"""Models of other trainers as keys of hvdtrain: what plug-ins for them have in common (docs/plugins.md)."""

from __future__ import annotations

import base64
import io
import re
from collections.abc import Iterable, Mapping
from pickle import UnpicklingError
from typing import Any

import torch

from hvdtrain.context import get_run_ctx
from hvdtrain.errors import ConfigError
from hvdtrain.learner.torch.trees import without_numpy

METHODS = {
    "get_model": "get_model",
    "make_optimizer": "optimizer",
    "rate": "dynamic_learning_rate",
    "change_gradients": "change_gradients",
    "forward_step": "forward_step",
    "read": "checkpoint_reader",
}
"""By method of an `OtherTrainer`, the key that it is, where a class has it."""


class OtherTrainer:
    """What another trainer does around its model, at hvdtrain's moments. A class has those methods that its trainer needs:

    - those of METHODS, with the arguments of their keys; `make_optimizer` sets `optimizer`;
    - `train(batch)` and `evaluate(batch)`: a step, which marks its loss and its scores;
    - `on_epoch_begin(training)` and the other methods of callbacks, `of_ranks(dataset, means)` of `epoch_scores`;
    - `state()` and `load(state)`: what a checkpoint keeps beside the model and the optimizer; tensors are allowed.

    Attributes:
        name: of the state in checkpoints, and of the key that a config gives.
        model: that of the step under way.
        optimizer: what `make_optimizer` made; None: nothing yet.
        training: what callbacks get; None: no training runs, but a step may be tried.
    """

    name = "trainer"
    model: Any = None
    optimizer: Any = None
    training: Any = None
    _is_readable = False  # whether a state was read again

    def keys(self) -> dict[str, Any]:
        """The keys that follow."""
        keys: dict[str, Any] = {key: getattr(self, name) for name, key in METHODS.items() if hasattr(self, name)}
        if hasattr(self, "make_optimizer"):
            keys = {"learning_rate": 1.0, "dynamic_learning_rate": self.rate_of_optimizer, **keys}
        if any(name.startswith("on_") for name in dir(self)):
            keys["callbacks"] = [self]
        if hasattr(self, "of_ranks"):
            keys["epoch_scores"] = {self.name: self}
        return keys | {"train_step": self.train_step}

    def train_step(self, *, model: Any, extern_data: Any, **_: Any) -> None:
        """The key train_step."""
        self.model = model
        step = self.train if get_run_ctx().train_flag else self.evaluate
        step(extern_data)

    def train(self, batch: Any) -> None:
        raise NotImplementedError

    def evaluate(self, batch: Any) -> None:
        """The same as in training, unless a class has another step."""
        self.train(batch)

    @property
    def num_items(self) -> int:
        """The number of items in the batch under way."""
        context = get_run_ctx()
        return context.num_items or len(context.seq_tags())  # type: ignore[misc]

    def mark_mean(self, name: str, mean: torch.Tensor, weight: Any, is_score: bool = False) -> None:
        """Mark the mean of a batch as its loss, or as a score: that of the epoch is the mean of all ranks' items.

        Args:
            weight: the number of items, or whatever else is the batch's weight.
        """
        get_run_ctx().mark_as_loss(
            mean * weight, name, as_error=is_score, use_normalized_loss=not is_score, custom_inv_norm_factor=weight
        )

    def rate_of_optimizer(self, **_: Any) -> float:
        """The rate that the optimizer has, which the other trainer's code may have changed."""
        return float(self.optimizer.param_groups[0]["lr"])

    def state(self) -> dict[str, Any]:
        return {}

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state` returned."""

    def state_dict(self) -> dict[str, Any]:
        """The state as text, which a checkpoint's file holds beside the tensors. Raises: ConfigError, if it could not be read."""
        content = to_bytes(without_numpy(self.state()))
        if not self._is_readable:  # once, before the first checkpoint
            try:
                from_bytes(content)
            except UnpicklingError as error:
                kind = re.search(r"GLOBAL (\S+)", str(error))
                raise ConfigError.of(
                    "wrong-result",
                    f"{self.name}: expected tensors and plain values in what hooks add to a checkpoint, got "
                    f"{kind[1] if kind else error}",
                ) from error
            self._is_readable = True
        return {self.name: base64.b64encode(content).decode()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.load(from_bytes(base64.b64decode(state[self.name])))


def to_bytes(value: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def from_bytes(content: bytes) -> Any:
    return torch.load(io.BytesIO(content), weights_only=True)


def refuse_keys(key: str, values: Mapping[str, Any], reasons: Mapping[str, str]) -> None:
    """Raises: ConfigError, if a config has a key besides `key` that follows from it."""
    for name, reason in reasons.items():
        if values.get(name) is not None:
            raise ConfigError.of("conflict", f"{name}: expected none with {key}, got one ({reason})")


def fixed_number(key: str, values: Mapping[str, Any], name: str) -> int:
    """The value of `name`, for what follows from `key` before the first epoch. Raises: ConfigError, if a function returns it."""
    try:
        return int(values.get(name) or 1)
    except (TypeError, ValueError):
        raise ConfigError.of("conflict", f"{name}: expected a number with {key}, got {values[name]!r}") from None


def overridden(kind: type, base: type, names: Iterable[str]) -> list[str]:
    """Those methods of a class that are not those of the class of the other trainer from which it is derived."""
    return [name for name in names if getattr(kind, name, None) is not getattr(base, name, None)]
