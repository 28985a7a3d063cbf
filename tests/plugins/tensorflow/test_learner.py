"""The TensorFlow learner by itself: one graph for batches of any size, optimizers, random numbers, sparse gradients."""

import dataclasses
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import keras
import numpy
import pytest
import tensorflow as tf
from launching import refused
from learners import BATCH, FRAMES, batch_of, learner_of
from mixed_batches import EXPECTED, NUMBERS, mixed_batches

from hvdtrain.comm.single import SingleCommunicator
from hvdtrain.context import get_run_ctx
from hvdtrain.data.types import Batch, BatchParts, Padded
from hvdtrain.errors import CheckpointError, ConfigError, TrainingError
from hvdtrain.learner.preload import PreloadNames, PreloadRequest
from hvdtrain.plugins.forward.split import split_by_sequence
from hvdtrain.plugins.tensorflow.tensors import variables_of


def linear(**_: Any) -> keras.Model:
    """From 2 features to 1, weights 1 and 1, no bias."""
    model = keras.Sequential([keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")])
    model.build((None, None, 2))
    return model


def squares(*, model: Any, extern_data: dict[str, Any], **_: Any) -> None:
    """The sum of squared outputs of every real frame."""
    data = extern_data["data"]
    get_run_ctx().mark_as_loss(tf.square(tf.boolean_mask(model(data.raw_tensor), data.mask))[:, 0], "square")


def learner(
    train_step: Callable[..., None] = squares,
    get_model: Callable[..., Any] = linear,
    rank: int = 0,
    model_format: str = "npz",
    **keys: Any,
) -> Any:
    options = {"rank": rank, "model_format": model_format}
    return learner_of(get_model, train_step, framework="tensorflow", options=options, **keys)


def kernel(made: Any) -> Any:
    return made.model.trainable_variables[0].numpy()


def test_a_step_of_sgd_on_the_sum_over_real_frames() -> None:
    made = learner()
    made.backward(BATCH)
    made.update(0.01)
    # outputs 3, 7, 11; the gradient of the sum of their squares is 2 * (3 * (1, 2) + 7 * (3, 4) + 11 * (5, 6))
    assert kernel(made)[:, 0].tolist() == pytest.approx([1 - 0.01 * 158, 1 - 0.01 * 200], rel=1e-6)
    assert made.meter.take_scores().means() == {"square": pytest.approx((9 + 49 + 121) / 3)}
    assert made.meter.take_scores().means() == {}
    assert made.meter.take_step_seconds() > 0


def test_statistics_are_sums_beside_the_losses() -> None:
    def step(*, model: Any, extern_data: dict[str, Any], **_: Any) -> None:
        squares(model=model, extern_data=extern_data)
        get_run_ctx().mark_as_statistics(tf.reduce_sum(extern_data["data"].raw_tensor, 1), "frames")
        get_run_ctx().mark_as_statistics(extern_data["data"].seq_lens, "lengths")

    made = learner(step, epoch_scores={"ratio": lambda frames, lengths: {"a": frames[0] / lengths, "b": frames[1]}})
    for _ in range(2):
        made.evaluate(BATCH)
    scores = made.meter.take_scores()
    assert scores.statistics() == {"frames": [18.0, 24.0], "lengths": [6.0]}
    found = made.scoring.compute(SingleCommunicator(), scores, "dev")
    assert found == {"ratio_a": 3.0, "ratio_b": 24.0, "square": pytest.approx((9 + 49 + 121) / 3)}


def test_datasets_with_other_parts_have_their_own_graphs() -> None:
    """One after the other, as dev and test, of which some mix datasets."""

    def step(*, model: Any, extern_data: dict[str, Any], **_: Any) -> None:
        data = extern_data["data"]
        outputs = tf.boolean_mask(model(data.raw_tensor), data.mask)[:, 0]
        get_run_ctx().mark_as_loss(outputs, "outputs", seq_lens=data.seq_lens)

    made = learner(step)
    for _ in range(2):
        for names, expected in ((("a", "b"), {".a": 5.0, ".b": 11.0}), ((), {}), (("c", "d"), {".c": 5.0, ".d": 11.0})):
            parts = BatchParts(names, numpy.array([0, 1])) if names else None
            made.evaluate(dataclasses.replace(BATCH, parts=parts))
            found = made.meter.take_scores().means()
            assert found == {f"outputs{name}": pytest.approx(value) for name, value in {"": 7.0, **expected}.items()}


def test_batches_of_any_length_and_size_share_a_graph_and_another_number_of_axes_has_its_own() -> None:
    def step(*, model: Any, extern_data: dict[str, Any], **_: Any) -> None:
        get_run_ctx().mark_as_loss(extern_data["data"].raw_tensor @ model.trainable_variables[0].value, "any")

    made = learner(step)
    for length, size in ((2, 2), (5, 1), (3, 7), (1, 4)):
        frames = numpy.ones((size, length, 2), numpy.float32)
        batch = batch_of(frames)
        made.backward(batch)
        made.update(0.01)
        made.evaluate(batch)
    assert made.graphs.traces == 2  # training and evaluation
    with_an_axis_more = numpy.ones((2, 3, 1, 2), numpy.float32)
    made.evaluate(batch_of(with_an_axis_more, [3, 1]))
    assert made.graphs.traces == 3


def test_epoch_and_step_of_the_context_go_on_inside_of_the_graph() -> None:
    def step(*, model: Any, **_: Any) -> None:
        context = get_run_ctx()
        get_run_ctx().mark_as_loss(tf.reduce_sum(model.trainable_variables[0].value), "any")
        context.mark_as_loss(tf.cast(100 * context.epoch + context.step, tf.float32), "where", as_error=True)

    made = learner(step)
    seen = []
    for epoch in (1, 2):
        made.begin_epoch(epoch, 2 * (epoch - 1))
        for _ in range(2):
            made.backward(BATCH)
            made.update(0.0)
            seen.append(made.meter.take_scores().means()["where"])
    assert seen == [100.0, 101.0, 202.0, 203.0]
    assert made.graphs.traces == 1


def test_clipping_by_norm_and_by_value() -> None:
    by_norm = learner(gradient_clip_global_norm=1.0)
    by_norm.backward(BATCH)
    by_norm.update(1.0)
    assert numpy.linalg.norm(kernel(by_norm) - 1) == pytest.approx(1.0, rel=1e-4)
    by_value = learner(gradient_clip=0.25)
    by_value.backward(BATCH)
    by_value.update(1.0)
    assert kernel(by_value).tolist() == [[0.75], [0.75]]


def test_an_evaluation_changes_nothing_and_a_rank_without_a_batch_adds_zeros() -> None:
    made = learner()
    made.evaluate(BATCH)
    assert kernel(made).tolist() == [[1.0], [1.0]]
    made.backward(BATCH)
    made.update(0.0)
    made.backward(None)
    made.update(1.0)
    assert kernel(made).tolist() == [[1.0], [1.0]]


def test_a_normalized_loss_is_a_mean_and_a_scale_is_a_factor() -> None:
    def step(*, model: Any, extern_data: dict[str, Any], **_: Any) -> None:
        data = extern_data["data"]
        values = tf.square(tf.boolean_mask(model(data.raw_tensor), data.mask))[:, 0]
        get_run_ctx().mark_as_loss(values, "mean", use_normalized_loss=True, scale=2.0)
        get_run_ctx().mark_as_loss(values, "share", as_error=True, custom_inv_norm_factor=tf.constant([4.0, 6.0]))

    seen: dict[str, Any] = {}
    made = learner(step)
    made.observer = seen.update
    made.backward(BATCH)
    made.update(0.01)
    assert [values[:, 0].tolist() for values in seen.values()] == [pytest.approx([158 * 2 / 3, 200 * 2 / 3])]
    assert kernel(made)[:, 0].tolist() == pytest.approx([1 - 0.01 * 158 * 2 / 3, 1 - 0.01 * 200 * 2 / 3], rel=1e-6)
    assert made.meter.take_scores().means() == {"mean": pytest.approx(179 / 3), "share": pytest.approx(17.9)}


def twice(*, model: Any, **_: Any) -> None:
    for _ in range(2):
        get_run_ctx().mark_as_loss(model.trainable_variables[0].value, "same")


@pytest.mark.parametrize(
    ("train_step", "message"),
    [
        (lambda **_: None, "expected a call of hvdtrain.get_run_ctx().mark_as_loss(...), got none"),
        (lambda **_: get_run_ctx().mark_as_loss(tf.ones(2), "constant"), "expected a loss that depends on the model"),
        (twice, "a unique name for every loss, got 'same' twice"),
    ],
)
def test_what_a_train_step_may_not_do(train_step: Callable[..., None], message: str) -> None:
    with pytest.raises(ConfigError, match="train_step: ") as caught:
        learner(train_step).backward(BATCH)
    assert message in str(caught.value)


def test_a_model_that_is_none_or_has_not_all_of_its_variables() -> None:
    with refused("get_model: wrong-result"):
        learner(get_model=lambda **_: 3)
    with refused("get_model: wrong-result"):
        learner(get_model=lambda **_: keras.Sequential([keras.layers.Dense(1)]))

    class Late(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.early, self.late = keras.layers.Dense(1), keras.layers.Dense(1)
            self.early.build((None, 2))

        def call(self, frames: Any) -> Any:
            return self.late(self.early(frames))

    with refused("get_model: wrong-result"):
        learner(get_model=lambda **_: Late()).backward(BATCH)
    with refused("device: unknown-value"):
        learner(device="tpux")


def test_optimizers_by_name_and_their_options() -> None:
    def model(**_: Any) -> keras.Model:
        made = keras.Sequential([keras.layers.Dense(2), keras.layers.LayerNormalization(), keras.layers.Dense(1)])
        made.build((None, None, 2))
        return made

    made = learner(get_model=model, optimizer={"class": "AdamW", "eps": 1e-6, "weight_decay": 0.5, "betas": (0.8, 0.9)})
    assert isinstance(made.graphs.optimizer, keras.optimizers.AdamW)
    assert (made.graphs.optimizer.epsilon, made.graphs.optimizer.beta_1, made.graphs.optimizer.beta_2) == (1e-6, 0.8, 0.9)
    decayed = [name for name, variable in made.variables.by_name.items() if made.graphs.optimizer._use_weight_decay(variable)]
    assert decayed == ["layers.0.kernel", "layers.2.kernel"]
    assert isinstance(learner(optimizer="sgd").graphs.optimizer, keras.optimizers.SGD)
    assert isinstance(learner(optimizer=lambda variables: keras.optimizers.Adam()).graphs.optimizer, keras.optimizers.Adam)
    with refused("optimizer.class: unknown-value"):
        learner(optimizer={"class": "adamm"})
    with refused("optimizer.rho: unknown-key"):
        learner(optimizer={"class": "sgd", "rho": 0.9})
    with refused("optimizer: wrong-result"):
        learner(optimizer=lambda variables: 3)
    schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.9)
    with refused("optimizer: unsupported"):
        learner(optimizer=lambda variables: keras.optimizers.SGD(schedule))


class Drawing(tf.Module):
    """Draws from everything that a model may draw from."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = tf.Variable([1.0])
        self.dropout = keras.layers.Dropout(0.5)
        self.generator = tf.random.Generator.from_seed(1)


def test_dropout_differs_between_ranks_and_steps_and_comes_back_after_a_restart() -> None:
    def step(*, model: Any, **_: Any) -> None:
        get_run_ctx().mark_as_loss(model.weight, "any")
        drawn = {
            "dropout": model.dropout(tf.ones([64]), training=True) * tf.range(64.0),
            "keras": keras.random.uniform([1]),
            "generator": model.generator.uniform([1]),
        }
        for name, values in drawn.items():
            get_run_ctx().mark_as_loss(values, name, as_error=True)

    assert [name for name, _ in learner(step, get_model=lambda **_: Drawing()).modules()] == ["", "dropout"]
    drawn: dict[tuple[int, int], dict[str, float]] = {}
    for rank, first_step in ((0, 0), (1, 0), (0, 1)):
        made = learner(step, get_model=lambda **_: Drawing(), rank=rank)
        made.begin_epoch(1, first_step)
        for number in range(first_step, 2):
            made.backward(BATCH)
            made.update(0.0)
            means = made.meter.take_scores().means()
            if first_step:
                assert means == drawn[rank, number]
            drawn[rank, number] = means
    for name in ("dropout", "keras", "generator"):
        assert len({means[name] for means in drawn.values()}) == 4


def test_variables_of_a_module_that_holds_keras_layers_in_lists() -> None:
    class Mixed(tf.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = tf.Variable(2.0)
            self.blocks = [keras.layers.Dense(1) for _ in range(2)]
            self.named = {"norm": keras.layers.BatchNormalization(), "count": tf.Variable(0, trainable=False)}
            for layer in (*self.blocks, self.named["norm"]):
                layer.build((None, 1))
            self.blocks[1].trainable = False

    parts = variables_of(Mixed())
    assert parts.kinds == {
        "scale": "parameters",
        "blocks.0.kernel": "parameters",
        "blocks.0.bias": "parameters",
        "blocks.1.kernel": "frozen",
        "blocks.1.bias": "frozen",
        "named.norm.gamma": "parameters",
        "named.norm.beta": "parameters",
        "named.norm.moving_mean": "statistics",
        "named.norm.moving_variance": "statistics",
        "named.count": "counters",
    }


def test_a_large_embedding_gets_the_rows_that_were_touched_once_each() -> None:
    class Table(tf.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = tf.Variable(tf.zeros([300_000, 2]))
            self.small = tf.Variable(tf.zeros([3, 2]))

    def step(*, model: Any, extern_data: dict[str, Any], **_: Any) -> None:
        indices = tf.constant([5, 7, 5])
        get_run_ctx().mark_as_loss(tf.gather(model.table, indices) * [1.0, 2.0], "large")
        get_run_ctx().mark_as_loss(tf.gather(model.small, [1, 1]), "small")

    seen: dict[str, Any] = {}
    made = learner(step, get_model=lambda **_: Table(), gradient_clip_global_norm=1e9)
    made.observer = seen.update
    for _ in range(2):
        made.backward(BATCH)
        made.update(1.0)
    table = made.model.table.numpy()
    assert table[5].tolist() == [-4.0, -8.0]
    assert table[7].tolist() == [-2.0, -4.0]
    assert numpy.abs(table).sum() == 18.0
    assert made.model.small.numpy().tolist() == [[0.0, 0.0], [-4.0, -4.0], [0.0, 0.0]]
    assert seen["small"].tolist() == [[0.0, 0.0], [2.0, 2.0], [0.0, 0.0]]
    assert seen["table"].shape == (300_000, 2), "an observer gets the whole gradient"
    assert (seen["table"][5].tolist(), seen["table"].sum()) == ([2.0, 4.0], 9.0)
    clipped = learner(step, get_model=lambda **_: Table(), gradient_clip_global_norm=1.0)
    clipped.backward(BATCH)
    clipped.update(1.0)
    norm = numpy.sqrt(sum(numpy.square(variable.numpy()).sum() for variable in (clipped.model.table, clipped.model.small)))
    assert norm == pytest.approx(1.0, rel=1e-4)  # twice the same row counts as their sum


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16", "bfloat16"])
def test_mixed_precision_by_keras_policies(policy: str, tmp_path: Path) -> None:
    def model(**_: Any) -> keras.Model:
        made = keras.Sequential([keras.layers.Dense(1, use_bias=False, kernel_initializer="ones", dtype=policy)], name="half")
        made.dtype_policy = policy
        made.build((None, None, 2))
        return made

    made = learner(get_model=model, gradient_clip_global_norm=1.0)
    before = numpy.asarray(made.model.trainable_variables[0]).astype(numpy.float32)
    for _ in range(12):  # the first steps of float16 find out how far the loss may be scaled up
        if numpy.array_equal(numpy.asarray(made.model.trainable_variables[0]).astype(numpy.float32), before):
            made.backward(BATCH)
            made.update(1.0)
    after = numpy.asarray(made.model.trainable_variables[0]).astype(numpy.float32)
    assert numpy.linalg.norm(after - before) == pytest.approx(1.0, rel=1e-2)
    assert (made.meter.loss_scale is not None) == (policy == "mixed_float16")
    made.state.contents({}).write(tmp_path / "model", tmp_path / "optimizer")
    again = learner(get_model=model, gradient_clip_global_norm=1.0)
    again.state.load(tmp_path / "model", tmp_path / "optimizer")
    assert numpy.array_equal(numpy.asarray(again.model.trainable_variables[0]).astype(numpy.float32), after)


@pytest.mark.parametrize("suffix", ["npz", "safetensors"])
def test_a_checkpoint_brings_everything_back_and_a_wrong_or_damaged_one_changes_nothing(tmp_path: Path, suffix: str) -> None:
    files = tmp_path / f"model.{suffix}", tmp_path / "model.opt.npz"
    made = learner(optimizer="adam", model_format=suffix)
    made.backward(BATCH)
    made.update(0.1)
    progress = {"step": 1, "history": [{"score": 0.1, "nothing": float("nan")}]}
    copied = [made.state.copied(made.state.contents(progress)) for _ in range(2)][1]
    made.state.contents(copied.progress).write(*files)
    again = learner(optimizer="adam")
    progress = again.state.load(*files)
    assert (progress["step"], progress["history"][0]["score"]) == (1, 0.1)
    for one in (made, again):
        one.backward(BATCH)
        one.update(0.1)
    assert numpy.array_equal(kernel(made), kernel(again))
    late = tmp_path / f"late.{suffix}", tmp_path / "late.opt.npz"
    copied.write(*late)  # as it was then, whatever has been trained since
    assert [file.stat().st_size for file in late] == [file.stat().st_size for file in files]
    again.state.load(*late)
    again.backward(BATCH)
    again.update(0.1)
    assert numpy.array_equal(kernel(made), kernel(again))
    with pytest.raises(CheckpointError, match="expected the state of the optimizer SGD for this model, got another"):
        learner(optimizer="sgd").state.load(*files)
    content = files[0].read_bytes()
    for damaged in (content[: len(content) // 2], content.replace(b"layers.0.kernel", b"layers.1.kernel"), b""):
        files[0].write_bytes(damaged)
        fresh = learner(optimizer="adam")
        with pytest.raises(CheckpointError, match=rf"model\.{suffix}: expected"):
            fresh.state.load(*files)
        assert kernel(fresh).tolist() == [[1.0], [1.0]]


def test_an_optimizers_state_that_is_damaged_is_refused_by_parameter(tmp_path: Path) -> None:
    files = tmp_path / "model.npz", tmp_path / "model.opt.npz"
    made = learner(optimizer="adam")
    made.backward(BATCH)
    made.update(0.1)
    made.state.contents({"step": 1}).write(*files)
    with numpy.load(files[1]) as stored:
        arrays = {name: stored[name] for name in stored.files}
    [name] = [name for name in arrays if "velocity" in name]
    for says_shapes in (True, False):
        progress = json.loads(arrays["progress"].tobytes())
        if not says_shapes:
            del progress["shapes"]
        kept = {**arrays, "progress": numpy.frombuffer(json.dumps(progress).encode(), numpy.uint8)}
        for changed in ({one: kept[one] for one in kept if one != name}, {**kept, name: kept[name][:1]}):
            numpy.savez(files[1], **changed)
            with pytest.raises(
                CheckpointError, match=rf"model.opt.npz: expected .*{name.rpartition('/')[2]}.*of .*layers.0.kernel"
            ):
                learner(optimizer="adam").state.load(*files)


def test_strings_and_wide_integers_reach_the_graph() -> None:
    def step(*, model: Any, extern_data: dict[str, Any], **_: Any) -> None:
        assert extern_data["words"].raw_tensor.dtype == tf.string
        get_run_ctx().mark_as_loss(model(extern_data["data"].raw_tensor), "any")
        length = tf.strings.length(extern_data["words"].raw_tensor)
        get_run_ctx().mark_as_loss(length, "length", as_error=True)
        get_run_ctx().mark_as_loss(extern_data["classes"].raw_tensor, "class", as_error=True)

    words = Padded(numpy.array([["a", "bcd"], ["", ""]], dtype=object), numpy.array([2, 0], numpy.int32))
    classes = Padded(numpy.array([[65535], [1]], numpy.uint16), numpy.array([1, 1], numpy.int32))
    made = learner(step)
    made.backward(Batch({**BATCH.data, "words": words, "classes": classes}, BATCH.indices))
    assert made.meter.take_scores().means() == {"any": 5.25, "length": 1.0, "class": 32768.0}


def test_outputs_of_a_forward_step_by_sequence() -> None:
    def forward_step(*, model: Any, extern_data: dict[str, Any], **_: Any) -> None:
        data = extern_data["data"]
        get_run_ctx().mark_as_default_output(model(data.raw_tensor), seq_lens=data.seq_lens)
        get_run_ctx().mark_as_output(tf.reduce_sum(data.raw_tensor, [1, 2]), "sum")
        get_run_ctx().mark_as_output(tf.reduce_sum(data.raw_tensor, 1), "sums")

    first, second = split_by_sequence(learner(forward_step=forward_step).forward(BATCH), BATCH)
    assert first["output"].tolist() == [[3.0], [7.0]]
    assert second["output"].tolist() == [[11.0]]
    assert (first["sum"], second["sum"]) == (10.0, 11.0)
    assert first.vectors == {"sums"}
    with refused("forward_step: wrong-call"):
        learner(forward_step=lambda **_: None).forward(BATCH)
    with refused("forward_step: wrong-result"):
        split_by_sequence(
            learner(forward_step=lambda **_: get_run_ctx().mark_as_default_output(tf.zeros([3]))).forward(BATCH), BATCH
        )


def test_an_update_with_a_gradient_that_is_no_number_is_left_out() -> None:
    broken = Batch({"data": Padded(FRAMES * numpy.float32("nan"), numpy.array([2, 1], numpy.int32))}, numpy.array([4, 5]))
    made = learner(num_allowed_consec_invalid_gradient_steps=1)
    for batch in (broken, BATCH, broken):
        made.backward(batch)
        made.update(0.01)
    assert kernel(made)[:, 0].tolist() == pytest.approx([1 - 0.01 * 158, 1 - 0.01 * 200], rel=1e-6)
    assert made.meter.take_scores().means() == {"square": pytest.approx((9 + 49 + 121) / 3)}
    assert made.meter.take_updates() == (1, 2)
    made.evaluate(broken)
    assert numpy.isnan(made.meter.take_scores().means()["square"])
    made.backward(broken)
    with pytest.raises(TrainingError, match=r"after 1 updates were skipped, got others in step 3 .*layers\.0\.kernel"):
        made.update(0.01)
    told = learner()
    told.backward(broken)
    [found] = told.meter.take_not_finite()
    assert (found.step, found.loss, found.indices, found.parameters) == (0, "square", (4, 5), ())


def test_a_rank_saves_what_it_has_of_its_own_and_takes_over_from_other_files(tmp_path: Path) -> None:
    made = learner(optimizer="adam")
    made.backward(BATCH)
    made.update(0.1)
    made.state.write_rank(tmp_path / "own.npz", ["parameters", "optimizer"])
    again = learner(optimizer="adam")
    again.state.load_rank(tmp_path / "own.npz", ["parameters", "optimizer"])
    for one in (made, again):
        one.backward(BATCH)
        one.update(0.1)
    assert numpy.array_equal(kernel(made), kernel(again))
    numpy.savez(tmp_path / "theirs.npz", weight=numpy.array([[3.0], [4.0]], numpy.float32))
    in_order = PreloadRequest(
        tmp_path / "theirs.npz", "model", lambda ours, theirs: PreloadNames(dict(zip(ours, theirs, strict=True)), {})
    )
    found = again.state.preload(in_order)
    assert found[0] == found[1] == list(again.variables.by_name)
    assert kernel(again).tolist() == [[3.0], [4.0]]
    assert [float(number) for number in again.numbers([1.0, 0.5])] == [1.0, 0.5]


class Masked(keras.Model):
    """Leaves out what a mask leaves out."""

    def __init__(self) -> None:
        super().__init__()
        self.last = keras.layers.Dense(1)

    def call(self, frames: Any, mask: Any, training: bool = False) -> Any:
        return self.last(frames) * tf.cast(mask[..., None], tf.float32)


class OfDict(Masked):
    """Takes both in a dict."""

    def call(self, given: dict[str, Any], training: bool = False) -> Any:
        return super().call(given["frames"], given["mask"])


class Recurrent(Masked):
    """Recurrent layers, of which one leaves out frames of zeros, too."""

    def __init__(self) -> None:
        super().__init__()
        self.masking = keras.layers.Masking()
        self.gru = keras.layers.Bidirectional(keras.layers.GRU(4, return_sequences=True))
        self.lstm = keras.layers.LSTM(3, return_sequences=True)

    def call(self, frames: Any, mask: Any, training: bool = False) -> Any:
        return self.last(self.lstm(self.gru(self.masking(frames)), mask=mask))


CALLS: dict[str, tuple[type[Masked], Callable[..., Any], str]] = {
    "keyword": (Masked, lambda model, frames, mask: model(frames, mask=mask, training=False), "frames, mask"),
    "recurrent": (Recurrent, lambda model, frames, mask: model(frames, mask=mask, training=False), "frames, mask"),
    "positional": (Masked, lambda model, frames, mask: model(frames, mask), "frames, mask"),
    "names": (Masked, lambda model, frames, mask: model(frames=frames, mask=mask), "frames, mask"),
    "dict": (OfDict, lambda model, frames, mask: model({"frames": frames, "mask": mask}), "given_frames, given_mask"),
}


@pytest.mark.parametrize(
    "called", [pytest.param(name, marks=pytest.mark.slow) if name == "recurrent" else name for name in CALLS]
)
def test_a_model_with_masks_is_exported_with_all_inputs_of_any_size(called: str, tmp_path: Path) -> None:
    made_by, call, inputs = CALLS[called]

    def get_model(**_: Any) -> keras.Model:
        model = made_by()
        call(model, tf.ones([1, 1, 2]), tf.ones([1, 1], tf.bool))
        return model

    def train_step(*, model: Any, extern_data: dict[str, Any], **_: Any) -> None:
        data = extern_data["data"]
        scores = tf.boolean_mask(call(model, data.raw_tensor, data.mask), data.mask)
        get_run_ctx().mark_as_loss(tf.square(scores)[:, 0], "square")

    made = learner(train_step, get_model)
    _, saved = made.export(BATCH, tmp_path)
    assert saved.problem is None
    assert f"outputs = model.serve({inputs})" in saved.how_to_load
    first, second = inputs.split(", ")
    assert saved.takes == f"{first} float32 (any, any, 2), {second} bool (any, any); fixed: axis 2 of {first} at 2"
    model = tf.saved_model.load(str(tmp_path / "saved_model"))
    for lengths in ([7, 2, 4], [1], [12, 5]):
        frames, mask = tf.random.normal([len(lengths), max(lengths), 2]), tf.sequence_mask(lengths)
        frames *= tf.cast(tf.random.uniform(mask.shape + [1]) < 0.7, tf.float32)  # some frames of zeros for Masking
        numpy.testing.assert_allclose(model.serve(frames, mask), call(made.model, frames, mask), rtol=1e-5, atol=1e-6)


class Two(tf.Module):
    """Two matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = tf.Variable(tf.ones([2, 2])), tf.Variable(tf.ones([2, 1]))

    def __call__(self, frames: Any) -> Any:
        return frames @ self.first @ self.last


def dense(**_: Any) -> keras.Model:
    model = keras.Sequential([keras.layers.Dense(2), keras.layers.Dense(1)])
    model.build((None, None, 2))
    return model


def frozen_at_first(**_: Any) -> keras.Model:
    model = dense()
    model.layers[0].trainable = False
    return model


CHANGES: dict[str, tuple[Callable[..., Any], Callable[[Any], object], str]] = {
    "replaced": (
        lambda **_: Two(),
        lambda model: setattr(model, "last", tf.Variable(tf.ones([2, 1]))),
        "others since training began: last ",
    ),
    "made": (
        lambda **_: Two(),
        lambda model: setattr(model, "late", tf.Variable(tf.ones([2, 1]))),
        "others since training began: late ",
    ),
    "unfrozen": (
        frozen_at_first,
        lambda model: setattr(model.layers[0], "trainable", True),
        "others since training began: layers.0.kernel, layers.0.bias ",
    ),
    "frozen": (
        dense,
        lambda model: setattr(model.layers[0], "trainable", False),
        "some that are frozen since: layers.0.kernel, layers.0.bias ",
    ),
}
"""What the config's code may do to variables while it trains: the graphs would never notice."""


@pytest.mark.parametrize("change", CHANGES)
def test_variables_that_the_optimizer_does_not_have_are_an_error(change: str) -> None:
    """When an epoch begins, after its first update, and before a model is saved."""
    get_model, apply, told = CHANGES[change]
    made = learner(get_model=get_model)
    made.begin_epoch(1, 0)
    made.backward(BATCH)
    made.update(0.01)
    made.flush()
    made.begin_epoch(2, 1)
    apply(made.model)
    made.backward(BATCH)
    for call in (lambda: made.update(0.01), made.flush, lambda: made.begin_epoch(3, 2)):
        with pytest.raises(ConfigError, match=f"get_model: expected the parameters that are trained, got {told}"):
            call()


def test_fresh_statistics_are_the_mean_of_those_of_the_batches() -> None:
    def get_model(**_: Any) -> keras.Model:
        model = keras.Sequential([keras.layers.BatchNormalization(), keras.layers.Dropout(0.5), keras.layers.Dense(1)])
        model.build((None, None, 2))
        return model

    def train_step(*, model: Any, extern_data: dict[str, Any], **_: Any) -> None:
        outputs = model(extern_data["data"].raw_tensor, training=get_run_ctx().train_flag)
        get_run_ctx().mark_as_loss(tf.square(outputs), "square")

    made = learner(train_step, get_model)
    arrays = [numpy.random.default_rng(number).normal(number, 2, (3, 4, 2)).astype("float32") for number in range(3)]
    batches = [batch_of(values) for values in arrays]
    before = made.state.model_tensors()
    [name] = made.fresh_statistics([batches[0], None, *batches[1:]], list)
    norm = dict(made.modules())[name]
    assert norm.momentum == 0.99
    axes = [values.reshape(-1, 2) for values in arrays]
    numpy.testing.assert_allclose(norm.moving_mean, numpy.mean([rows.mean(0) for rows in axes], 0), rtol=1e-5)
    numpy.testing.assert_allclose(norm.moving_variance, numpy.mean([rows.var(0) for rows in axes], 0), rtol=1e-5)
    changed = [name for name, values in made.state.model_tensors().items() if not numpy.array_equal(values, before[name])]
    assert len(changed) == 2, changed


def mark_frames(*, extern_data: dict[str, Any], **_: Any) -> None:
    """The frames without padding as one loss, and as they come as another."""
    data, context = extern_data["data"], get_run_ctx()
    rows = data.raw_tensor[..., 0]
    context.mark_as_loss(rows if rows.shape.rank == 1 else tf.boolean_mask(rows, data.mask), "flat", seq_lens=data.seq_lens)
    context.mark_as_loss(rows, "rows", seq_lens=data.seq_lens)
    context.mark_as_loss(tf.concat([data.raw_tensor] * 2, -1), "wide", seq_lens=data.seq_lens)


def test_scores_of_each_dataset_of_a_mix_whatever_the_form_of_batches() -> None:
    made = learner(mark_frames)
    for form, batch in mixed_batches().items():
        made.evaluate(batch)
        scores = made.meter.take_scores().means()
        assert {name: scores[name] for name in EXPECTED} == pytest.approx(EXPECTED)
        in_rows = (21 / 9, 18 / 6, 3 / 3) if form == "padded" else tuple(EXPECTED.values())
        for loss in ("rows", "wide"):
            assert [scores[f"{loss}{part}"] for part in ("", ".a", ".b")] == pytest.approx(in_rows)
    made.evaluate(replace(batch, parts=BatchParts(("c", "d"), NUMBERS)))  # as an evaluation of another mix
    assert {name.partition(".")[2] for name in made.meter.take_scores().means()} == {"", "c", "d"}
    made.evaluate(replace(batch, parts=None))
    assert made.meter.take_scores().means().keys() == {"flat", "rows", "wide"}


def test_seq_lens_of_other_elements_than_a_loss_has_are_an_error() -> None:
    def step(*, extern_data: dict[str, Any], **_: Any) -> None:
        data = extern_data["data"]
        get_run_ctx().mark_as_loss(tf.boolean_mask(data.raw_tensor, data.mask)[:, 0], "flat", seq_lens=data.seq_lens - 1)

    with pytest.raises(tf.errors.InvalidArgumentError, match="expected a loss with the elements of all sequences.*flat"):
        learner(step).evaluate(mixed_batches()["padded"])


class Scaled(keras.layers.Layer):
    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale, self.own_rank = scale, 3

    def call(self, values: Any) -> Any:
        return self.scale * values


def test_settings_of_layers_are_compared_with_those_of_other_ranks() -> None:
    def made(scale: float, rate: float) -> dict[str, str]:
        model = keras.Sequential([Scaled(scale), keras.layers.Dropout(rate), keras.layers.Dense(1)])
        model.build((None, None, 2))
        return dict(learner(get_model=lambda **_: model).kinds_of_modules())

    first, again, other = made(1.0, 0.1), made(1.0, 0.1), made(2.0, 0.2)
    assert first == again
    assert sum(first[name] != other[name] for name in first) == 2
    assert "scale=1.0" in " ".join(first.values())
    assert "own_rank" not in " ".join(first.values())
