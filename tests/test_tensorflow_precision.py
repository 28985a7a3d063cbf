"""TensorFlow: which variables decay, and computing in half precision."""

from collections.abc import Callable
from typing import Any

import keras
import pytest

from hvdtrain.comm.single import SingleCommunicator
from hvdtrain.errors import ConfigError
from hvdtrain.learner.base import LearnerKeys
from hvdtrain.learner.tensorflow import TensorFlowLearner, build_tensorflow_learner
from hvdtrain.reduce import GradReduce
from hvdtrain.timer import Timer


def layers(**_: Any) -> keras.Model:
    made = keras.Sequential([keras.layers.Dense(2), keras.layers.LayerNormalization(), keras.layers.Dense(1)])
    made.build((None, None, 2))
    return made


def learner(
    train_step: Callable[..., None] | None = None, get_model: Callable[..., Any] = layers, **keys: Any
) -> TensorFlowLearner:
    options = LearnerKeys(get_model=get_model, train_step=train_step or (lambda **_: None), **{"optimizer": "sgd", **keys})
    reducer = GradReduce(SingleCommunicator(), Timer(), average=False)
    return build_tensorflow_learner(options, reducer, rank=0, local_rank=0, threads=1, seed=1, epoch=1, step=0)


def decayed(**options: Any) -> list[str]:
    made = learner(optimizer={"class": "adamw", "weight_decay": 0.5, **options})
    return [name for name, variable in made.parts.variables.items() if made.optimizer._use_weight_decay(variable)]


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
