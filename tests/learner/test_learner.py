"""The torch learner by itself: optimizers, clipping, scores, and what a train_step may not do."""

import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed
from launching import refused
from learners import BATCH, learner_of
from torch.distributed.device_mesh import init_device_mesh

from hvdtrain.context import get_run_ctx
from hvdtrain.errors import ConfigError
from hvdtrain.learner.torch.model import check_import_order
from hvdtrain.learner.torch.optimizer import make_optimizer


def squares(*, model: torch.nn.Module, extern_data: dict[str, Any], **_: Any) -> None:
    """The sum of squared outputs of every real frame."""
    data = extern_data["data"]
    get_run_ctx().mark_as_loss(model(data.raw_tensor)[data.mask].square().sum(-1), "square")


def learner(train_step: Callable[..., None] = squares, **keys: Any) -> Any:
    """A linear layer from 2 to 1 feature, weights 1 and 1, no bias."""

    def get_model(**_: Any) -> torch.nn.Module:
        layer = torch.nn.Linear(2, 1, bias=False)
        torch.nn.init.ones_(layer.weight)
        return layer

    return learner_of(get_model, train_step, **keys)


def test_a_step_of_sgd_on_the_sum_over_real_frames() -> None:
    made = learner()
    made.backward(BATCH)
    made.update(0.01)
    # outputs 3, 7, 11; the gradient of the sum of their squares is 2 * (3 * (1, 2) + 7 * (3, 4) + 11 * (5, 6))
    assert made.model.weight.tolist() == [pytest.approx([1 - 0.01 * 158, 1 - 0.01 * 200], rel=1e-6)]
    assert made.meter.take_scores().means() == {"square": pytest.approx((9 + 49 + 121) / 3)}
    assert made.meter.take_scores().means() == {}
    assert made.meter.take_step_seconds() > 0
    assert made.model.weight.grad is None


def test_an_evaluation_that_changes_the_models_buffers_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    def step(*, model: torch.nn.Module, extern_data: dict[str, Any], **_: Any) -> None:
        squares(model=model, extern_data=extern_data)
        if model.training or next(is_careless):
            model.queue += 1

    def get_model(**_: Any) -> torch.nn.Module:
        layer = torch.nn.Linear(2, 1, bias=False)
        layer.register_buffer("queue", torch.zeros(3))
        layer.register_buffer("table", torch.ones(3))
        return layer

    made = learner_of(get_model, step)
    is_careless = iter([False, True, True])
    for _ in range(3):
        made.backward(BATCH)
        with made.evaluating("dev"):
            made.evaluate(BATCH)
    assert [record.getMessage().partition(" (")[0] for record in caplog.records] == [
        "dev: evaluating it changed tensors of the model: queue"
    ]


def test_an_observer_gets_the_gradients_that_an_update_applies() -> None:
    seen: list[dict[str, Any]] = []
    made = learner(gradient_clip=0.25)
    made.observer = lambda gradients: seen.append({name: values.tolist() for name, values in gradients})
    made.backward(BATCH, completes_update=False)
    made.backward(BATCH)
    made.update(0.01)
    assert seen == [{"weight": [pytest.approx([2 * 158, 2 * 200])]}], "before they are clipped"
    assert [(name, type(module)) for name, module in made.modules()] == [("", torch.nn.Linear)]


def test_clipping_by_norm_and_by_value() -> None:
    by_norm = learner(gradient_clip_global_norm=1.0)
    by_norm.backward(BATCH)
    by_norm.update(1.0)
    assert (by_norm.model.weight - 1).norm().item() == pytest.approx(1.0, rel=1e-4)
    by_value = learner(gradient_clip=0.25)
    by_value.backward(BATCH)
    by_value.update(1.0)
    assert by_value.model.weight.tolist() == [[0.75, 0.75]]


def test_an_evaluation_changes_nothing_and_a_rank_without_a_batch_adds_zeros() -> None:
    made = learner()
    made.evaluate(BATCH)
    assert made.model.weight.tolist() == [[1.0, 1.0]]
    assert not made.model.training
    made.backward(BATCH)
    assert made.model.training
    made.update(0.0)
    made.backward(None)
    made.update(1.0)
    assert made.model.weight.tolist() == [[1.0, 1.0]]


def test_a_normalized_loss_is_a_mean_and_a_scale_is_a_factor() -> None:
    def step(*, model: torch.nn.Module, extern_data: dict[str, Any], **_: Any) -> None:
        data = extern_data["data"]
        values = model(data.raw_tensor)[data.mask].square().sum(-1)
        get_run_ctx().mark_as_loss(values, "mean", use_normalized_loss=True, scale=2.0)
        get_run_ctx().mark_as_loss(values, "share", as_error=True, custom_inv_norm_factor=torch.tensor([4.0, 6.0]))

    made = learner(step)
    made.backward(BATCH)
    made.update(0.01)
    assert made.model.weight.tolist() == [pytest.approx([1 - 0.01 * 158 * 2 / 3, 1 - 0.01 * 200 * 2 / 3], rel=1e-6)]
    assert made.meter.take_scores().means() == {"mean": pytest.approx(179 / 3), "share": pytest.approx(17.9)}


@pytest.mark.parametrize(
    ("train_step", "message"),
    [
        (lambda **_: None, "expected a call of hvdtrain.get_run_ctx().mark_as_loss(...), got none"),
        (lambda **_: get_run_ctx().mark_as_loss(torch.ones(2), "constant"), "expected a loss that depends on the model"),
        (
            lambda *, model, **_: [get_run_ctx().mark_as_loss(model.weight, "same") for _ in range(2)],
            "a unique name for every loss, got 'same' twice",
        ),
        (
            lambda **_: get_run_ctx().mark_as_loss(0.5, "ce"),
            "a tensor with one number per element in mark_as_loss(..., 'ce'), got 0.5",
        ),
    ],
)
def test_what_a_train_step_may_not_do(train_step: Callable[..., None], message: str) -> None:
    with pytest.raises(ConfigError, match="train_step: ") as caught:
        learner(train_step).backward(BATCH)
    assert message in str(caught.value)


def test_a_complex_loss_is_not_trained_by_its_real_part() -> None:
    def step(*, model: torch.nn.Module, **_: Any) -> None:
        get_run_ctx().mark_as_loss(model.weight * 1j, "complex")

    with (
        pytest.raises(RuntimeError, match="only for real scalar outputs"),
        pytest.warns(UserWarning, match="discards the imaginary"),
    ):
        learner(step).backward(BATCH)


def test_the_context_is_there_inside_of_a_step_only() -> None:
    with refused("get_run_ctx: wrong-call"):
        get_run_ctx()


def test_optimizers_by_name_and_their_options() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.LayerNorm(2))
    made = make_optimizer({"class": "AdamW", "epsilon": 1e-6, "weight_decay": 0.1}, model)
    assert isinstance(made, torch.optim.AdamW)
    assert [(len(group["params"]), group["weight_decay"]) for group in made.param_groups] == [(1, 0.1), (3, 0.0)]
    assert made.param_groups[0]["eps"] == 1e-6
    assert isinstance(make_optimizer("sgd", model), torch.optim.SGD)
    assert isinstance(make_optimizer(lambda parameters: torch.optim.Adam(parameters), model), torch.optim.Adam)
    with refused("optimizer.class: unknown-value"):
        make_optimizer({"class": "adamm"}, model)
    with refused("optimizer.betas: unknown-key"):
        make_optimizer({"class": "sgd", "betas": (0.9, 0.99)}, model)


def test_a_device_that_is_not_there_and_a_model_that_is_none() -> None:
    if not torch.cuda.is_available():
        with refused("device: unavailable"):
            learner(device="cuda")
    with refused("device: unknown-value"):
        learner(device="tpux")
    with refused("get_model: wrong-result"):
        learner_of(lambda **_: 3, squares)


def test_a_model_that_is_sharded_already_is_refused() -> None:
    # PyTorch keeps the process group for the thread that shards. When another thread forks, the new process frees what belonged
    # to all others, and crashes as it waits for the group's own threads. So this thread ends first.
    with ThreadPoolExecutor(1) as threads:
        threads.submit(refuse_a_sharded_model).result()


def refuse_a_sharded_model() -> None:
    from torch.distributed.fsdp import fully_shard  # here, as it takes a second

    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Tanh())
        fully_shard(model[0], mesh=init_device_mesh("cpu", (1,)))
        with refused("get_model: wrong-result"):
            learner_of(lambda **_: model, squares)
    finally:
        torch.distributed.destroy_process_group()


def test_dropout_differs_between_ranks_and_steps_and_comes_back_after_a_restart() -> None:
    drawn: list[list[float]] = []

    def step(*, model: torch.nn.Module, **_: Any) -> None:
        drawn.append(torch.rand(3).tolist())
        get_run_ctx().mark_as_loss(model.weight.sum(), "any")

    for rank, first_step in ((0, 0), (1, 0), (0, 1)):
        made = learner_of(lambda **_: torch.nn.Linear(2, 1), step, options={"rank": rank})
        made.begin_epoch(1, first_step)
        for _ in range(2 - first_step):
            made.backward(BATCH)
            made.update(0.0)
    rank0_step0, rank0_step1, rank1_step0, rank1_step1, restarted_step1 = drawn
    assert len({tuple(numbers) for numbers in (rank0_step0, rank0_step1, rank1_step0, rank1_step1)}) == 4
    assert restarted_step1 == rank0_step1


def test_tensorflow_before_triton_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch would import triton, which crashes in a process with TensorFlow; a triton that is there already does not."""
    (tmp_path / "triton").mkdir()
    (tmp_path / "triton" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "triton", raising=False)
    monkeypatch.setitem(sys.modules, "tensorflow", ModuleType("tensorflow"))
    with pytest.raises(ConfigError, match="expected a process without TensorFlow for 'torch', got one that has imported it"):
        learner()
    monkeypatch.setitem(sys.modules, "triton", ModuleType("triton"))
    check_import_order()
