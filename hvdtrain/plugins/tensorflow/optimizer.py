"""The config's Keras optimizer, and the graph of an update."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy
import tensorflow as tf

from hvdtrain.data.types import Array
from hvdtrain.errors import ConfigError
from hvdtrain.learner import optimizer as common
from hvdtrain.learner.precision import GradientCheck
from hvdtrain.plugins.tensorflow.gradients import (
    Exchange,
    GraphGradients,
    TensorFlowGradients,
    finite_flags,
    scalar,
    to_keras,
)
from hvdtrain.plugins.tensorflow.graph import FlatCall
from hvdtrain.plugins.tensorflow.tensors import ModelVariables, tensorflow_variable

NOT_OPTIMIZERS = ("Optimizer", "LossScaleOptimizer", "MultiOptimizer", "OptimizerMap")
"""Classes in keras.optimizers that a config cannot use by name: base classes and wrappers."""

DEFAULT_RULE = common.DecayRule(
    (keras.layers.LayerNormalization, keras.layers.GroupNormalization, keras.layers.Embedding), biases="(bias|beta)$"
)
"""The parameters of these layers do not decay, nor do biases, as with PyTorch."""


class UpdateGraph:
    """One optimizer step and the changes to the reduced gradients before it: the loss scale, the check for finite gradients,
    noise, clipping.

    Args:
        change: changes the gradients before they are applied.
        adds_noise: whether it adds noise.
        check: decides whether an update is skipped, and has the loss scale.
    """

    def __init__(
        self,
        optimizer: keras.optimizers.Optimizer,
        variables: ModelVariables,
        gradients: GraphGradients,
        change: Callable[[common.UpdateGradients], None],
        adds_noise: bool,
        check: GradientCheck,
    ) -> None:
        self.optimizer = optimizer
        self._names = [name for name, _ in variables.named_of_kind("parameters")]
        self._trained = variables.of_kind("parameters")
        self._variables = [tensorflow_variable(variable) for variable in self._trained]
        self._gradients = gradients
        self._change = change
        self._no_seeds = None if adds_noise else tf.zeros([2], tf.int32)
        self._check = check
        self._graph: Callable[..., tuple[tf.Tensor, tf.Tensor]] | None = None
        self._norm: tf.Tensor | None = None
        self._clips_norm = False  # known when the graph is made
        self._skips_itself = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)

    def apply(
        self,
        reduced: list[Any],
        divisor: tf.Tensor,
        exchange: Exchange,
        learning_rate: float,
        noise_seeds: Callable[[], Array],
        step: int,
    ) -> None:
        """Apply reduced gradients.

        Args:
            reduced: the gradients.
            divisor: their divisor if a normalized loss is the only loss.
            noise_seeds: returns those of the noise, uint32 of shape (2,).
            step: the number of training steps done before the last step of this update.

        Raises:
            TrainingError: too many consecutive updates were skipped.
        """
        if self._graph is None:
            divides = exchange.losses.is_only_loss and bool(exchange.losses.names)
            specs = [self._gradients.specs(exchange), tf.TensorSpec([], tf.float64)]
            specs += [tf.TensorSpec([], tf.float32), tf.TensorSpec([], tf.float32), tf.TensorSpec([2], tf.int32)]
            graph = tf.function(lambda *inputs: self._apply(divides, *inputs), autograph=False)
            self._graph = FlatCall(graph.get_concrete_function(*specs))
        scale = scalar(self._check.factor, tf.float32)
        rate = scalar(learning_rate, tf.float32)
        seeds = tf.constant(noise_seeds().astype("int32")) if self._no_seeds is None else self._no_seeds
        finite, self._norm = self._graph(reduced, divisor, scale, rate, seeds)
        if self._check.is_needed:
            flags = finite.numpy()
            self._check.decide(bool(flags.all()), step, lambda: numpy.array(self._names)[~flags].tolist())
        elif self._skips_itself:
            self._check.count(bool(finite.numpy().all()))

    def gradient_norm(self) -> float | None:
        """The global norm of the last update's gradients before clipping; None if it is not clipped. Waits for a GPU."""
        return float(self._norm) if self._norm is not None and self._clips_norm else None

    def _apply(
        self,
        divides: bool,
        reduced: list[Any],
        divisor: tf.Tensor,
        scale: tf.Tensor,
        learning_rate: tf.Tensor,
        noise_seeds: tf.Tensor,
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """The graph. Returns whether each parameter's gradient is finite, of shape (0,) without a check; and the global norm
        of the gradients before clipping, 0 if the norm is not clipped."""
        optimizer_scale = self.optimizer.scale_loss(tf.ones([]))  # 1 unless the config's optimizer scales the loss itself
        gradients = TensorFlowGradients(reduced, optimizer_scale, noise_seeds)
        if divides:
            gradients.divide(divisor)
        if self._check.scale is not None:
            gradients.divide(scale)
        finite = finite_flags(gradients.values)
        self._change(gradients)
        self._clips_norm = gradients.norm is not None
        norm = tf.cast(tf.zeros([]) if gradients.norm is None else gradients.norm, tf.float32) / optimizer_scale
        self.optimizer.learning_rate = learning_rate
        updates = to_keras(gradients.values, self._variables)
        if not self._check.is_needed:
            applied = tf.stack(finite_flags(gradients.values)) if self._skips_itself else tf.zeros([0], tf.bool)
            self.optimizer.apply(updates, self._trained)
            return applied, norm
        tf.cond(tf.reduce_all(finite), lambda: self._step(updates), lambda: False)
        return tf.stack(finite), norm

    def _step(self, updates: list[Any]) -> bool:
        self.optimizer.apply(updates, self._trained)
        return True


def make_optimizer(spec: dict[str, Any] | str | Any, variables: ModelVariables) -> keras.optimizers.Optimizer:
    """An optimizer from `{"class": "adamw", "weight_decay": 0.01, ...}`, a name, or a function of the trainable variables.

    The learning rate is set at every update. As in PyTorch, `eps` can be given for `epsilon`, and `betas` for `beta_1` and
    `beta_2`.

    Raises:
        ConfigError: there is no such optimizer, or it has no such options.
    """
    trained = variables.of_kind("parameters")
    if isinstance(spec, (list, tuple)):
        raise ConfigError.of(
            "unsupported",
            "optimizer: expected one optimizer for all variables with backend = 'tensorflow', got a list (keras.optimizers.Muon "
            "itself uses AdamW for what is not a matrix; a function can return any optimizer of Keras)",
        )
    if callable(spec) and not isinstance(spec, type):
        optimizer = spec(trained)
        if not isinstance(optimizer, keras.optimizers.Optimizer):
            raise ConfigError.of(
                "wrong-result", f"optimizer: expected a function that returns a Keras optimizer, got {type(optimizer).__name__}"
            )
    else:
        optimizer = _make_by_name({"class": spec} if isinstance(spec, (str, type)) else dict(spec), variables)
    try:
        optimizer.learning_rate = 0.0
    except TypeError:
        raise ConfigError.of(
            "unsupported",
            "optimizer: expected one without a learning rate schedule, got one with a schedule (use dynamic_learning_rate)",
        ) from None
    if not optimizer.built:
        optimizer.build(trained)
    return optimizer


def _make_by_name(options: dict[str, Any], variables: ModelVariables) -> keras.optimizers.Optimizer:
    wanted = options.pop("class")
    classes = {
        name.lower(): member
        for name, member in vars(keras.optimizers).items()
        if isinstance(member, type) and issubclass(member, keras.optimizers.Optimizer) and name not in NOT_OPTIMIZERS
    }
    chosen = common.class_of(wanted, classes, "optimizer.class")
    if "eps" in options:
        options["epsilon"] = options.pop("eps")
    if "betas" in options:
        options["beta_1"], options["beta_2"] = options.pop("betas")
    exempt = _take_undecayed(options, variables)
    optimizer: keras.optimizers.Optimizer = common.construct(chosen, options, "optimizer.", learning_rate=0.0)
    if options.get("weight_decay"):
        optimizer.exclude_from_weight_decay(var_list=exempt)
    return optimizer


def _take_undecayed(options: dict[str, Any], variables: ModelVariables) -> list[Any]:
    """Remove the options about weight decay, and return the variables that do not decay. Raises: ConfigError."""
    if options.pop("param_groups_custom", None) is not None:
        raise ConfigError.of(
            "unsupported",
            "optimizer.param_groups_custom: expected backend = 'torch', got 'tensorflow': a Keras optimizer has one set of "
            f"options for all variables ({common.BLACKLIST} and {common.INCLUDE} choose those that decay)",
        )
    names = {*vars(keras.layers), *(name for owner in variables.owners.values() for name in common.class_names(owner))}
    rule = common.take_decay_rule(options, DEFAULT_RULE, names)
    return [
        variable
        for name, variable in variables.by_name.items()
        if variables.kinds[name] == "parameters" and not rule.decays(variables.owners[name], name, variable)
    ]
