"""TensorFlow: which variables decay, and computing in half precision."""

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import keras
import numpy
import pytest
import tensorflow as tf
from learners import BATCH, FRAMES, learner_of

from hvdtrain.context import get_run_ctx
from hvdtrain.errors import ConfigError
from hvdtrain.learner.precision import FLOAT32, Precision


def layers(**_: Any) -> keras.Model:
    made = keras.Sequential([keras.layers.Dense(2), keras.layers.LayerNormalization(), keras.layers.Dense(1)])
    made.build((None, None, 2))
    return made


def learner(
    train_step: Callable[..., None] | None = None,
    get_model: Callable[..., Any] = layers,
    precision: Precision = FLOAT32,
    **keys: Any,
) -> Any:
    given = train_step or (lambda **_: None)
    return learner_of(get_model, given, framework="tensorflow", options={"precision": precision}, **keys)


def decayed(**options: Any) -> list[str]:
    made = learner(optimizer={"class": "adamw", "weight_decay": 0.5, **options})
    return [name for name, variable in made.variables.by_name.items() if made.graphs.optimizer._use_weight_decay(variable)]


def test_classes_of_layers_or_a_function_say_what_decays() -> None:
    assert decayed() == ["layers.0.kernel", "layers.2.kernel"]
    assert decayed(weight_decay_modules_blacklist=["keras.layers.Dense"]) == ["layers.1.gamma"]
    assert decayed(weight_decay_modules_blacklist=[keras.layers.Dense]) == ["layers.1.gamma"]

    def include(*, module: Any, full_param_name: str, param: Any, **_: Any) -> bool | None:
        return None if full_param_name == "layers.0.kernel" else len(param.shape) == 1 and isinstance(module, keras.layers.Dense)

    assert decayed(weight_decay_custom_include_check=include) == ["layers.0.kernel", "layers.0.bias", "layers.2.bias"]


def test_what_keras_cannot_do_is_told() -> None:
    with pytest.raises(ConfigError, match=r"got 'Dens' \(did you mean Dense\?\)"):
        decayed(weight_decay_modules_blacklist=["Dens"])
    with pytest.raises(ConfigError, match="param_groups_custom: expected backend = 'torch'.*one set of options"):
        learner(optimizer={"class": "adamw", "param_groups_custom": lambda **_: []})
    with pytest.raises(ConfigError, match=r"momentun: expected options of SGD.*\(did you mean momentum\?\)"):
        learner(optimizer={"class": "sgd", "momentun": 0.9})
    with pytest.raises(ConfigError, match="weight_decay: expected a positive number"):
        learner(optimizer={"class": "sgd", "weight_decay_modules_blacklist": ["Dense"]})


def sums(*, model: Any, extern_data: dict[str, Any], **_: Any) -> None:
    get_run_ctx().mark_as_loss(tf.cast(model(extern_data["data"].raw_tensor), tf.float32), "sum")


def test_layers_of_get_model_compute_in_half_precision_and_other_layers_do_not() -> None:
    before = keras.config.dtype_policy()
    made = learner(sums, precision=Precision("float16"))
    assert [layer.compute_dtype for layer in made.model.layers] == ["float16"] * 3
    assert {str(variable.dtype) for variable in made.model.trainable_variables} == {"float32"}
    assert keras.config.dtype_policy() == before
    assert keras.layers.Dense(1).compute_dtype == "float32"
    made.backward(BATCH)
    made.update(0.1)
    assert made.meter.loss_scale in (65536.0, 32768.0)


def test_a_module_without_keras_layers_computes_as_it_likes_and_is_told_so(caplog: pytest.LogCaptureFixture) -> None:
    class Table(tf.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = tf.Variable(tf.ones([2, 1]))

        def __call__(self, frames: Any) -> Any:
            return frames @ self.table

    class Mixed(Table):
        def __init__(self) -> None:
            super().__init__()
            self.dense = keras.layers.Dense(1)
            self.dense.build((None, 1))

        def __call__(self, frames: Any) -> Any:
            return self.dense(super().__call__(frames))

    logger = logging.getLogger("hvdtrain")
    logger.addHandler(caplog.handler)
    try:
        made = learner(sums, lambda **_: Table(), precision=Precision("float16"))
        assert "mixed_precision: applies to Keras layers, of which Table has none" in caplog.text
        caplog.clear()
        mixed = learner(sums, lambda **_: Mixed(), precision=Precision("bfloat16"))
        assert caplog.text == ""
    finally:
        logger.removeHandler(caplog.handler)
    made.backward(BATCH)
    made.update(0.0)
    assert made.meter.loss_scale == 65536.0  # for modules that cast themselves
    assert mixed.model(tf.constant(FRAMES)).dtype == tf.bfloat16
    mixed.backward(BATCH)
    mixed.update(0.0)
    assert mixed.meter.loss_scale is None


def test_an_optimizer_of_the_config_that_scales_the_loss_itself_is_left_to_it() -> None:
    scaling = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(), initial_scale=8.0)
    made = learner(sums, optimizer=lambda _: scaling, precision=Precision("float16"))
    assert made.meter.loss_scale is None
    made.backward(BATCH)
    made.update(0.1)
    assert made.meter.take_updates() == (1, 0)
    made.backward(replace(BATCH, data={"data": replace(BATCH.data["data"], values=FRAMES * numpy.float32("inf"))}))
    made.update(0.1)
    assert made.meter.take_updates() == (0, 1)
