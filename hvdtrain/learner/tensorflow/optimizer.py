"""Keras optimizers by name."""

from __future__ import annotations

from typing import Any

import keras

from hvdtrain.errors import ConfigError
from hvdtrain.learner.optimizer import BLACKLIST, INCLUDE, DecayRule, class_names, class_of, option_problems, take_decay_rule
from hvdtrain.learner.tensorflow.variables import Parts

NO_OPTIMIZERS = ("Optimizer", "LossScaleOptimizer", "MultiOptimizer", "OptimizerMap")
"""What keras.optimizers has besides optimizers."""

USUAL = DecayRule(
    (keras.layers.LayerNormalization, keras.layers.GroupNormalization, keras.layers.Embedding), biases=("bias", "beta")
)
"""Weight decay leaves these layers' parameters alone, as it does biases; the same as with PyTorch."""


def make_optimizer(spec: dict[str, Any] | str | Any, parts: Parts) -> keras.optimizers.Optimizer:
    """An optimizer from `{"class": "adamw", "weight_decay": 0.01, ...}`, a name, or a function of the trainable variables.

    The learning rate is set at every update. As with PyTorch, `eps` is another name for `epsilon`, and `betas` for
    `beta_1` and `beta_2`.

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
    left_alone = _left_alone(options, parts)
    problems = option_problems(chosen, options, "optimizer.")
    if problems:
        raise ConfigError(problems)
    try:
        made = chosen(learning_rate=0.0, **options)
    except (TypeError, ValueError) as error:
        raise ConfigError([f"optimizer: expected options of {chosen.__name__}, got {options}: {error}"]) from None
    if options.get("weight_decay"):
        made.exclude_from_weight_decay(var_list=left_alone)
    return made


def _left_alone(options: dict[str, Any], parts: Parts) -> list[Any]:
    """The variables that weight decay leaves alone. What the options say of them is taken out. Raises: ConfigError."""
    if options.pop("param_groups_custom", None) is not None:
        raise ConfigError(
            [
                "optimizer.param_groups_custom: expected backend = 'torch', got 'tensorflow': a Keras optimizer has one set of "
                f"options for all variables ({BLACKLIST} and {INCLUDE} choose those that decay)"
            ]
        )
    if not options.get("weight_decay") and any(options.get(name) is not None for name in (BLACKLIST, INCLUDE)):
        raise ConfigError([f"optimizer.weight_decay: expected a positive number beside {BLACKLIST} or {INCLUDE}, got none"])
    known = {*vars(keras.layers), *(name for owner in parts.owners.values() for name in class_names(owner))}
    rule = take_decay_rule(options, USUAL, known)
    return [
        variable
        for name, variable in parts.variables.items()
        if parts.kinds[name] == "parameters" and not rule.decays(parts.owners[name], name, variable)
    ]
