"""Which parameters an optimizer decays, and groups of them with options of their own."""

from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from learners import batch_of, learner_of

from hvdtrain.context import get_run_ctx
from hvdtrain.errors import ConfigError
from hvdtrain.learner.torch.optimizer import make_optimizer
from hvdtrain.learner.torch.parameter_groups import take_multipliers
from hvdtrain.learner.torch.step import TorchLearner


class Norm(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(2))


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(3, 2)
        self.linear = torch.nn.Linear(2, 2)
        self.norm = torch.nn.LayerNorm(2)
        self.own = Norm()
        self.frozen = torch.nn.Parameter(torch.ones(2), requires_grad=False)


def decayed(**options: Any) -> set[str]:
    """The names of the parameters that decay, of a model with four kinds of modules."""
    model = Model()
    made = make_optimizer({"class": "adamw", "weight_decay": 0.1, **options}, model)
    ids = {id(one) for group in made.param_groups if group["weight_decay"] for one in group["params"]}
    return {name for name, one in model.named_parameters() if id(one) in ids}


def problems(**options: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        make_optimizer({"class": "adamw", **options}, Model())
    return str(caught.value)


def test_a_blacklist_of_classes_or_names_takes_the_place_of_the_usual_one() -> None:
    assert decayed() == {"linear.weight", "own.scale"}
    assert decayed(weight_decay_modules_blacklist=[]) == {"linear.weight", "own.scale", "embedding.weight", "norm.weight"}
    everything_but_norms = {"linear.weight", "embedding.weight"}
    assert decayed(weight_decay_modules_blacklist=["torch.nn.LayerNorm", "Norm"]) == everything_but_norms
    assert decayed(weight_decay_modules_blacklist=[torch.nn.LayerNorm, Norm]) == everything_but_norms


def test_a_function_says_which_parameters_decay_and_none_leaves_it_to_the_rule() -> None:
    def include(*, module: torch.nn.Module, full_param_name: str, param: torch.Tensor, **_: Any) -> bool | None:
        if full_param_name == "own.scale":
            return False
        return True if isinstance(module, torch.nn.Linear) and param.dim() == 1 else None

    assert decayed(weight_decay_custom_include_check=include) == {"linear.weight", "linear.bias"}


def test_a_shared_parameter_is_in_one_group() -> None:
    model = Model()
    model.output = torch.nn.Linear(2, 3, bias=False)
    model.output.weight = model.embedding.weight
    made = make_optimizer({"class": "adamw", "weight_decay": 0.1}, model)
    assert sum(len(group["params"]) for group in made.param_groups) == 6
    assert len(made.param_groups[0]["params"]) == 2  # the shared one counts as the embedding's


def test_groups_by_a_function_with_rates_of_their_own() -> None:
    told: dict[str, Any] = {}

    def groups(*, model: Model, optimizer_class: type, optimizer_opts: dict[str, Any], **_: Any) -> list[dict[str, Any]]:
        told.update(optimizer_class=optimizer_class, optimizer_opts=optimizer_opts)
        slow = list(model.embedding.parameters())
        rest = [(name, one) for name, one in model.named_parameters() if one.requires_grad and one is not slow[0]]
        return [{"params": slow, "learning_rate_multiplier": 0.1, "weight_decay": 0.0}, {"params": rest}]

    made = make_optimizer({"class": "adamw", "weight_decay": 0.1, "param_groups_custom": groups}, Model())
    assert told == {"optimizer_class": torch.optim.AdamW, "optimizer_opts": {"weight_decay": 0.1}}
    assert [(len(group["params"]), group["weight_decay"]) for group in made.param_groups] == [(1, 0.0), (5, 0.1)]
    assert take_multipliers(made.param_groups) == [0.1, 1.0]
    assert "learning_rate_multiplier" not in made.param_groups[0]


def test_mistakes_are_told_with_what_was_expected() -> None:
    assert "weight_decai: expected options of AdamW: betas, eps, weight_decay, " in problems(weight_decai=0.1)
    assert "(did you mean weight_decay?)" in problems(weight_decai=0.1)
    assert problems(weight_decai=0.1, amsgrd=1).count("did you mean") == 2  # all at once
    assert "expected options of AdamW, got {'betas': (0.9, 2)}: Invalid beta" in problems(betas=(0.9, 2))
    wrong = problems(weight_decay=0.1, weight_decay_modules_blacklist=["LayerNrom", "rf.Strange"])
    assert "got 'LayerNrom' (did you mean LayerNorm?)" in wrong
    assert "got 'rf.Strange'" in wrong
    assert "expected a list of classes" in problems(weight_decay=0.1, weight_decay_modules_blacklist="LayerNorm")
    assert "expected a function" in problems(weight_decay=0.1, weight_decay_custom_include_check=3)
    assert "weight_decay: expected a positive number" in problems(weight_decay_modules_blacklist=["LayerNorm"])
    wrong = problems(weight_decay=0.1, weight_decay_custom_include_check=lambda **_: "no")
    assert "expected it to return True, False or None, got 'no' for embedding.weight" in wrong


def test_groups_that_cannot_be_right_are_refused() -> None:
    def wrong(returned: Any, **options: Any) -> str:
        return problems(param_groups_custom=lambda *, model, **_: returned(model), **options)

    assert "expected a function" in problems(param_groups_custom=[1])
    assert "return a list of dicts with the entry 'params', got a list of Parameter" in wrong(
        lambda model: list(model.parameters())
    )
    missing = wrong(lambda model: [{"params": model.linear.parameters()}])
    assert "got groups without embedding.weight, norm.weight, norm.bias, own.scale (requires_grad_(False)" in missing
    twice = wrong(lambda model: [{"params": model.parameters()}, {"params": [model.own.scale]}])
    assert "got own.scale twice" in twice
    foreign = wrong(lambda model: [{"params": [*model.parameters(), torch.nn.Parameter(torch.ones(1))]}])
    assert "a tensor that is not a parameter of the model" in foreign
    options = wrong(lambda model: [{"params": model.parameters(), "weight_dekay": 0, "learning_rate_multiplier": -1}])
    assert "param_groups_custom[0].weight_dekay: expected options of AdamW" in options
    assert "learning_rate_multiplier: expected zero or a positive number, got -1" in options
    both = wrong(lambda model: [{"params": model.parameters()}], weight_decay_modules_blacklist=["Norm"])
    assert "weight_decay_modules_blacklist: expected it without param_groups_custom" in both


def test_a_multiplier_holds_for_its_group_and_is_the_configs_after_loading(tmp_path: Path) -> None:
    def step(*, model: Model, **_: Any) -> None:
        get_run_ctx().mark_as_loss(torch.stack([model.own.scale.sum(), model.norm.bias.sum()]), "sum")

    def made(multiplier: float) -> TorchLearner:
        def groups(*, model: Model, **_: Any) -> list[dict[str, Any]]:
            own = list(model.own.parameters())
            rest = [one for one in model.parameters() if one is not own[0]]
            return [{"params": own, "learning_rate_multiplier": multiplier}, {"params": rest}]

        return learner_of(lambda **_: Model(), step, optimizer={"class": "sgd", "param_groups_custom": groups})

    batch = batch_of(numpy.zeros((1, 1, 2), numpy.float32))
    first, second = made(0.1), made(2.0)
    for learner, scale in ((first, 0.95), (second, -0.05)):
        learner.backward(batch)
        learner.update(0.5)
        assert learner.model.own.scale.tolist() == pytest.approx([scale, scale])
        assert learner.model.norm.bias.tolist() == pytest.approx([-0.5 * (1 + (learner is second))] * 2)
        first.state.contents({}).write(tmp_path / "model", tmp_path / "optimizer")
        second.state.load(tmp_path / "model", tmp_path / "optimizer")


def test_biases_of_recurrent_layers_and_attention_do_not_decay() -> None:
    """Their names do not end in "bias"."""
    parts = {"gru": torch.nn.GRU(2, 2, 2, bidirectional=True), "cell": torch.nn.LSTMCell(2, 2)}
    model = torch.nn.ModuleDict({**parts, "attention": torch.nn.MultiheadAttention(2, 1, add_bias_kv=True)})
    made = make_optimizer({"class": "adamw", "weight_decay": 0.1}, model)
    ids = {id(one) for group in made.param_groups if group["weight_decay"] for one in group["params"]}
    names = [name for name, one in model.named_parameters() if id(one) in ids]
    assert [name for name in names if "bias" in name] == []
    assert len(names) == 8 + 2 + 2, "all of their matrices do"
