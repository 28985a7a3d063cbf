"""Several optimizers in one training: which parameters each has, its options, and what becomes of its state."""

from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import nn

import hvdtrain
from hvdtrain.config.keys import ALONE
from hvdtrain.errors import ConfigError, HvdtrainError
from hvdtrain.learner.keys import LearnerKeys
from hvdtrain.learner.torch.several_optimizers import SeveralOptimizers
from hvdtrain.plugins.several_optimizers.optimizers import make_optimizer


class Model(nn.Module):
    """With an embedding that is also the output layer, a convolution and a norm: nothing for Muon but `linear` and the GRU."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embedding = nn.Embedding(5, 4)
        self.conv = nn.Conv1d(4, 4, 3, padding=1)
        self.gru = nn.GRU(4, 4, batch_first=True)
        self.norm = nn.LayerNorm(4)
        self.linear = nn.Linear(4, 4)
        self.output = nn.Linear(4, 5, bias=False)
        self.output.weight = self.embedding.weight

    def forward(self, letters: torch.Tensor) -> torch.Tensor:
        embedded = self.conv(self.embedding(letters).transpose(1, 2)).transpose(1, 2)
        return self.output(self.norm(self.linear(self.gru(embedded)[0])))  # type: ignore[no-any-return]


MATRICES = {"gru.weight_ih_l0", "gru.weight_hh_l0", "linear.weight"}


def shares(spec: Any) -> dict[str, set[str]]:
    """The names of the parameters that each optimizer has, by the name of its class."""
    model = Model()
    made = make_optimizer(spec, model)
    assert isinstance(made, SeveralOptimizers)
    names = {id(one): name for name, one in model.named_parameters()}
    return {
        type(member).__name__: {names[id(one)] for group in member.param_groups for one in group["params"]}
        for member in made.members
    }


def wrong(spec: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        make_optimizer(spec, Model())
    return str(caught.value)


def test_muon_takes_matrices_and_adamw_the_rest() -> None:
    rest = {name for name, _ in Model().named_parameters()} - MATRICES
    assert shares("muon") == shares({"class": "muon"}) == {"Muon": MATRICES, "AdamW": rest}
    given = {"class": "muon", "momentum": 0.9, "weight_decay": 0.02, "others": {"class": "adam", "betas": (0.8, 0.9)}}
    assert shares(given) == {"Muon": MATRICES, "Adam": rest}
    muon, adam = make_optimizer(given, Model()).param_groups
    assert (muon["momentum"], muon["weight_decay"], muon["adjust_lr_fn"]) == (0.9, 0.02, "match_rms_adamw")
    assert (adam["betas"], adam["weight_decay"]) == ((0.8, 0.9), 0)
    own = [{"class": "muon", "learning_rate_multiplier": 20.0}, {"class": "adamw", "weight_decay": 0.1}]
    muon, decayed, undecayed = make_optimizer(own, Model()).param_groups
    assert (muon["adjust_lr_fn"], muon["learning_rate_multiplier"]) == (None, 20.0), "the size that torch's class gives them"
    assert [decayed["weight_decay"], undecayed["weight_decay"]] == [0.1, 0.0]


def test_only_matrices_are_muons_alone() -> None:
    made = make_optimizer({"class": "muon", "others": {"class": "adamw"}}, nn.Linear(3, 3, bias=False))
    assert type(made) is torch.optim.Muon
    assert made.param_groups[0]["adjust_lr_fn"] is None


def test_patterns_say_which_parameters_an_optimizer_has() -> None:
    found = shares(
        [
            {"class": "sgd", "parameters": "gru.*"},
            {"class": "muon", "parameters": "matrices"},
            {"class": "rmsprop", "parameters": ["conv.*", "*.bias"]},
            {"class": "adamw"},
        ]
    )
    assert found["SGD"] == {name for name, _ in Model().named_parameters() if name.startswith("gru.")}
    assert found["Muon"] == {"linear.weight"}
    assert found["RMSprop"] == {"conv.weight", "conv.bias", "norm.bias", "linear.bias"}
    assert found["AdamW"] == {"embedding.weight", "norm.weight"}


def test_mistakes_name_the_entry() -> None:
    assert "optimizer[0].parameters: expected patterns of names of trained parameters, got 'linaer.*'" in wrong(
        [{"class": "sgd", "parameters": "linaer.*"}, {"class": "adam"}]
    )
    assert "optimizer: expected one for each trained parameter, got none for conv.weight, conv.bias, " in wrong(
        [{"class": "sgd", "parameters": ["gru.*", "linear.*", "embedding.*"]}]
    )
    assert "optimizer[1].parameters: expected parameters for Adam, got none that are left" in wrong(
        [{"class": "sgd"}, {"class": "adam"}]
    )
    assert "optimizer[1].class: expected one of adadelta," in wrong([{"class": "sgd", "parameters": "gru.*"}, {"class": "adma"}])
    assert "optimizer.others.wieght_decay: expected options of AdamW" in wrong(
        {"class": "muon", "others": {"class": "adamw", "wieght_decay": 1}}
    )
    assert "optimizer.others.param_groups_custom: expected it with a single optimizer only" in wrong(
        {"class": "muon", "others": {"class": "adamw", "param_groups_custom": len}}
    )
    assert "optimizer.parameters: expected options of Adam" in wrong({"class": "adam", "parameters": "gru.*"})
    assert "Muon only supports 2D parameters" in wrong([{"class": "muon", "parameters": "conv.*"}, {"class": "adam"}])
    keys = LearnerKeys(get_model="a:b", train_step="a:b", optimizer=[{"class": "sgd", "lr": 1}, {}, 3])  # type: ignore[list-item]
    assert [str(found).partition(" (")[0] for found in keys.problems(ALONE)] == [
        "optimizer[0].lr: expected the learning rate in the key learning_rate, got it in the optimizer",
        "optimizer[1]: expected a dict with the entry 'class'",
        "optimizer[2]: expected a dict with the entry 'class', got 3",
    ]


def test_factors_on_the_learning_rate_by_patterns() -> None:
    spec = {
        "class": "adamw",
        "weight_decay": 0.1,
        "learning_rate_multiplier": 2.0,
        "learning_rate_multipliers": {"embedding.*": 0.1, "gru.weight_*": 0.5, "gru.*": 0.25},
    }
    model = Model()
    groups = make_optimizer(spec, model).param_groups
    names = {id(one): name for name, one in model.named_parameters()}
    factors = {names[id(one)]: group.get("learning_rate_multiplier", 1.0) for group in groups for one in group["params"]}
    decayed = {names[id(one)] for group in groups if group["weight_decay"] for one in group["params"]}
    assert decayed == {"conv.weight", "gru.weight_ih_l0", "gru.weight_hh_l0", "linear.weight"}
    expected = {"embedding.weight": 0.2, "gru.weight_hh_l0": 1.0, "gru.bias_hh_l0": 0.5, "linear.weight": 2.0, "norm.bias": 2.0}
    assert {name: factors[name] for name in expected} == expected
    assert "optimizer.learning_rate_multipliers: expected patterns of names of trained parameters, got 'decoder.*'" in wrong(
        {"class": "adam", "learning_rate_multipliers": {"decoder.*": 1.0}}
    )
    assert "optimizer.learning_rate_multipliers['gru.*']: expected zero or a positive number, got -1" in wrong(
        {"class": "adam", "learning_rate_multipliers": {"gru.*": -1}}
    )


class SavesMore(torch.optim.SGD):
    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"steps": 3}


def test_what_would_be_lost_is_refused() -> None:
    assert "got SavesMore, which also saves steps" in wrong([{"class": "muon"}, {"class": SavesMore}])


def train(folder: Path, spec: Any, num_epochs: int, **more: Any) -> Any:
    def train_step(*, model: nn.Module, extern_data: Any, **_: Any) -> None:
        letters = extern_data["data"].raw_tensor
        losses = nn.functional.cross_entropy(model(letters).flatten(0, 1), letters.flatten(), reduction="none")
        hvdtrain.get_run_ctx().mark_as_loss(losses, "ce", use_normalized_loss=True)

    data = [numpy.arange(number, number + 4) % 5 for number in range(12)]
    keys = {"train": data, "max_seqs": 3, "num_epochs": num_epochs, "learning_rate": 0.01, "num_threads": 1, "optimizer": spec}
    keys |= {"model": str(folder / "model"), "get_model": lambda **_: Model(), "train_step": train_step}
    return hvdtrain.train(keys | more)


def test_two_steps_equal_those_of_torchs_own_classes(tmp_path: Path) -> None:
    """Muon and AdamW side by side in a hand-written loop, on the same batches."""
    result = train(tmp_path, {"class": "muon", "weight_decay": 0.02, "others": {"class": "adamw", "eps": 1e-6}}, 2)
    model = Model()
    named = dict(model.named_parameters())
    rest = [one for name, one in named.items() if name not in MATRICES]
    optimizers = [
        torch.optim.Muon([named[name] for name in named if name in MATRICES], 0.01, 0.02, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(rest, 0.01, eps=1e-6),
    ]
    for _ in range(2):
        for first in range(0, 12, 3):
            letters = torch.tensor([[(number + place) % 5 for place in range(4)] for number in range(first, first + 3)])
            nn.functional.cross_entropy(model(letters).flatten(0, 1), letters.flatten(), reduction="sum").backward()
            for parameter in model.parameters():
                parameter.grad /= 12  # type: ignore[operator]
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(dict(result.model.named_parameters())[name], parameter, rtol=0, atol=0, msg=name)


def test_a_parameter_that_changes_its_optimizer_is_refused(tmp_path: Path) -> None:
    def spec(pattern: str) -> list[dict[str, Any]]:
        return [{"class": "sgd", "momentum": 0.9, "parameters": pattern}, {"class": "adamw", "weight_decay": 0.1}]

    train(tmp_path, spec("gru.weight*"), 1)
    with pytest.raises(
        HvdtrainError, match=r"it has that of AdamW instead of SGD for gru.bias_ih_l0, gru.bias_hh_l0 \(continue with"
    ):
        train(tmp_path, spec("gru.*"), 2)
    with pytest.raises(HvdtrainError, match="expected the state of the optimizer AdamW, got that of SGD and AdamW"):
        train(tmp_path, {"class": "adamw"}, 2)
    again = spec("gru.weight*")
    again[1]["learning_rate_multipliers"] = {"norm.*": 0.5}  # another number of groups
    again[1]["weight_decay"] = 0.2
    assert train(tmp_path, again, 2).num_epochs == 1
    assert train(tmp_path, spec("gru.*"), 3, fresh_optimizer=True).num_epochs == 1
