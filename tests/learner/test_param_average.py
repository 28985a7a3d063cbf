"""Local updates on ranks that are threads, with PyTorch models: what each kind of sync does, and that stops change nothing."""

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from learners import batch_of, learner_of, problems
from thread_ranks import on_ranks
from torch_ranks import SavedRank
from trainings import marked

from hvdtrain.comm.base import Communicator
from hvdtrain.context import get_run_ctx
from hvdtrain.learner.reducer import EpochStart, FinishedUpdate
from hvdtrain.learner.reducers import ReduceKeys
from hvdtrain.learner.torch.state import TorchState, Unsaved
from hvdtrain.learner.torch.tensors import named_trained
from hvdtrain.plugins.compute.freezing import FrozenUntil
from hvdtrain.runtime.timer import Timer

SIZE = 3
UPDATES = 23
"""Of an epoch: no multiple of the numbers of updates between syncs below."""

BMUF = {"class": "bmuf", "momentum": 0.5}


class Job(SavedRank):
    """A rank whose updates are random numbers: a model's tensors, and a reducer that averages them."""

    def __init__(self, comm: Communicator, is_planned: bool = True, **keys: Any) -> None:
        self.comm = comm
        self.is_planned = is_planned
        self.model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 40))
        with torch.no_grad():
            for number, parameter in enumerate(self.model.parameters()):
                parameter.copy_(torch.linspace(-1, 1, parameter.numel()).reshape(parameter.shape) * (number + 1))
        self.state = TorchState(
            self.model, torch.optim.SGD(self.model.parameters(), 0.1), torch.device("cpu"), None, None, Unsaved()
        )
        self.reducer = ReduceKeys(reduce_type="param", **keys).reducer(comm, Timer())
        self.done = 0

    def freeze(self, steps: dict[str, int]) -> None:
        """As `freeze_until_step`."""
        self.state.freezing = FrozenUntil(steps, named_trained(self.model))
        self.state.freezing.apply(self.done)

    def begin(self, updates: int = UPDATES) -> None:
        self.reducer.sync.begin_epoch(self.state, EpochStart(1, self.done, updates, 0.1, is_resumed=self.done > 0))

    def update(self, rate: float = 0.1) -> None:
        """One update; now and then a rank has no batch for it."""
        without = {self.done % 7} if self.done % 3 == 0 else set()
        generator = torch.Generator().manual_seed(1000 * self.comm.rank + self.done)
        has_batch = self.comm.rank not in without
        if self.state.freezing is not None:
            self.state.freezing.apply(self.done)
        with torch.no_grad():
            for tensor in (*self.model.parameters(), self.model[1].running_mean):
                change = torch.randn(tensor.shape, generator=generator)
                if has_batch and (tensor.requires_grad or tensor is self.model[1].running_mean):
                    tensor.add_(change * 0.1)
        self.model[1].num_batches_tracked += has_batch
        self.done += 1
        with_batch = [rank not in without for rank in range(self.comm.size)]
        own = None if self.is_planned else has_batch
        self.reducer.sync.after_update(self.state, FinishedUpdate(with_batch, self.done, rate, own))

    def run(self, until: int = UPDATES, *, from_begin: bool = True) -> None:
        if from_begin:
            self.begin()
        while self.done < until:
            self.update()

    def weights(self) -> dict[str, numpy.ndarray]:
        return {name: tensor.numpy().copy() for name, tensor in self.model.state_dict().items()}


def trained(size: int = SIZE, **keys: Any) -> list[dict[str, numpy.ndarray]]:
    """Every rank's tensors after an epoch."""

    def work(comm: Communicator) -> dict[str, numpy.ndarray]:
        job = Job(comm, **keys)
        job.run()
        job.reducer.sync.end_of_epoch(job.state)
        return job.weights()

    return on_ranks(size, work)


def same(one: dict[str, numpy.ndarray], other: dict[str, numpy.ndarray]) -> bool:
    return all(one[name].tobytes() == other[name].tobytes() for name in one)


@pytest.mark.parametrize(("name", "every"), [("bmuf", 5), ("nesterov", 1), ("sgd", 16), ("nesterov", 5), ("bmuf", 16)])
def test_an_outer_optimizer_that_does_nothing_is_plain_averaging_bit_for_bit(name: str, every: int) -> None:
    plain = trained(sync_steps=every)
    outer = {"class": name, "learning_rate": 1.0, "momentum": 0.0}
    without = trained(sync_steps=every, outer_optimizer=outer)
    assert all(same(one, other) for one, other in zip(plain, without, strict=True))
    assert not same(plain[0], trained(sync_steps=every, outer_optimizer=BMUF)[0])


KINDS: dict[str, dict[str, Any]] = {
    "plain": {"sync_steps": 5},
    "bmuf": {"sync_steps": 5, "outer_optimizer": BMUF},
    "adam": {"sync_steps": 5, "outer_optimizer": {"class": "adam", "learning_rate": 0.05}},
    "parts": {"sync_steps": 6, "sync_parts": 3, "outer_optimizer": BMUF},
    "delayed": {"sync_steps": 5, "sync_delay": 3},
    "delayed parts": {
        "sync_steps": 6,
        "sync_parts": 3,
        "sync_delay": 4,
        "outer_optimizer": {"class": "nesterov", "momentum": 0.3},
    },
    "delayed as long as possible": {"sync_steps": 4, "sync_delay": 4, "outer_optimizer": BMUF},
    "fp16": {"sync_steps": 5, "compression": "fp16"},
    "bf16 delayed parts": {
        "sync_steps": 6,
        "sync_parts": 3,
        "sync_delay": 4,
        "outer_optimizer": BMUF,
        "compression": "bf16",
    },
    "quadratic": {"sync_steps": 2, "sync_rule": {"class": "quadratic", "alpha": 0.3}},
    "int4": {"sync_steps": 5, "compression": "int4"},
    "int2 delayed parts": {
        "sync_steps": 6,
        "sync_parts": 3,
        "sync_delay": 4,
        "outer_optimizer": BMUF,
        "compression": "int2",
    },
    "not planned": {"sync_steps": 6, "sync_parts": 3, "sync_delay": 4, "is_planned": False},
}


FEW = ("plain", "bmuf", "delayed parts", "fp16", "quadratic", "int2 delayed parts")
ALL_KINDS = [*FEW, *marked([kind for kind in KINDS if kind not in FEW], pytest.mark.slow)]


@pytest.mark.parametrize("name", ALL_KINDS)
def test_frozen_parameters_keep_their_bits(name: str, tmp_path: Path) -> None:
    """The average of three equal numbers is rounded."""
    frozen = ("0.weight", "0.bias")

    def work(comm: Communicator) -> None:
        job = Job(comm, **KINDS[name])
        job.freeze({"0.*": 17})
        first, trained = job.weights(), dict(job.model.named_parameters()).keys()
        assert any(((first[one] * 3) / 3 != first[one]).any() for one in frozen), "an average that changes them"
        job.run(until=13)
        with job.reducer.sync.averaged_model(job.state):
            saved = job.weights()
        job.run(until=17, from_begin=False)
        for weights in (saved, job.weights()):
            assert {name for name in first if first[name].tobytes() == weights[name].tobytes()} & trained == set(frozen)
        job.run(from_begin=False)
        job.reducer.sync.end_of_epoch(job.state)
        assert not any(same({one: first[one]}, job.weights()) for one in frozen)
        assert all(same(weights, job.weights()) for weights in comm.gather(job.weights(), name="weights"))

    on_ranks(SIZE, work)


def test_parameters_that_are_frozen_only_since_a_stop_become_equal(tmp_path: Path) -> None:
    def work(comm: Communicator) -> None:
        job = Job(comm, sync_steps=100)
        job.run(until=9)
        job.save(tmp_path)
        own = comm.gather(job.weights(), name="weights")
        resumed = Job(comm, sync_steps=100)
        resumed.load(tmp_path)
        assert same(own[comm.rank], resumed.weights())
        resumed.freeze({"0.*": 100})
        resumed.run()
        resumed.reducer.sync.end_of_epoch(resumed.state)
        assert same({one: own[0][one] for one in ("0.weight", "0.bias")}, resumed.weights())
        assert all(same(weights, resumed.weights()) for weights in comm.gather(resumed.weights(), name="resumed"))

    on_ranks(SIZE, work)


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_all_ranks_end_an_epoch_with_the_same_model_also_if_they_have_to_exchange_their_numbers_of_updates(kind: str) -> None:
    """As they do with `skip_broken`, since a rank may leave out all of a batch."""
    planned, exchanged = (trained(**KINDS[kind] | {"is_planned": is_planned}) for is_planned in (True, False))
    assert all(same(planned[0], other) for other in (*planned, *exchanged))


@pytest.mark.parametrize("kind", ALL_KINDS)
@pytest.mark.parametrize("stop", [8, 17, *marked([4, 10], pytest.mark.slow)])
def test_a_stop_changes_nothing(tmp_path: Path, kind: str, stop: int) -> None:
    """Also while something is under way. Saving itself changes nothing, either."""

    def work(comm: Communicator) -> tuple[list[dict[str, numpy.ndarray]], set[str], set[str]]:
        whole, saved = Job(comm, **KINDS[kind]), Job(comm, **KINDS[kind])
        whole.run(stop)
        saved.run(stop)
        saved.save(tmp_path)
        gone_on = Job(comm, **KINDS[kind])
        gone_on.load(tmp_path)
        weights = []
        for number, job in enumerate((whole, saved, gone_on)):
            job.run(from_begin=number == 2)
            weights.append(job.weights())
            job.reducer.sync.end_of_epoch(job.state)
            weights.append(job.weights())
        return weights, set(gone_on.state.shared), set(gone_on.state.own)

    for weights, shared, own in on_ranks(SIZE, work):
        for number in (0, 1):
            assert same(weights[number], weights[2 + number])
            assert same(weights[number], weights[4 + number])
        names = {"bmuf": {"velocity"}, "nesterov": {"velocity"}, "adam": {"first_moment", "second_moment"}}
        outer = KINDS[kind].get("outer_optimizer")
        anchor = {"anchor"} if outer is not None or "compression" in KINDS[kind] else set()
        assert shared == (anchor if outer is None else {"anchor", *names[outer["class"]]})
        is_quantized = kind.startswith("int")
        assert all(name.startswith("quantized.") for name in own)
        assert bool(own) == is_quantized


@pytest.mark.parametrize("kind", ["bmuf", "adam", "delayed parts"])
@pytest.mark.parametrize("other_size", [1, 2])
def test_another_number_of_ranks_goes_on_with_anchor_and_velocity(tmp_path: Path, kind: str, other_size: int) -> None:
    """It begins with the plain average of the ranks' weights; what they have learned since the last sync is still in the next."""

    def first(comm: Communicator) -> tuple[list[torch.Tensor], dict[str, list[torch.Tensor]]]:
        job = Job(comm, **KINDS[kind])
        job.run(8)
        shared = {name: [tensor.clone() for tensor in tensors] for name, tensors in job.state.shared.items()}
        job.save(tmp_path)
        with job.reducer.sync.averaged_model(job.state):
            average = [parameter.detach().clone() for parameter in job.model.parameters()]
        return average, {name: tensors for name, tensors in shared.items() if "." not in name}

    made = on_ranks(SIZE, first)
    for average, shared in made:
        assert all(torch.equal(one, other) for one, other in zip(made[0][0], average, strict=True))
        assert all(torch.equal(one, other) for name in shared for one, other in zip(made[0][1][name], shared[name], strict=True))

    def second(comm: Communicator) -> None:
        job = Job(comm, **KINDS[kind])
        job.load(tmp_path)
        job.begin()
        assert job.state.own == {}
        average, shared = made[0]
        assert all(torch.equal(one, other) for one, other in zip(average, job.model.parameters(), strict=True))
        assert job.state.shared.keys() == shared.keys()
        assert all(
            torch.equal(one, other) for name in shared for one, other in zip(shared[name], job.state.shared[name], strict=True)
        )
        job.run(from_begin=False)
        job.reducer.sync.end_of_epoch(job.state)
        assert all(torch.isfinite(parameter).all() for parameter in job.model.parameters())

    on_ranks(other_size, second)


def test_a_delayed_sync_is_applied_as_many_updates_later_and_keeps_what_was_learned_since() -> None:
    every, delay = 6, 4

    def work(comm: Communicator) -> list[numpy.ndarray]:
        job = Job(comm, sync_steps=every, sync_delay=delay)
        apart = Job(comm, sync_steps=1000)
        weights = []
        job.begin()
        apart.begin()
        for _ in range(every + delay):
            job.update()
            apart.update()
            weights += [job.weights()["2.weight"], apart.weights()["2.weight"]]
        return weights

    ranks = on_ranks(2, work)
    for number in range(every + delay - 1):  # nothing happens before
        assert all(numpy.array_equal(rank[2 * number], rank[2 * number + 1]) for rank in ranks)
    sent = [rank[2 * every - 1].astype(float) for rank in ranks]
    own = [sum((0 if update % 3 == 0 and update % 7 == rank else 1) for update in range(every)) for rank in range(2)]
    average = (own[0] * sent[0] + own[1] * sent[1]) / sum(own)
    for rank, before in zip(ranks, sent, strict=True):
        numpy.testing.assert_allclose(rank[-2], rank[-1] + average - before, rtol=1e-5, atol=1e-6)


def test_nothing_is_waited_for_before_it_is_applied(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three parts, sent after 2, 4 and 6 updates, each applied 3 updates later."""

    def work(comm: Communicator) -> list[tuple[str, int]]:
        job = Job(comm, sync_steps=6, sync_parts=3, sync_delay=3)
        events: list[tuple[str, int]] = []

        def noted(name: str) -> Callable[..., Any]:
            method = getattr(comm, name)

            def call(*args: Any, **more: Any) -> Any:
                events.append((name, job.done))
                return method(*args, **more)

            return call

        for name in ("start", "finish"):
            monkeypatch.setattr(comm, name, noted(name))
        job.run(9)
        return events

    starts, finishes = [("start", done) for done in (2, 4, 6, 8)], [("finish", done) for done in (5, 7, 9)]
    for events in on_ranks(2, work):
        assert events == sorted(starts + finishes, key=lambda event: event[1])


def test_parts_are_sent_in_turn_and_each_rank_counts_its_bytes() -> None:
    def work(comm: Communicator) -> list[tuple[int, int]]:
        job = Job(comm, sync_steps=6, sync_parts=3)
        job.begin()
        taken = []
        for _ in range(12):
            job.update()
            taken.append(job.reducer.traffic[:2])
        return [(syncs - before[0], sent - before[1]) for before, (syncs, sent) in pairwise([(0, 0), *taken])]

    for taken in on_ranks(2, work):
        assert [syncs for syncs, _ in taken] == [0, 1] * 6
        sizes = [size for _, size in taken[1::2]]
        assert sizes[:3] == sizes[3:]
        assert sum(sizes[:3]) == 4 * (4 * 3 + 3 + 2 * 3 + 3 * 40 + 40)
        assert max(sizes) == 4 * 120  # the largest tensor alone


@pytest.mark.parametrize("kind", ["plain", "bmuf"])
def test_a_sync_with_equal_weights_hands_the_parameters_themselves_to_the_transport(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No copy is made of them."""

    def work(comm: Communicator) -> tuple[set[int], set[int]]:
        job = Job(comm, **KINDS[kind])
        handed: set[int] = set()
        start = comm.start

        def noting(tensors: Any, *args: Any, **more: Any) -> Any:
            handed.update(tensor.data_ptr() for tensor in tensors if tensor.is_floating_point())
            return start(tensors, *args, **more)

        monkeypatch.setattr(comm, "start", noting)
        job.begin()
        for done in (1, 2, 4, 5, 7):
            job.done = done  # every rank has a batch
            job.update()
        own = {tensor.data_ptr() for tensor in (*job.model.parameters(), job.model[1].running_mean)}
        return handed, own

    for handed, own in on_ranks(2, work):
        assert handed == own


def test_deltas_come_to_the_same_up_to_rounding() -> None:
    def work(comm: Communicator) -> list[dict[str, numpy.ndarray]]:
        jobs = [Job(comm, **KINDS[kind]) for kind in ("bmuf", "delayed parts", "plain") for _ in range(2)]
        for number, job in enumerate(jobs):
            job.reducer.sync._sync._deltas = number % 2 == 1  # type: ignore[attr-defined]
            job.run()
            job.reducer.sync.end_of_epoch(job.state)
        return [job.weights() for job in jobs]

    made = on_ranks(SIZE, work)
    for rank in made:
        for whole, delta, first in zip(rank[::2], rank[1::2], made[0][1::2], strict=True):
            assert same(delta, first)
            for name in whole:
                numpy.testing.assert_allclose(whole[name], delta[name], rtol=1e-4, atol=1e-5)


def learned(comm: Communicator, keys: ReduceKeys, updates: int) -> list[Any]:
    """Weights and Adam's state after every update of a real learner."""

    def train_step(*, model: torch.nn.Module, extern_data: Any, **_: Any) -> None:
        get_run_ctx().mark_as_loss(model(extern_data["data"].raw_tensor).square(), "square", use_normalized_loss=True)

    def get_model(**_: Any) -> torch.nn.Module:
        layer = torch.nn.Linear(2, 3)
        with torch.no_grad():
            layer.weight.copy_(torch.arange(6.0).reshape(3, 2))
            layer.bias.zero_()
        return layer

    reducer = keys.reducer(comm, Timer())
    given = {"optimizer": {"class": "adam"}, "gradient_noise": 0.1}
    learner = learner_of(get_model, train_step, comm, gradients=reducer.gradients, **given)
    learner.begin_epoch(1, 0)
    reducer.sync.begin_epoch(learner.state, EpochStart(1, 0, updates, 0.1, is_resumed=False))
    seen = []
    for number in range(updates):
        values = numpy.random.default_rng(10 * number + comm.rank).normal(size=(2, 4, 2)).astype("float32")
        has_batch = [rank == 0 or number % 4 != 3 for rank in range(comm.size)]
        learner.backward(batch_of(values) if has_batch[comm.rank] else None)
        learner.update(0.1)
        reducer.sync.after_update(learner.state, FinishedUpdate(has_batch, number + 1, 0.1))
        moments = [state["exp_avg"].clone() for state in learner.state._optimizer.state.values()]
        seen.append([*(one.detach().clone() for one in learner.model.parameters()), *moments])
    return seen


def test_a_start_with_gradients_is_that_of_averaged_gradients_and_then_ranks_part() -> None:
    def work(comm: Communicator) -> list[list[Any]]:
        param = ReduceKeys(reduce_type="param", sync_steps=3, local_start=5)
        return [learned(comm, keys, 9) for keys in (ReduceKeys(average_gradients=True), param)]

    (grad, param), (_, other) = on_ranks(2, work)

    def alike(one: list[torch.Tensor], another: list[torch.Tensor]) -> bool:
        return all(torch.equal(x, y) for x, y in zip(one, another, strict=True))

    assert [alike(one, another) for one, another in zip(grad, param, strict=True)] == [True] * 5 + [False] * 4
    assert [alike(one, another) for one, another in zip(param, other, strict=True)] == [True] * 5 + [
        False
    ] * 4  # Adam's state, too
    assert alike(param[7][:2], other[7][:2])  # synced after 3 updates alone


def warnings(monkeypatch: pytest.MonkeyPatch, updates: int, **keys: Any) -> list[str]:
    """What is said at the beginning of two epochs."""
    said: list[str] = []
    monkeypatch.setattr("hvdtrain.runtime.log.write", lambda level, line: said.append(f"{level} {line}"))

    def work(comm: Communicator) -> None:
        job = Job(comm, **keys)
        for _ in range(2):
            job.begin(updates)

    on_ranks(2, work)
    assert said[::2] == said[1::2]  # by both ranks; only rank 0 has a log
    return said[::2]


def test_an_epoch_without_syncs_or_with_few_of_them_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    told: Callable[..., list[str]] = lambda updates, **keys: warnings(monkeypatch, updates, **keys)  # noqa: E731
    nesterov = {"class": "nesterov", "momentum": 0.9}
    assert told(100, sync_steps=100) == []
    assert told(99, sync_steps=100) == [
        "2 horovod_param_sync_step: expected at most 99, the number of updates in epoch 1, got 100: the ranks' parameters are "
        "only averaged at its end"
    ]
    assert told(90, sync_steps=10, outer_optimizer=nesterov) == [
        "2 horovod_param_outer.momentum: expected at least 10 syncs in an epoch for 0.9, got 9 in epoch 1 (a smaller "
        "horovod_param_sync_step, or a smaller momentum)"
    ]
    assert len(told(90, sync_steps=10, outer_optimizer=nesterov, local_start=5)) == 1
    assert told(91, sync_steps=10, outer_optimizer=nesterov) == []
    assert told(3, sync_steps=10, sync_seconds=5.0) == []


def test_mistakes_in_the_keys(tmp_path: Path) -> None:
    of = partial(problems, tmp_path)
    assert of("horovod_param_outer = {'class': 'bmuf'}\nhorovod_param_start = 3\n") == [
        "horovod_param_outer: conflict",
        "horovod_param_start: conflict",
    ]
    param = "horovod_reduce_type = 'param'\n"
    assert of(f"{param}horovod_param_outer = 'bmf'\n") == ["horovod_param_outer.class: unknown-value"]
    assert of("torch_distributed = {'reduce_type': 'param', 'param_outer': {'class': 'sgd', 'momentum': 2}}\n") == [
        "torch_distributed.param_outer.momentum: out-of-range"
    ]
    assert of(
        f"{param}horovod_param_sync_step = 4\nhorovod_param_sync_delay = 5\nhorovod_param_sync_parts = 6\nema_decay = 0.9\n"
    ) == ["horovod_param_sync_parts: conflict", "horovod_param_sync_delay: conflict", "ema_decay: conflict"]
    assert of(f"{param}horovod_param_sync_delay = 1\nhorovod_param_sync_time_diff = 2\n") == [
        "horovod_param_sync_delay: conflict"
    ]


def test_what_they_say_of_themselves() -> None:
    def said(**keys: Any) -> str:
        def work(comm: Communicator) -> str:
            return ReduceKeys(reduce_type="param", **keys).reducer(comm, Timer()).description

        return on_ranks(2, work)[0]

    assert said(sync_steps=16, outer_optimizer="bmuf") == (
        "parameters are averaged after every 16 updates and at the end of an epoch; outer optimizer: learning rate 1, Nesterov "
        "momentum 0.5"
    )
    assert said(**KINDS["quadratic"], local_start=7) == (
        "gradients are averaged for every update of the first 7 steps; then parameters are averaged after every 2 updates, or "
        "more as the learning rate falls, (0.3 / rate)^2, and at the end of an epoch"
    )
    assert said(sync_steps=8, sync_delay=4, sync_parts=2) == (
        "parameters are averaged after every 8 updates and at the end of an epoch, in 2 parts in turn, applied 4 updates after "
        "they were sent"
    )


def test_keys_that_another_one_makes_useless() -> None:
    assert not ReduceKeys(reduce_type="param", sync_steps=100).ignored_key_line("param")
    assert not ReduceKeys(reduce_type="param", sync_seconds=10).ignored_key_line("param")
    for keys, expected in (
        ({"sync_steps": 100}, "horovod_param_sync_step: no effect with horovod_reduce_type = 'grad'"),
        ({"sync_seconds": 10}, "horovod_param_sync_time_diff: no effect with horovod_reduce_type = 'grad'"),
        (
            {"reduce_type": "param", "sync_steps": 100, "sync_seconds": 10},
            "horovod_param_sync_step: no effect with horovod_param_sync_time_diff = 10 seconds",
        ),
    ):
        assert ReduceKeys(**keys).ignored_key_line(keys.get("reduce_type", "grad")).startswith(expected)
