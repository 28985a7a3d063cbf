"""Computing in half precision with TensorFlow: the policies of Keras layers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import keras

from hvdtrain.learner.loss_scale import LossScale
from hvdtrain.learner.precision import Dtype, Precision
from hvdtrain.learner.tensorflow_variables import Parts
from hvdtrain.log import say


@contextmanager
def layers_in(dtype: Dtype) -> Iterator[None]:
    """Keras layers that are made inside of the `with` block compute in a type, with parameters in float32."""
    before = keras.config.dtype_policy()
    if dtype != "float32":  # a config may have set a policy itself
        keras.config.set_dtype_policy(f"mixed_{dtype}")
    try:
        yield
    finally:
        keras.config.set_dtype_policy(before)


def scale_of(precision: Precision, model: Any, parts: Parts, optimizer: Any) -> LossScale | None:
    """How the loss is scaled for a model that was made under a precision; says where the precision means nothing to it."""
    layers = [owner for owner in parts.owners.values() if isinstance(owner, keras.layers.Layer)]
    if precision.dtype != "float32" and not layers:
        kind = type(model).__name__
        say(2, f"mixed_precision: {kind} has no Keras layers, which it is for: it computes in float32 unless it casts itself")
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):  # which the config made itself
        return None
    own = getattr(getattr(model, "dtype_policy", None), "name", "")
    return precision.loss_scale("float16" if own == "mixed_float16" else precision.dtype)
