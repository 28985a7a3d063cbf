"""What each consumer of a model's tensors does with each role, in PyTorch and TensorFlow; ranks are threads."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from learners import learner_of
from thread_ranks import on_ranks
from trainings import marked

from hvdtrain.comm.base import Communicator
from hvdtrain.errors import CheckpointError, ConfigError
from hvdtrain.learner.frameworks import FRAMEWORKS
from hvdtrain.learner.model_state import ROLES, Role
from hvdtrain.learner.preload import PreloadNames, PreloadRequest
from hvdtrain.learner.reducer import EpochStart, FinishedUpdate
from hvdtrain.learner.reducers import ReduceKeys
from hvdtrain.learner.state_base import StateBase
from hvdtrain.plugins.average.averages import mean_since
from hvdtrain.plugins.average.means import mean_of_files
from hvdtrain.plugins.average.running import RunningAverage
from hvdtrain.runtime.timer import Timer

INFINITE = float("inf")
LOWEST = float(numpy.finfo(numpy.float32).min)

TRAINED: dict[str, tuple[str, Any]] = {
    "weight": ("float32", [1.0, 2.0]),
    "narrow": ("bfloat16", [0.5]),
    "complex": ("complex64", [1 + 2j]),
}
OTHERS: dict[str, tuple[str, Any]] = {
    "frozen": ("float32", [0.1]),
    "statistic": ("float32", [0.1, -INFINITE]),
    "code": ("complex64", [1 + 1j]),
    "mask": ("float32", [[0.0, -INFINITE], [0.0, 0.0]]),
    "lowest": ("float32", [[0.0, LOWEST], [0.0, 0.0]]),
    "sines": ("float64", [0.1, 0.3, 0.7]),
    "counter": ("int64", 0),
    "positions": ("int32", [0, 1, 2]),
    "allowed": ("bool", [True, False]),
}
"""By name, the type and the values of a model's tensors."""

CHANGING: dict[Role, tuple[str, ...]] = {
    "parameters": tuple(TRAINED),
    "statistics": ("statistic", "code"),
    "counters": ("counter",),
}
"""What a batch changes. All others are constants."""


class OfTorch(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for name, (dtype, values) in (TRAINED | OTHERS).items():
            tensor = torch.tensor(values, dtype=getattr(torch, dtype))
            if name in OTHERS and name != "frozen":
                self.register_buffer(name, tensor)
            else:
                setattr(self, name, torch.nn.Parameter(tensor, requires_grad=name in TRAINED))
        self.register_buffer("expanded", torch.tensor([0.1, 0.3]).expand(3, 2))
        self.register_buffer("cache", torch.zeros(1), persistent=False)


def of_tensorflow() -> Any:
    import tensorflow as tf

    made = tf.Module()
    for name, (dtype, values) in (TRAINED | OTHERS).items():
        setattr(made, name, tf.Variable(values, dtype=dtype, trainable=name in TRAINED))
    return made


def state_of(framework: str, comm: Communicator | None = None, **keys: Any) -> StateBase:
    """The state of a new model, the same on all ranks."""
    get_model = {"torch": OfTorch, "tensorflow": of_tensorflow}[framework]
    state: StateBase = learner_of(lambda **_: get_model(), lambda **_: None, comm, framework=framework, **keys).state
    return state


def train_alone(state: StateBase, amount: float) -> None:
    """What a batch changes on one rank, if it changes anything: by about this amount, imaginary parts too."""

    for role, names in CHANGING.items():
        tensors = {name: tensor for name, tensor in state.tensors(role).items() if name in names}
        steps = {name: amount * 1j if "complex" in str(tensor.dtype) else amount for name, tensor in tensors.items()}
        state.set_tensors(role, {name: tensor + (1 if role == "counters" else steps[name]) for name, tensor in tensors.items()})


def arrays(state: StateBase) -> dict[str, numpy.ndarray]:
    """Copies of all tensors by name; those in 16 bits as float32."""
    found = {}
    for role in ROLES:
        for name, tensor in state.tensors(role).items():
            wide = tensor.float() if getattr(tensor, "dtype", None) == torch.bfloat16 else tensor
            found[name] = numpy.array(numpy.asarray(wide))
    return found


def same(one: Mapping[str, numpy.ndarray], other: Mapping[str, numpy.ndarray]) -> bool:
    return one.keys() == other.keys() and all(one[name].tobytes() == other[name].tobytes() for name in one)


def constants(found: Mapping[str, numpy.ndarray]) -> dict[str, numpy.ndarray]:
    changing = {name for names in CHANGING.values() for name in names}
    return {name: values for name, values in found.items() if name not in changing}


FRAMEWORK = pytest.mark.parametrize("framework", ["torch", *marked(["tensorflow"], pytest.mark.slow)])

REDUCERS: dict[str, dict[str, Any]] = {
    "grad": {"reduce_type": "grad"},
    "param": {"reduce_type": "param", "sync_steps": 9},
    "bmuf": {"reduce_type": "param", "sync_steps": 9, "outer_optimizer": {"class": "bmuf", "momentum": 0.0}},
    "groups": {"reduce_type": "param", "sync_steps": 9, "group": 2},
    "int4": {"reduce_type": "param", "sync_steps": 9, "compression": "int4"},
}


@pytest.mark.parametrize("reducer", REDUCERS)
@FRAMEWORK
def test_ranks_average_what_training_has_changed_and_nothing_else(framework: str, reducer: str) -> None:
    if reducer == "int4" and framework != "torch":
        pytest.skip("with PyTorch only")

    def work(comm: Communicator, has_batch: list[tuple[bool, bool]]) -> list[dict[str, numpy.ndarray]]:
        state, sync = state_of(framework, comm), ReduceKeys(**REDUCERS[reducer]).reducer(comm, Timer()).sync
        found = [arrays(state)]
        sync.begin_epoch(state, EpochStart(1, 0, 2, 0.1, is_resumed=False))
        for step, have in enumerate(has_batch, 1):
            if have[comm.rank]:
                train_alone(state, 1.0 + comm.rank)
            sync.after_update(state, FinishedUpdate(have, step))
        with sync.averaged_model(state):
            found.append(arrays(state))
        sync.end_of_epoch(state)
        return [*found, arrays(state)]

    for has_batch, mean in (([(True, True), (True, False)], 2.0), ([(True, False)], 1.0), ([(True, True)], 1.5)):
        for first, saved, last in on_ranks(2, partial(work, has_batch=has_batch)):
            for found in (saved, last):
                assert same(constants(found), constants(first))
                assert found["statistic"] == pytest.approx([0.1 + mean, -INFINITE])
                if "code" in found:
                    assert found["code"] == pytest.approx([1 + 1j * (1 + mean)])
                if reducer not in ("grad", "groups"):  # which average gradients
                    tolerance = 0.01 if reducer == "int4" else 1e-6
                    assert found["weight"] == pytest.approx([1 + mean, 2 + mean], rel=tolerance)
                    assert "complex" not in found or found["complex"] == pytest.approx([1 + 1j * (2 + mean)])
            assert last["counter"] == len(has_batch)


def test_a_buffer_with_another_shape_on_one_rank_ends_all_by_name_and_one_that_is_not_saved_may_have_any() -> None:
    def work(comm: Communicator, name: str) -> None:
        made = learner_of(lambda **_: OfTorch(), lambda **_: None, comm)
        sync = ReduceKeys().reducer(comm, Timer()).sync
        setattr(made.model, name, torch.full((1 + comm.rank,), float(comm.rank)))
        sync.after_update(made.state, FinishedUpdate([True, True], 1))
        sync.end_of_epoch(made.state)
        assert len(getattr(made.model, name)) == 1 + comm.rank

    on_ranks(2, partial(work, name="cache"))
    with pytest.raises(
        ConfigError, match=r"get_model: statistic: .* statistics\[0\] torch.float32 \(1,\) on rank 0 and .* \(2,\)"
    ):
        on_ranks(2, partial(work, name="statistic"))


@FRAMEWORK
def test_averages_over_time_are_wider_than_what_they_average(framework: str, tmp_path: Path) -> None:
    suffix = FRAMEWORKS[framework].suffix
    files = tmp_path / f"model.{suffix}", tmp_path / f"optimizer.{suffix}"
    made = state_of(framework, ema_decay=0.999)
    made.start_average()
    made.average_weights(10_000)  # the initial weights fade quickly
    made.running = RunningAverage(1, made, "series")
    train_alone(made, 1.0)
    for _ in range(299):
        made.average_weights(1)
    mean = mean_since(None, made.running.state)
    assert mean["narrow"] == [1.5]
    assert mean["complex"] == [1 + 3j]
    first = arrays(made)
    made.contents({}).write(*files)
    resumed = state_of(framework, ema_decay=0.999)
    resumed.load(*files)
    assert same(arrays(resumed), first)
    for state in (made, resumed):
        state.average_weights(1)  # by less than bfloat16 can tell
    averages = []
    for state in (made, resumed):
        with state.averaged_weights():
            averages.append(arrays(state))
            assert same(constants(averages[-1]), constants(first))
        assert same(arrays(state), first)
    assert same(*averages)
    assert averages[0]["narrow"] == pytest.approx([1.5 - 0.999**300], abs=0.01)
    assert averages[0]["complex"] == pytest.approx([1 + 3j - 1j * 0.999**300], abs=0.001)


@FRAMEWORK
def test_the_average_of_files(framework: str, tmp_path: Path) -> None:
    made, files = state_of(framework), []
    for number in range(3):
        files.append(tmp_path / f"{number}.{FRAMEWORKS[framework].suffix}")
        made.contents({"step": number}, model_only=True).write_model(files[-1])
        train_alone(made, 1.0)
    first = state_of(framework)
    averaged = state_of(framework)
    with averaged.other_model(mean_of_files(files, FRAMEWORKS[framework])["model"]):
        found = arrays(averaged)
    assert same(arrays(averaged), arrays(first))
    assert same(constants(found), constants(arrays(first)))
    assert (found["weight"].tolist(), found["narrow"], found["complex"], found["counter"]) == ([2.0, 3.0], [1.5], [1 + 3j], 2)
    made.set_tensors("parameters", {"weight": made.tensors("parameters")["weight"] * INFINITE})
    made.contents({"step": 3}, model_only=True).write_model(files[-1])
    with pytest.raises(CheckpointError, match=f"{files[-1]}: weight: expected finite numbers"):
        mean_of_files(files, FRAMEWORKS[framework])


@FRAMEWORK
def test_checkpoints_and_preloads_bring_every_role_back(framework: str, tmp_path: Path) -> None:
    suffix = FRAMEWORKS[framework].suffix
    files = tmp_path / f"model.{suffix}", tmp_path / f"optimizer.{suffix}"
    made = state_of(framework)
    train_alone(made, 1.0)
    made.contents({}).write(*files)
    parts = [role for role in ROLES if made.tensors(role)]
    made.write_rank(tmp_path / f"rank.{suffix}", parts)

    def choose(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> PreloadNames:
        return PreloadNames({name: name for name in ours if name in theirs}, {})

    ways: list[Callable[[StateBase], object]] = [
        lambda state: state.load(*files),
        lambda state: state.load_rank(tmp_path / f"rank.{suffix}", parts),
        lambda state: state.preload(PreloadRequest(files[0], "model", choose)),
    ]
    for way in ways:
        again = state_of(framework)
        assert not same(arrays(again), arrays(made))
        way(again)
        assert same(arrays(again), arrays(made))


def test_a_checkpoint_that_the_next_start_refuses_is_told_when_it_is_made(caplog: pytest.LogCaptureFixture) -> None:
    made = learner_of(lambda **_: OfTorch(), lambda **_: None)
    made.state.contents({})
    assert not caplog.messages
    made.model.register_buffer("bank", torch.zeros(3, 2))
    made.model.cache = torch.zeros(5)
    del made.model.frozen
    made.state.contents({})
    made.state.contents({})
    [told] = caplog.messages
    assert "frozen: (1,) became none, bank: none became (3, 2) (the next start refuses" in told


def test_ranks_files_of_earlier_releases_have_lists(tmp_path: Path) -> None:
    """By the order in the model, with the buffers that it does not save."""
    made = learner_of(lambda **_: OfTorch(), lambda **_: None)
    made.model.statistic += 1
    floating = [buffer for buffer in made.model.buffers() if buffer.is_floating_point()]
    torch.save({"statistics": floating, "parameters": list(made.state.tensors("parameters").values())}, tmp_path / "rank.pt")
    again = state_of("torch")
    with pytest.raises(CheckpointError, match="there is none of code"):  # which was a counter
        again.load_rank(tmp_path / "rank.pt", ("parameters", "statistics"))
    del made.model.code
    again = learner_of(lambda **_: without_code(), lambda **_: None).state
    again.load_rank(tmp_path / "rank.pt", ("parameters", "statistics"))
    assert same(arrays(again), arrays(made.state))


def without_code() -> OfTorch:
    made = OfTorch()
    del made.code
    return made


def test_the_share_of_an_optimizer_goes_to_the_first_rank_only() -> None:
    def work(comm: Communicator) -> None:
        gather, gathered = comm.gather, []
        comm.gather = lambda value, *, name: gathered.append(name) or gather(value, name=name)  # type: ignore[method-assign]
        state = state_of("torch", comm, options={"sharded": comm}, optimizer={"class": "adam"})
        gathered.clear()
        state.gather_state()
        assert not gathered
        assert state._optimizer.is_gathered == (comm.rank == 0)  # type: ignore[attr-defined]

    on_ranks(3, work)


def test_what_a_reducer_keeps_is_not_that_of_a_model_with_another_order(tmp_path: Path) -> None:
    class Reordered(OfTorch):
        def __init__(self) -> None:
            super().__init__()
            self.weight = self._parameters.pop("weight")

    files = tmp_path / "model.pt", tmp_path / "optimizer.pt"
    made = state_of("torch")
    made.shared["anchor"] = list(made.tensors("parameters").values())
    made.contents({}).write(*files)
    state_of("torch").load(*files)
    with pytest.raises(CheckpointError, match="expected the parameters in the order of this config's model"):
        learner_of(lambda **_: Reordered(), lambda **_: None).state.load(*files)
