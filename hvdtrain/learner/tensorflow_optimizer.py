"""Keras optimizers by name."""

from __future__ import annotations

from typing import Any

import keras

from hvdtrain.errors import ConfigError
from hvdtrain.learner.by_name import class_of
from hvdtrain.learner.tensorflow_variables import Parts

NO_OPTIMIZERS = ("Optimizer", "LossScaleOptimizer", "MultiOptimizer", "OptimizerMap")
"""What keras.optimizers has besides optimizers."""


def make_optimizer(spec: dict[str, Any] | str | Any, parts: Parts, loss_scaling: bool = False) -> keras.optimizers.Optimizer:
    """An optimizer from `{"class": "adamw", "weight_decay": 0.01, ...}`, a name, or a function of the trainable variables.

    The learning rate is set at every update. As with PyTorch, `eps` is another name for `epsilon`, and `betas` for
    `beta_1` and `beta_2`.

    Args:
        loss_scaling: for a model that computes in float16: scale the loss up and gradients down, by a factor that adapts.

    Raises:
        ConfigError: there is no such optimizer, or it does not take such options.
    """
    trained = parts.of_kind("parameters")
    if callable(spec) and not isinstance(spec, type):
        made = spec(trained)
        if not isinstance(made, keras.optimizers.Optimizer):
            raise ConfigError([f"optimizer: expected a function that returns a Keras optimizer, got {type(made).__name__}"])
    else:
        made = _by_name({"class": spec} if isinstance(spec, (str, type)) else dict(spec), parts)
        if loss_scaling:
            made = keras.optimizers.LossScaleOptimizer(made)
    try:
        made.learning_rate = 0.0
    except TypeError:
        raise ConfigError(
            ["optimizer: expected one without a learning rate of its own, got one with a schedule (use dynamic_learning_rate)"]
        ) from None
    if not made.built:
        made.build(trained)
    return made


def _by_name(options: dict[str, Any], parts: Parts) -> keras.optimizers.Optimizer:
    wanted = options.pop("class")
    known = {
        name.lower(): member
        for name, member in vars(keras.optimizers).items()
        if isinstance(member, type) and issubclass(member, keras.optimizers.Optimizer) and name not in NO_OPTIMIZERS
    }
    chosen = class_of(wanted, known, "optimizer.class")
    if "eps" in options:
        options["epsilon"] = options.pop("eps")
    if "betas" in options:
        options["beta_1"], options["beta_2"] = options.pop("betas")
    try:
        made = chosen(learning_rate=0.0, **options)
    except (TypeError, ValueError) as error:
        raise ConfigError([f"optimizer: expected options of {chosen.__name__}, got {options}: {error}"]) from None
    if options.get("weight_decay"):
        made.exclude_from_weight_decay(var_list=[parts.variables[name] for name in parts.undecayed])
    return made
