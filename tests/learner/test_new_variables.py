"""Variables that the config's code makes, replaces, unfreezes or freezes while it trains: the graphs would never notice."""

from pathlib import Path

import pytest
from launching import hvdtrain

CONFIG = """
import keras
import numpy
import tensorflow as tf

import hvdtrain

CASE = {case!r}


class Model(tf.Module):
    def __init__(self):
        super().__init__()
        self.first = tf.Variable(tf.ones([3, 2]))
        self.last = tf.Variable(tf.ones([2, 2]))

    def __call__(self, frames):
        return frames @ self.first @ self.last


def get_model(**_):
    if CASE in ("replaced", "made"):
        return Model()
    model = keras.Sequential([keras.layers.Dense(2), keras.layers.Dense(2)])
    model(numpy.zeros((1, 4, 3), "float32"))
    model.layers[0].trainable = CASE != "unfrozen"
    return model


def epoch_start(*, epoch, model, **_):
    if epoch == 2 and CASE in ("replaced", "made"):
        setattr(model, "last" if CASE == "replaced" else "late", tf.Variable(tf.ones([2, 2])))
    elif epoch == 2 and CASE in ("unfrozen", "frozen"):
        model.layers[0].trainable = CASE == "unfrozen"


def train_step(*, model, extern_data, **_):
    hvdtrain.get_run_ctx().mark_as_loss(tf.reduce_mean(tf.square(model(extern_data["data"].raw_tensor)), -1), "loss")


backend = "tensorflow"
train = [numpy.full((4, 3), number, numpy.float32) for number in range(6)]
max_seqs = 2
num_epochs = 2
learning_rate = 0.01
num_threads = 1
"""

CASES = {
    "replaced": "got others since training began: last ",
    "made": "got others since training began: late ",
    "unfrozen": "got others since training began: layers.0.kernel, layers.0.bias ",
    "frozen": "got some that are frozen since: layers.0.kernel, layers.0.bias ",
}


@pytest.mark.parametrize("case", [*CASES, "nothing"])
def test_variables_that_the_optimizer_does_not_have_are_an_error(case: str, tmp_path: Path) -> None:
    config = tmp_path / "config.py"
    config.write_text(CONFIG.format(case=case))
    ended = hvdtrain(config, {"model": tmp_path / "model"})
    told = f"get_model: expected the variables that are trained, {CASES.get(case)}"
    assert (ended.status, told in ended.err) == ((0, False) if case == "nothing" else (2, True)), ended.err
    assert bool(list(tmp_path.glob("model.002*"))) == (case == "nothing")
