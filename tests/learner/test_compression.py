"""What travels between the ranks, in how many messages and bytes, and that it teaches the same in 16 bits."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from learners import batch_of, learner_of, problems
from thread_ranks import ThreadCommunicator, on_ranks
from torch_ranks import small_model, step

from hvdtrain.comm.base import Communicator
from hvdtrain.comm.single import SingleCommunicator
from hvdtrain.context import get_run_ctx
from hvdtrain.data.types import Batch
from hvdtrain.learner.precision import Precision, ScaleOptions
from hvdtrain.learner.reducer import EpochStart, FinishedUpdate
from hvdtrain.learner.reducers import ReduceKeys
from hvdtrain.runtime.timer import Timer

ROWS = numpy.random.default_rng(1).normal(size=(12, 3, 4)).astype(numpy.float32)
TOLERANCE = {"fp16": 2e-3, "bf16": 2e-2}


def batch(rank: int, size: int) -> Batch:
    """A rank's share of the rows."""
    return batch_of(ROWS[rank::size])


def small(**_: Any) -> torch.nn.Module:
    return small_model(5)


def learner(
    comm: Communicator,
    get_model: Callable[..., torch.nn.Module] = small,
    train_step: Callable[..., None] = step,
    sharded: bool = False,
    learning: dict[str, Any] | None = None,
    scale: float | None = None,
    **keys: Any,
) -> Any:
    """A learner on one of the ranks. `scale`: the first loss scale; None: that of the keys."""
    reduce = ReduceKeys(**keys)
    narrow = reduce.has_narrow_range and comm.size > 1
    scaling = ScaleOptions(init_scale=scale) if narrow and scale is not None else "auto"
    options = {
        "precision": Precision(scaling=scaling, narrow_gradients=narrow),
        "sharded": comm if sharded else None,
        "bucket_bytes": comm.bucket_bytes,
    }
    given = {"optimizer": {"class": "adam"}, **(learning or {})}
    gradients = reduce.reducer(comm, Timer()).gradients
    return learner_of(get_model, train_step, comm, gradients=gradients, options=options, **given)


def trained(comm: Communicator, updates: int = 3, **keys: Any) -> list[torch.Tensor]:
    """The parameters after some updates."""
    made = learner(comm, **keys)
    for _ in range(updates):
        made.backward(batch(comm.rank, comm.size))
        made.update(0.01)
    return [parameter.detach().clone() for parameter in made.model.parameters()]


def close(one: list[torch.Tensor], other: list[torch.Tensor], tolerance: float) -> bool:
    return all(bool((left - right).abs().max() <= tolerance * left.abs().max()) for left, right in zip(one, other, strict=True))


def sent_in_a_step(**keys: Any) -> list[tuple[str, int]]:
    """The messages of one update of a model of six layers, each of which fills a bucket."""

    def layers(**_: Any) -> torch.nn.Module:
        return torch.nn.Sequential(*[torch.nn.Linear(800, 800) for _ in range(6)])

    def any_loss(*, model: torch.nn.Module, **_: Any) -> None:
        get_run_ctx().mark_as_loss(sum(parameter.sum() for parameter in model.parameters()), "any", use_normalized_loss=True)

    def work(comm: Communicator) -> list[tuple[str, int]]:
        made = learner(comm, layers, any_loss, **keys)
        made.backward(batch(comm.rank, comm.size))
        made.update(0.01)
        assert isinstance(comm, ThreadCommunicator)
        return comm.messages

    first, second = on_ranks(2, work)
    assert first == second
    return first


def test_a_bias_travels_with_its_weight_and_16_bits_are_half_of_the_bytes() -> None:
    parameters = 800 * 800 + 800
    gradients = sent_in_a_step()
    flags = [0, 0, 0, 0, 0, 12]  # with the last bucket: whether this rank has a gradient of each parameter
    counts = [0, 0, 0, 0, 0, 2]  # likewise: the number of elements, in two parts
    assert gradients == [(f"gradients.{number}", 4 * (parameters + flags[number] + counts[number])) for number in range(6)]
    for compression in ("fp16", "bf16"):
        apart, *gradients = sent_in_a_step(compression=compression)
        assert apart == ("loss_counts", 8)  # exact
        assert gradients == [(f"gradients.{number}", 2 * (parameters + flags[number])) for number in range(6)]


@pytest.mark.parametrize("compression", ["fp16", "bf16"])
@pytest.mark.parametrize("average", [False, True])
def test_ranks_learn_in_16_bits_what_one_rank_learns(compression: str, average: bool) -> None:
    alone = trained(SingleCommunicator(), compression=compression)
    assert all(map(torch.equal, alone, trained(SingleCommunicator())))  # one rank sends nothing
    for size in (2, 3):
        keys = {"compression": compression, "average_gradients": average, "scale": 8.0}
        ranks = on_ranks(size, lambda comm, keys=keys: trained(comm, **keys))  # type: ignore[misc]
        for other in ranks[1:]:
            assert all(map(torch.equal, ranks[0], other))
        assert close(alone, ranks[0], TOLERANCE[compression])
        assert not close(alone, ranks[0], 1e-6)  # it was in 16 bits


def after_sync(comm: Communicator, weight: float, change: float, **keys: Any) -> tuple[torch.Tensor, list[tuple[str, int]]]:
    """A parameter after a sync, and what was sent: every rank has changed it by `change` times its rank plus one."""
    reducer = ReduceKeys(reduce_type="param", sync_steps=2, **keys).reducer(comm, Timer()).sync
    made = learner(comm, get_model=lambda **_: torch.nn.Sequential(torch.nn.Linear(1, 1, bias=False), torch.nn.BatchNorm1d(3)))
    parameter = made.model[0].weight
    with torch.no_grad():
        parameter.fill_(weight)
        reducer.begin_epoch(made.state, EpochStart(1, 0, 100, 0.1, is_resumed=False))
        for update in range(4):
            parameter += change * (comm.rank + 1)
            for statistic in (made.model[1].running_mean, made.model[1].running_var):
                statistic += comm.rank  # what is the same on all ranks is not sent
            reducer.after_update(made.state, FinishedUpdate([True] * comm.size, update + 1, 0.1))
    assert isinstance(comm, ThreadCommunicator)
    return parameter.detach().clone(), comm.messages


@pytest.mark.parametrize("compression", ["fp16", "bf16"])
def test_changes_of_parameters_travel_in_16_bits_and_statistics_as_they_are(compression: str) -> None:
    """A parameter of 1000 has a rounding of 1 in float16, and of 4 in bfloat16: it could not learn a change of 0.01."""
    exact, messages = on_ranks(2, lambda comm: after_sync(comm, 1000.0, 0.01))[0]
    assert messages == [("average.parameters", 28), ("average.statistics", 24)] * 2  # 7 parameters, 6 statistics
    (one, narrow), (other, _) = on_ranks(2, lambda comm: after_sync(comm, 1000.0, 0.01, compression=compression))
    assert narrow == [("average.parameters", 14), ("average.statistics", 24)] * 2
    assert torch.equal(one, other)
    assert exact.item() == pytest.approx(1000.06, abs=2e-4)
    assert one.item() == pytest.approx(exact.item(), abs=5e-4)


@pytest.mark.parametrize(("change", "size"), [(15.0, 2), (1e-6, 2), (15.0, 5), (1e-6, 5)])
def test_large_and_small_changes_fit_into_float16_on_any_number_of_ranks(change: float, size: int) -> None:
    (exact, _), *_ = on_ranks(size, lambda comm: after_sync(comm, 0.0, change))
    (narrow, _), *_ = on_ranks(size, lambda comm: after_sync(comm, 0.0, change, compression="fp16"))
    assert narrow.item() == pytest.approx(exact.item(), rel=2e-3)


def test_a_change_of_the_key_within_an_epoch_sends_the_parameters_as_they_are_once() -> None:
    def work(comm: Communicator) -> list[tuple[str, int]]:
        made = learner(comm)
        before, after = (ReduceKeys(reduce_type="param", sync_steps=3, compression=compression) for compression in (None, "fp16"))
        reducer = before.reducer(comm, Timer()).sync
        reducer.begin_epoch(made.state, EpochStart(1, 0, 100, 0.1, is_resumed=False))
        reducer.after_update(made.state, FinishedUpdate([True] * comm.size, 1, 0.1))
        resumed = after.reducer(comm, Timer()).sync
        resumed.restore(reducer.state())
        resumed.begin_epoch(made.state, EpochStart(1, 1, 100, 0.1, is_resumed=True))
        for update in range(2, 8):
            resumed.after_update(made.state, FinishedUpdate([True] * comm.size, update, 0.1))
        assert isinstance(comm, ThreadCommunicator)
        return [message for message in comm.messages if message[0] == "average.parameters"]

    parameters = 4 * 5 + 5 + 5 * 2 + 2
    for messages in on_ranks(2, work):
        assert messages == [("average.parameters", 4 * parameters), ("average.parameters", 2 * parameters)]


def test_an_overflow_in_a_message_skips_the_update_and_halves_the_scale_on_all_ranks() -> None:
    def work(comm: Communicator) -> tuple[list[bool], list[float | None]]:
        factor = [1e9 if comm.rank == 1 else 1.0]

        def large(*, model: torch.nn.Module, **_: Any) -> None:
            get_run_ctx().mark_as_loss(model[0].weight.sum() * factor[0], "large")

        made = learner(comm, train_step=large, compression="fp16")
        changed, scales = [], []
        for value in (
            factor[0],
            1.0,
            60.0,
            1.0,
        ):  # rank 1 sends 1e9 * 1024, 1024, ...; 2 * 60 * 512 is not too large, 60 * 1024 is
            factor[0] = value
            before = made.model[0].weight.detach().clone()
            made.backward(batch(comm.rank, comm.size))
            made.update(0.01)
            changed.append(not torch.equal(before, made.model[0].weight))
            scales.append(made.meter.loss_scale)
        assert made.model[0].weight.isfinite().all()
        return changed, scales

    first, second = on_ranks(2, work)
    assert first == second == ([False, True, True, True], [512.0, 512.0, 512.0, 512.0])


@pytest.mark.parametrize("compression", [None, "fp16", "bf16"])
def test_a_sharded_optimizer_gets_its_gradients_only_and_learns_the_same(compression: str | None) -> None:
    """The communicator fills what belongs to other ranks with NaN."""
    learning = {"gradient_clip_global_norm": 0.01, "gradient_noise": 0.1, "num_allowed_consec_invalid_gradient_steps": 1}
    for size in (2, 3):
        keys = {"learning": learning, "compression": compression, "scale": 8.0}
        whole = on_ranks(size, lambda comm, keys=keys: trained(comm, **keys))  # type: ignore[misc]
        sharded = on_ranks(size, lambda comm, keys=keys: trained(comm, sharded=True, **keys))  # type: ignore[misc]
        for rank in range(size):
            assert all(map(torch.equal, whole[0], sharded[rank]))


def test_a_gradient_of_another_rank_that_is_not_finite_skips_the_update_of_a_sharded_optimizer() -> None:
    def work(comm: Communicator) -> list[torch.Tensor]:
        def infinite(*, model: torch.nn.Module, **_: Any) -> None:
            get_run_ctx().mark_as_loss(model[0].weight.sum() * (float("inf") if comm.rank == 1 else 1.0), "infinite")

        learning = {"num_allowed_consec_invalid_gradient_steps": 5}
        return trained(comm, train_step=infinite, sharded=True, learning=learning)

    before = [parameter.detach() for parameter in small().parameters()]
    for after in on_ranks(2, work):
        assert all(map(torch.equal, before, after))


def test_what_a_config_gets_wrong_is_told_before_training(tmp_path: Path) -> None:
    assert problems(tmp_path, "horovod_compression = 'int3'\n") == ["horovod_compression: unknown-value"]
    assert problems(tmp_path, "torch_distributed = {'compression': 'fp8', 'reduce_type': 'grads'}\n") == [
        "torch_distributed.reduce_type: unknown-value",
        "torch_distributed.compression: unknown-value",
    ]
    assert problems(tmp_path, "use_horovod = True\nhorovod_compression = 'bf16'\n") == ["horovod_compression: conflict"]
    assert problems(tmp_path, "torch_distributed = {'compression': 'fp16'}\ngrad_scaler = None\n") == ["grad_scaler: conflict"]


def test_the_log_says_in_what_gradients_are_sent() -> None:
    def said(comm: Communicator) -> str:
        return ReduceKeys(compression="fp16").reducer(comm, Timer()).description

    assert on_ranks(2, said)[0] == "gradients are summed for every update, sent in float16"
    param = ReduceKeys(compression="bf16", reduce_type="param")
    assert on_ranks(2, lambda comm: param.reducer(comm, Timer()).description)[0].endswith("an epoch, sent in bfloat16")
    assert said(SingleCommunicator()) == "gradients are summed for every update"
