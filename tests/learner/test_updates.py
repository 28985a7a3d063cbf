"""From losses to an update: what it applies, and what it skips, equals plain PyTorch."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from launching import TOY, hvdtrain, refused
from learners import batch_of, learner_of
from thread_ranks import on_ranks
from torch import nn
from torch.utils.checkpoint import checkpoint

from hvdtrain.comm.base import Communicator
from hvdtrain.context import get_run_ctx
from hvdtrain.errors import ConfigError
from hvdtrain.learner.precision import Precision, ScaleOptions
from hvdtrain.learner.torch.optimizer import complete_momentum, make_optimizer, plain_step
from hvdtrain.learner.torch.parameter_groups import take_multipliers
from hvdtrain.learner.torch.update import GradientNoise, TorchGradients
from hvdtrain.plugins.compute.sync_batch_norm import synchronize
from hvdtrain.schedule.history import EpochRecord
from hvdtrain.schedule.measure import Measure

FRAMES = numpy.random.default_rng(1).normal(size=(4, 3, 2)).astype(numpy.float32)


class Reused(nn.Module):
    """A layer that is computed three times, each time again in backward, between two that are computed once."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.first, self.middle, self.last = (nn.Linear(2, 2) for _ in range(3))
        with torch.no_grad():
            for number, parameter in enumerate(self.parameters()):
                parameter.copy_(torch.arange(parameter.numel()).reshape(parameter.shape).add(number).sin())
        self.reentrant = reentrant
        self.uses = 3

    def forward(self, frames: torch.Tensor) -> torch.Tensor:
        hidden = self.first(frames)
        for _ in range(self.uses):
            hidden = checkpoint(lambda values: self.middle(values).tanh(), hidden, use_reentrant=self.reentrant)
        return self.last(hidden)


def squares(*, model: nn.Module, extern_data: dict[str, Any], **_: Any) -> None:
    output = model(extern_data["data"].raw_tensor)
    get_run_ctx().mark_as_loss(output.square(), "square", use_normalized_loss=True)
    get_run_ctx().mark_as_loss(output.abs(), "absolute", use_normalized_loss=True, scale=0.1)


def only_squares(*, model: nn.Module, extern_data: dict[str, Any], **_: Any) -> None:
    get_run_ctx().mark_as_loss(model(extern_data["data"].raw_tensor).square(), "square")


def weights_of(model: nn.Module) -> list[float]:
    return [number for parameter in model.parameters() for number in parameter.flatten().tolist()]


@pytest.mark.parametrize("train_step", [only_squares, squares])
@pytest.mark.parametrize("accumulate", [False, True])
def test_a_layer_that_reentrant_checkpointing_computes_several_times(train_step: Any, accumulate: bool) -> None:
    def train(comm: Communicator, reentrant: bool) -> list[float]:
        options = {"bucket_bytes": lambda _: 1}
        made = learner_of(lambda **_: Reused(reentrant), train_step, comm, options=options)
        for _ in range(3):
            own = numpy.array_split(FRAMES[comm.rank :: comm.size], 2 if accumulate else 1)
            for number, part in enumerate(own):
                made.backward(batch_of(part), completes_update=number == len(own) - 1)
            made.update(0.01)
        return weights_of(made.model)

    [expected] = on_ranks(1, lambda comm: train(comm, False))
    for size in (1, 2):
        for weights in on_ranks(size, lambda comm: train(comm, True)):
            assert weights == pytest.approx(expected, rel=1e-4)


def test_a_layer_that_is_computed_several_times_only_later_is_refused_on_several_ranks() -> None:
    def train(comm: Communicator, first: tuple[int, bool], uses: int = 3) -> None:
        made = learner_of(lambda **_: Reused(True), only_squares, comm, options={"bucket_bytes": lambda _: 1})
        for made.model.uses, made.model.reentrant in (first, (uses, True)):
            made.backward(batch_of(FRAMES))
            made.update(0.01)

    on_ranks(1, lambda comm: train(comm, (1, True)))
    on_ranks(2, lambda comm: train(comm, (2, True)))
    on_ranks(2, lambda comm: train(comm, (1, False), 1))
    for first in ((1, True), (3, False)):
        with refused("train_step: wrong-result"):
            on_ranks(2, lambda comm, first=first: train(comm, first))


class Chain(nn.Module):
    """Four layers. Attributes: calls: those that the next step calls."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Sequence[int] = ()
        self.layers = nn.ModuleList(nn.Linear(2, 2, bias=False) for _ in range(4))
        with torch.no_grad():
            for number, parameter in enumerate(self.parameters()):
                parameter.copy_(torch.arange(4.0).reshape(2, 2).add(number).sin())

    def forward(self, frames: torch.Tensor) -> torch.Tensor:
        for number in self.calls:
            frames = self.layers[number](frames).tanh()
        return frames


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize(
    ("first", "then", "early"),
    [
        ((0, 1, 2), (0, 1, 2), 3),  # an unused one is registered last
        ((3, 0, 1, 2), (3, 0, 1, 2), 2),  # registered last, called first
        ((3, 2, 1, 0), (3, 2, 1, 0), 2),
        ((0, 1, 2, 1), (0, 1, 2, 1), 3),  # shared
        ((0, 1, 2), (0, 1, 3), 0),  # others are unused later: one that had a gradient is waited for
        ((0, 1), (2, 3, 0, 1), 2),  # some get their first gradient later
    ],
)
def test_gradients_leave_while_backward_runs(first: Sequence[int], then: Sequence[int], early: int, sharded: bool) -> None:
    """`early` of the four have left before backward has come to the first layer, and all when it ends."""

    def train(comm: Communicator) -> list[float]:
        def left() -> int:
            return sum(name.startswith("gradients.") for name, _ in comm.messages)

        options = {"bucket_bytes": lambda _: 1, "sharded": comm if sharded and comm.size > 1 else None}
        made = learner_of(lambda **_: Chain(), only_squares, comm, options=options)
        found: list[int] = []
        for made.model.calls in (first, then, then):
            hook = made.model.layers[made.model.calls[0]].weight.register_hook(lambda _: found.append(left()))
            made.backward(batch_of(FRAMES[comm.rank :: comm.size]))
            hook.remove()
            found.append(left())
            made.update(0.01)
        whole = 4 if early else 0  # by the end of backward
        assert comm.size == 1 or found == [0, 0, 4 + early, 4 + whole, 8 + early, 8 + whole]
        return weights_of(made.model)

    [alone] = on_ranks(1, train)
    for weights in on_ranks(2, train):
        assert weights == pytest.approx(alone, rel=1e-5)


def test_an_epoch_without_updates_is_never_the_best_and_ends_the_training_after_the_next(corpus: Path, tmp_path: Path) -> None:
    keys = {"corpus": corpus, "model": tmp_path / "model", "num_epochs": 4, "losses": "sum"}
    ended = hvdtrain(TOY, {**keys, "grad_scaler": {"init_scale": 3e38, "backoff_factor": 0.99}})
    assert ended.status == 2
    assert ended.out.count("skipped 20 of 20 updates") == 4, "in the rows, and as warnings"
    assert "expected updates, got none in epochs 1 and 2" in ended.err
    assert "best so far" not in ended.out
    reports = [json.loads(line) for line in (tmp_path / "scores.jsonl").read_text().splitlines()]
    assert [(report["skipped"], report["updated"]) for report in reports] == [(20, 0)] * 2


def test_an_evaluation_has_the_losses_that_are_not_finite() -> None:
    made = learner_of(lambda **_: Reused(False), only_squares, num_allowed_consec_invalid_gradient_steps=1)
    for compute in (made.backward, made.evaluate):
        compute(batch_of(FRAMES))
        compute(batch_of(FRAMES * numpy.float32(numpy.inf)))
        assert math.isfinite(made.meter.take_scores().means()["square"]) is (compute == made.backward)
    history = [EpochRecord(number, 0.1, {"dev_loss_ce": score}) for number, score in enumerate((-math.inf, 2.0, math.nan))]
    assert Measure().best(history) is history[1]


@pytest.mark.parametrize("size", [1, 2])
def test_an_update_without_any_gradient_changes_nothing(size: int) -> None:
    """As where `skip_broken` leaves out all of a batch."""

    def train(comm: Communicator) -> None:
        options = {"precision": Precision("float32", ScaleOptions()), "sharded": comm if size > 1 else None}
        made = learner_of(lambda **_: Reused(False), only_squares, comm, options=options, gradient_clip_global_norm=0.1)
        for batch in (batch_of(FRAMES), None):
            before = weights_of(made.model)
            made.backward(batch)
            made.update(0.1)
            assert (weights_of(made.model) == before) is (batch is None)
        assert made.meter.take_updates() == (1, 0)

    on_ranks(size, train)


def test_a_function_may_change_the_reduced_gradients_before_they_are_clipped() -> None:
    def change(*, model: nn.Module, optimizer: Any, **_: Any) -> None:
        assert optimizer.param_groups
        for parameter in model.parameters():
            parameter.grad *= 0.5

    def weights(**keys: Any) -> list[float]:
        learner = learner_of(lambda **_: Reused(False), only_squares, **keys)
        learner.backward(batch_of(FRAMES))
        learner.update(0.01)
        return weights_of(learner.model)

    assert weights(change_gradients=change, gradient_clip_global_norm=1e-3) == pytest.approx(
        weights(gradient_clip_global_norm=1e-3)
    )
    assert weights(change_gradients=change) != pytest.approx(weights())


def test_rates_and_gradients_that_the_users_code_sets_are_refused() -> None:
    learner = learner_of(lambda **_: Reused(False), only_squares)
    for rate in (0.01, 0.02):
        learner.backward(batch_of(FRAMES))
        learner.update(rate)
    learner.optimizer.param_groups[0]["lr"] = 0.5
    learner.backward(batch_of(FRAMES))
    with pytest.raises(ConfigError, match="optimizer: expected the learning rate 0.02 of the last update in a group, got 0.5"):
        learner.update(0.03)
    learner.optimizer.load_state_dict(learner.optimizer.state_dict())
    learner.update(0.03)
    several = [{"class": "sgd", "parameters": "first.*"}, {"class": "sgd", "momentum": 0.9}]
    learner = learner_of(lambda **_: Reused(False), only_squares, optimizer=several)
    learner.backward(batch_of(FRAMES))
    learner.update(0.01)
    learner.optimizer.param_groups[1]["lr"] = 0.5
    learner.backward(batch_of(FRAMES))
    with pytest.raises(ConfigError, match="optimizer: expected the learning rate 0.01 of the last update in a group, got 0.5"):
        learner.update(0.01)

    def own_backward(*, model: nn.Module, **given: Any) -> None:
        sum(parameter.sum() for parameter in model.parameters()).backward()  # type: ignore[union-attr]
        only_squares(model=model, **given)

    for splits in (False, True):
        learner = learner_of(lambda **_: Reused(False), own_backward, split_on_oom=splits)
        with pytest.raises(ConfigError, match="train_step: expected no gradients before those of the marked losses"):
            learner.backward(batch_of(FRAMES))

    def zeros(*, model: nn.Module, **given: Any) -> None:
        own_backward(model=model, **given)
        model.zero_grad(set_to_none=False)

    learner_of(lambda **_: Reused(False), zeros).backward(batch_of(FRAMES))


def test_the_groups_of_a_functions_optimizer_keep_the_ratios_of_their_learning_rates() -> None:
    def made(*rates: float, **usual: float) -> list[float]:
        layers = [nn.Linear(1, 1) for _ in rates]
        groups = [
            {"params": layer.parameters(), **({"lr": rate} if rate else {})} for layer, rate in zip(layers, rates, strict=True)
        ]
        return take_multipliers(make_optimizer(lambda _: torch.optim.SGD(groups, **usual), nn.ModuleList(layers)).param_groups)

    assert made(0.0, 0.5, lr=0.1) == [1.0, 5.0]
    assert made(0.2, 0.5, lr=0.1) == made(0.2, 0.5) == [0.4, 1.0]
    assert made(0.2, 0.2) == [1.0, 1.0]


def test_a_fused_sgd_with_momentum_and_a_gradient_that_comes_late() -> None:
    for fused, is_stored in ((True, False), (False, False), (True, True)):
        early, late = (nn.Parameter(torch.ones(2)) for _ in range(2))
        optimizer = torch.optim.SGD([early, late], lr=0.1, momentum=0.9, fused=fused)
        if is_stored:
            optimizer.state[late] = {}  # as in checkpoints of earlier releases
        for parameters in ([early], [early, late], [early, late]):
            for parameter in parameters:
                parameter.grad = torch.ones(2)
            complete_momentum(optimizer)
            optimizer.step()
        assert early.tolist() + late.tolist() == pytest.approx([0.439, 0.439, 0.71, 0.71])


def test_what_decays_does_not_depend_on_the_number_of_ranks() -> None:
    def groups(comm: Communicator) -> list[list[float]]:
        model = nn.Sequential(nn.BatchNorm1d(2, affine=True), nn.Linear(2, 2))
        optimizer = {"class": "sgd", "weight_decay": 0.1, "weight_decay_modules_blacklist": [nn.BatchNorm1d]}
        options = {"batch_norm": comm if comm.size > 1 else None}
        made = learner_of(lambda **_: model, only_squares, comm, options=options, optimizer=optimizer)
        assert all(isinstance(module, kind) for module, kind in zip(made.model, (nn.BatchNorm1d, nn.Linear), strict=True))
        return [[group["weight_decay"], len(group["params"])] for group in made.optimizer.param_groups]

    for size in (1, 2):
        assert on_ranks(size, groups) == [[[0.1, 1], [0.0, 3]]] * size


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_batch_norm_over_the_ranks_has_the_type_and_the_precision_of_pytorchs(dtype: torch.dtype) -> None:
    rows = (torch.randn(6, 2, generator=torch.Generator().manual_seed(1)) + 100).to(dtype)
    alone = nn.BatchNorm1d(2)

    def normalized(comm: Communicator) -> torch.Tensor:
        module = nn.BatchNorm1d(2)
        synchronize(module, comm)
        return module(rows[comm.rank :: 2]).detach()

    parts = on_ranks(2, normalized)
    assert torch.equal(torch.stack(parts, dim=1).flatten(0, 1), alone(rows))
    assert parts[0].dtype == dtype


@pytest.mark.parametrize("names", [("one", "other"), ("one", ""), ("", "other")])
def test_ranks_that_compute_different_batch_norms_end_with_their_names(names: tuple[str, str]) -> None:
    class Skipping(nn.Module):
        """Also as in LayerDrop."""

        def __init__(self, name: str) -> None:
            super().__init__()
            self.one, self.other = nn.BatchNorm1d(2), nn.BatchNorm1d(2)
            self.last = nn.Linear(2, 1)
            self.name = name

        def forward(self, frames: torch.Tensor) -> torch.Tensor:
            return self.last(self.get_submodule(self.name)(frames[:, 0]) if self.name else frames[:, 0])

    def train(comm: Communicator) -> None:
        name = names[comm.rank] if comm.rank < 2 else "one"
        made = learner_of(lambda **_: Skipping(name), only_squares, comm, options={"batch_norm": comm})
        assert made.try_batch(batch_of(FRAMES)), "without the others"
        made.backward(None if comm.rank == 2 else batch_of(FRAMES))

    with pytest.raises(ConfigError, match=" on rank 0") as caught:
        on_ranks(3, train)
    assert all(f"{name or 'the end of the pass'} on rank {rank}" in str(caught.value) for rank, name in enumerate(names))


def test_hooks_profilers_and_replaced_steps_are_not_left_out_of_an_update() -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], lr=0.5)
    parameter.grad = torch.ones(2)
    called: list[str] = []
    plain_step(optimizer)
    assert parameter.tolist() == [0.5, 0.5]
    handle = optimizer.register_step_pre_hook(lambda *_: called.append("hook"))
    plain_step(optimizer)
    handle.remove()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        plain_step(optimizer)
    assert "Optimizer.step#SGD.step" in {event.key for event in profile.key_averages()}
    inner = optimizer.step
    optimizer.step = lambda: (called.append("replaced"), inner())  # type: ignore[method-assign]
    plain_step(optimizer)
    assert called == ["hook", "replaced"]
    assert parameter.tolist() == [-1.0, -1.0]

    class Around(torch.optim.Optimizer):
        """As published ones around another one: without PyTorch's constructor."""

        def __init__(self) -> None:
            pass

        def step(self, closure: Any = None) -> Any:
            return inner()

    plain_step(Around())
    assert parameter.tolist() == [-1.5, -1.5]


@pytest.mark.parametrize("share", [0.5, 0.9999999, 1.0, 1.0000001, 1.0005, 1.002, 30.0, math.inf])
def test_a_norm_is_clipped_as_by_pytorch_to_the_last_bit(share: float) -> None:
    """Also where it is so far below the limit that nothing is computed."""
    parameters = [torch.nn.Parameter(torch.zeros(shape)) for shape in (3, 40)]
    torch.manual_seed(1)
    expected = [torch.randn_like(parameter) for parameter in parameters]
    limit = share * torch.linalg.vector_norm(torch.cat(expected)).item()
    for parameter, gradient in zip(parameters, expected, strict=True):
        parameter.grad = gradient.clone()
    torch.nn.utils.clip_grad_norm_(parameters, limit)
    clipped = [parameter.grad for parameter in parameters]
    for parameter, gradient in zip(parameters, expected, strict=True):
        parameter.grad = gradient
    noise = GradientNoise(lambda: (1, None), torch.device("cpu"))
    TorchGradients(parameters, noise, 0, lambda order: list(torch._foreach_norm(expected, order))).clip_norm(limit)
    assert all(
        parameter.grad is not None and parameter.grad.equal(one) for parameter, one in zip(parameters, clipped, strict=True)
    )
