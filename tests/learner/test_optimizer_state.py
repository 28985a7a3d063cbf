"""Every optimizer is stopped and resumed, on one rank and two, sharded or not; and its options are those of the config."""

import copy
import random
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from learners import batch_of, learner_of
from thread_ranks import on_ranks
from trainings import marked

from hvdtrain.comm.base import Communicator
from hvdtrain.comm.single import SingleCommunicator
from hvdtrain.context import get_run_ctx
from hvdtrain.errors import CheckpointError, ConfigError, DamagedCheckpoint
from hvdtrain.learner.reducers import ReduceKeys
from hvdtrain.learner.torch.step import TorchLearner
from hvdtrain.plugins.sharded.shares import check_shares
from hvdtrain.runtime.log import LogKeys, open_log
from hvdtrain.runtime.timer import Timer

FRAMES = numpy.random.default_rng(1).normal(size=(8, 2, 3)).astype(numpy.float32)


class Lion(torch.optim.Optimizer):
    """A user's own (Chen et al., 2023), whose defaults have no more than its options."""

    def __init__(
        self, params: Any, lr: float = 1e-4, betas: tuple[float, float] = (0.9, 0.99), weight_decay: float = 0.0
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for one in group["params"]:
                if one.grad is not None:
                    average = self.state[one].setdefault("exp_avg", torch.zeros_like(one))
                    one.mul_(1 - group["lr"] * group["weight_decay"])
                    one.add_(average.lerp(one.grad, 1 - group["betas"][0]).sign_(), alpha=-group["lr"])
                    average.lerp_(one.grad, 1 - group["betas"][1])


class Growing(torch.optim.Optimizer):
    """A user's own that keeps in its groups what it estimates while it trains, like Prodigy."""

    def __init__(self, params: Any, lr: float = 1.0, d0: float = 1e-3, growth: float = 2.0) -> None:
        super().__init__(params, {"lr": lr, "d": d0, "d0": d0, "growth": growth})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for one in group["params"]:
                if one.grad is not None:
                    one.add_(one.grad, alpha=-group["lr"] * group["d"])
            group["d"] *= group["growth"]


class ScheduleFree(torch.optim.Optimizer):
    """A user's own with two sets of weights (Defazio et al., 2024)."""

    def __init__(self, params: Any, lr: float = 1.0, momentum: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "k": 0, "train_mode": False})

    @torch.no_grad()
    def _move(self, training: bool) -> None:
        for group in self.param_groups:
            for one in group["params"]:
                if group["train_mode"] != training and "z" in self.state[one]:
                    share = 1 - group["momentum"] if training else 1 - 1 / group["momentum"]
                    one.lerp_(self.state[one]["z"], share)
            group["train_mode"] = training

    def train(self) -> None:
        self._move(True)

    def eval(self) -> None:
        self._move(False)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            if not group["train_mode"]:
                raise RuntimeError("call train() before step()")
            for one in group["params"]:
                if one.grad is not None:
                    z = self.state[one].setdefault("z", one.clone())
                    share = 1 / (group["k"] + 1)
                    one.lerp_(z, share).add_(one.grad, alpha=group["lr"] * (group["momentum"] * (1 - share) - 1))
                    z.sub_(one.grad, alpha=group["lr"])
            group["k"] += 1


NOT_USED = {"Optimizer", "LBFGS", "SparseAdam"}
OF_TORCH = [
    name
    for name, member in vars(torch.optim).items()
    if isinstance(member, type) and issubclass(member, torch.optim.Optimizer) and name not in NOT_USED
]
SPECS: dict[str, Any] = {
    **{name: {"class": name.lower()} for name in OF_TORCH},
    "SGD with momentum": {"class": "sgd", "momentum": 0.9, "weight_decay": 0.1},
    "AMSGrad": {"class": "adamw", "amsgrad": True, "weight_decay": 0.1},
    "Lion": {"class": f"{__name__}.Lion", "weight_decay": 0.1},
    "Growing": {"class": Growing},
    "ScheduleFree": {"class": ScheduleFree},
    "Muon and AdamW": [
        {"class": "muon", "parameters": ["first", "unused"], "momentum": 0.9},
        {"class": "adamw", "weight_decay": 0.1, "learning_rate_multiplier": 0.5},
    ],
    "several with modes": [{"class": "sgd", "momentum": 0.9, "parameters": "l*"}, {"class": ScheduleFree}],
    "a function": lambda parameters: torch.optim.Adam(parameters, betas=(0.8, 0.9)),
}


class Model(torch.nn.Module):
    """Matrices only, as Muon requires it; one of them never gets a gradient, another one in every second batch only."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.first, self.last, self.seldom, self.unused = (
            torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in ((3, 4), (4, 2), (3, 2), (5, 5))
        )


def train_step(*, model: Model, extern_data: Any, **_: Any) -> None:
    frames = extern_data["data"].raw_tensor
    outputs = (frames @ model.first).tanh() @ model.last
    if get_run_ctx().step % 2:
        outputs = outputs + frames @ model.seldom
    get_run_ctx().mark_as_loss((outputs - 1).square().sum(-1), "square", use_normalized_loss=True)


def learner(comm: Communicator, optimizer: Any, sharded: bool = False, **keys: Any) -> TorchLearner:
    gradients = ReduceKeys().reducer(comm, Timer()).gradients
    options = {"sharded": comm if sharded else None, "bucket_bytes": lambda _: 30}
    made: TorchLearner = learner_of(
        lambda **_: Model(), train_step, comm, gradients=gradients, options=options, optimizer=optimizer, **keys
    )
    return made


def updated(made: TorchLearner, comm: Communicator, first: int, last: int) -> TorchLearner:
    """After updates on a rank's share of the frames; in every third one, the last rank of several has no batch."""
    made.begin_epoch(1, first)
    for number in range(first, last):
        without = number % 3 == 2 and comm.size > 1
        size, rank = (comm.size - 1, comm.rank) if without else (comm.size, comm.rank)
        own = FRAMES[rank::size] if rank < size else FRAMES[:0]
        made.backward(batch_of(own) if len(own) else None)
        made.update(0.01)
    return made


def save(made: TorchLearner, comm: Communicator, folder: Path) -> None:
    with made.state.trained_weights():
        made.state.gather_state()
        if comm.rank == 0:
            made.state.contents({}).write(folder / "model.pt", folder / "optimizer.pt")
        comm.gather(None, name="saved")


def weights(made: TorchLearner) -> dict[str, torch.Tensor]:
    return {name: one.detach().clone() for name, one in made.model.named_parameters()}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one)


def there_and_back(comm: Communicator, optimizer: Any, folder: Path, sharded: bool) -> list[dict[str, torch.Tensor]]:
    """The weights after six updates: in one go, after three in a new learner, and where an evaluation and a stop are between."""
    whole = updated(learner(comm, optimizer, sharded), comm, 0, 6)
    stopped = updated(learner(comm, optimizer, sharded), comm, 0, 3)
    with stopped.state.averaged_weights(), stopped.state.averaged_weights():
        save(stopped, comm, folder)
    save(stopped, comm, folder)
    resumed = learner(comm, optimizer, sharded)
    resumed.state.load(folder / "model.pt", folder / "optimizer.pt")
    return [weights(updated(one, comm, first, 6)) for one, first in ((whole, 6), (resumed, 3), (stopped, 3))]


FEW = ["Adam", "SGD with momentum", "Adafactor", "Lion", "Growing", "ScheduleFree", "Muon and AdamW", "several with modes"]


@pytest.mark.parametrize("name", [*FEW, *marked(sorted(SPECS.keys() - set(FEW)), pytest.mark.slow)])
def test_every_optimizer_goes_on_bit_for_bit(name: str, tmp_path: Path) -> None:
    alone, *others = there_and_back(SingleCommunicator(), SPECS[name], tmp_path, sharded=False)
    assert not same(alone, weights(learner(SingleCommunicator(), SPECS[name])))
    assert all(same(alone, other) for other in others)
    assert torch.equal(alone["unused"], Model().unused.detach()), "no gradient, no update, whatever the decay"
    for sharded in (False, True):
        folder = tmp_path / f"{sharded}"
        folder.mkdir()
        ranks = on_ranks(2, lambda comm: there_and_back(comm, SPECS[name], folder, sharded))  # noqa: B023
        for one in [weights for rank in ranks for weights in rank]:
            assert same(one, ranks[0][0])
            assert all(torch.allclose(one[each], alone[each], rtol=1e-3, atol=1e-5) for each in alone), name


@pytest.mark.parametrize("name", ["SGD with momentum", "AMSGrad", "Lion", "ScheduleFree"])
def test_one_rank_does_what_a_loop_of_pytorch_does(name: str) -> None:
    """Which leaves a parameter without a gradient alone: neither momentum nor decay move it."""
    made = updated(learner(SingleCommunicator(), SPECS[name]), SingleCommunicator(), 0, 6)
    model = Model()
    options = dict(SPECS[name])
    kind = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW, f"{__name__}.Lion": Lion}.get(options.pop("class"), ScheduleFree)
    optimizer = kind(model.parameters(), lr=0.01, **options)
    if kind is ScheduleFree:
        optimizer.train()
    frames = torch.from_numpy(FRAMES)
    for step in range(6):
        outputs = (frames @ model.first).tanh() @ model.last + (frames @ model.seldom if step % 2 else 0)
        (outputs - 1).square().sum(-1).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    for one, other in zip(made.model.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)


def test_the_file_of_a_schedule_free_model_has_the_weights_for_evaluations(tmp_path: Path) -> None:
    comm = SingleCommunicator()
    made = updated(learner(comm, SPECS["ScheduleFree"]), comm, 0, 5)
    trained = weights(made)
    save(made, comm, tmp_path)
    assert same(weights(made), trained)
    with made.state.averaged_weights():
        evaluated = weights(made)
    assert not same(evaluated, trained)
    assert same(torch.load(tmp_path / "model.pt")["model"], evaluated)
    assert same(weights(made), trained)


@pytest.mark.parametrize(
    ("optimizer", "keys", "message"),
    [
        ({"class": "SparseAdam"}, {}, "optimizer.class: expected an optimizer for dense gradients"),
        (
            {"class": "LBFGS"},
            {},
            "optimizer.class: expected an optimizer that takes gradients as they are, got LBFGS, whose step() ",
        ),
        (
            lambda parameters: torch.optim.LBFGS(parameters),
            {},
            "optimizer: expected an optimizer that takes gradients as they are",
        ),
        (lambda parameters: parameters, {}, "optimizer: expected a function that returns an optimizer of PyTorch, got a list of"),
        (
            lambda parameters: torch.optim.SGD(parameters[:2]),
            {},
            "got groups without seldom, unused (requires_grad_(False) leaves",
        ),
        (
            lambda parameters: torch.optim.SGD([*parameters, torch.nn.Parameter(torch.ones(1))]),
            {},
            "got a tensor that is not a parameter of the model",
        ),
        ({"class": ScheduleFree}, {"ema_decay": 0.9}, "ema_decay: expected None with ScheduleFree"),
    ],
)
def test_what_cannot_work_is_refused_by_name(optimizer: Any, keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        learner(SingleCommunicator(), optimizer, **keys)
    assert message in str(caught.value)


COUPLED = set("AdaGC Adai AdamS ASGD AvaGrad DAdaptAdaGrad DAdaptAdam DAdaptAdan DAdaptLion DAdaptSGD Prodigy".split())
"""Classes whose update of a parameter depends on others."""

DRAWS = {"Gravity", "Kron", "Magma"}
"""Random numbers for each parameter, which threads share here: test_optimizers.py has real ranks."""

SAVES_MORE = {"SPAM", "StableSPAM"}

AMPLIFIES = {"Alice", "SOAP"}
"""Rounding, so that two ranks do not compute what one does."""


class Clipped(torch.optim.SGD):
    """A user's own that clips the gradients of all its parameters together."""

    def step(self, closure: Any = None) -> None:
        torch.nn.utils.clip_grad_norm_([one for group in self.param_groups for one in group["params"]], 50.0)
        super().step()


class Counting(Lion):
    """A user's own with state that belongs to no parameter."""

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "count": 1}


class Mean(Lion):
    """A user's own that needs at least one gradient."""

    def step(self, closure: Any = None) -> None:
        self.mean = sum(one.grad.mean() for group in self.param_groups for one in group["params"] if one.grad is not None).item()
        super().step()


@pytest.mark.parametrize(
    ("optimizer", "reason"),
    [
        (Clipped, "Clipped, which updates some of them in another way without the others"),
        (Counting, "Counting, which also saves count of all of them"),
        (Mean, "Mean, which fails with a part of them: AttributeError: 'int' object"),
        *((f"pytorch_optimizer.{name}", f"got {name}, which ") for name in sorted(COUPLED | SAVES_MORE)),
    ],
)
def test_an_optimizer_that_needs_all_parameters_is_not_sharded(optimizer: Any, reason: str) -> None:
    if isinstance(optimizer, str):
        pytest.importorskip("pytorch_optimizer")
    learner(SingleCommunicator(), {"class": optimizer})
    for spec in ({"class": optimizer}, [{"class": "sgd", "parameters": "unused"}, {"class": optimizer}]):
        with pytest.raises(ConfigError) as caught:
            learner(SingleCommunicator(), spec, sharded=True)
        if isinstance(spec, dict) or "also saves" not in str(caught.value):  # else it is refused as one of several
            assert "torch_distributed.sharded: expected an optimizer whose update of a parameter does not" in str(caught.value)
            assert reason in str(caught.value)


def test_whether_an_optimizer_can_be_sharded_is_tried_on_copies() -> None:
    """Of few values: neither the model nor the optimizer nor the generators of random numbers change."""
    model = Model()
    for made in (Lion(model.parameters(), lr=0.1), Growing(model.parameters()), ScheduleFree(model.parameters())):
        for one in model.parameters():
            made.state[one]["large"] = torch.zeros(one.shape)
        before = weights_of(model), copy.deepcopy(made.state_dict()), torch.get_rng_state(), random.getstate()
        check_shares(made)
        assert all(torch.equal(one, other) for one, other in zip(before[0], weights_of(model), strict=True))
        assert str(made.state_dict()) == str(before[1])
        assert torch.equal(torch.get_rng_state(), before[2])
        assert random.getstate() == before[3]


def weights_of(model: torch.nn.Module) -> list[torch.Tensor]:
    return [one.detach().clone() for one in model.parameters()]


def test_a_parameter_that_is_not_to_be_trained_says_so_itself() -> None:
    def last_only(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
        for one in parameters:
            one.requires_grad_(one.shape == (4, 2))
        return torch.optim.SGD([one for one in parameters if one.requires_grad])

    comm = SingleCommunicator()
    made = updated(learner(comm, last_only), comm, 0, 2)
    assert [name for name, one in weights(made).items() if not torch.equal(one, weights(learner(comm, "sgd"))[name])] == ["last"]


def test_options_are_those_of_the_config_and_what_changes_is_told(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    comm = SingleCommunicator()
    open_log(LogKeys(), 0, 1)
    save(updated(learner(comm, {"class": "adam", "betas": (0.9, 0.99)}), comm, 0, 3), comm, tmp_path)
    resumed = learner(comm, {"class": "adam", "betas": (0.5, 0.6), "amsgrad": True, "eps": 1e-3})
    resumed.state.load(tmp_path / "model.pt", tmp_path / "optimizer.pt")
    [group] = resumed.optimizer.param_groups
    assert (group["betas"], group["amsgrad"], group["eps"]) == ((0.5, 0.6), True, 1e-3)
    told = capfd.readouterr().out
    for line in (
        "betas: (0.5, 0.6) from here on, (0.9, 0.99) in",
        "eps: 0.001 from here on, 1e-08 in",
        "amsgrad: True from here",
    ):
        assert f"optimizer.{line}" in told
    updated(resumed, comm, 3, 5)


@pytest.mark.parametrize(
    ("name", "options"),
    [("adamw", {"amsgrad": True}), ("rmsprop", {"centered": True, "momentum": 0.9}), ("sgd", {"momentum": 0.9}), ("nadam", {})],
)
def test_an_option_that_needs_more_state_begins_with_none(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    comm = SingleCommunicator()
    save(updated(learner(comm, {"class": name}), comm, 0, 2), comm, tmp_path)
    resumed = learner(comm, {"class": name, **options})
    resumed.state.load(tmp_path / "model.pt", tmp_path / "optimizer.pt")
    before = weights(resumed)
    updated(resumed, comm, 2, 4)
    assert not torch.equal(before["first"], weights(resumed)["first"])


def test_an_estimate_that_an_optimizer_keeps_in_its_groups_is_none_of_its_options(tmp_path: Path) -> None:
    comm = SingleCommunicator()
    save(updated(learner(comm, {"class": Growing, "growth": 2.0}), comm, 0, 3), comm, tmp_path)
    resumed = learner(comm, {"class": Growing, "growth": 3.0})
    resumed.state.load(tmp_path / "model.pt", tmp_path / "optimizer.pt")
    [group] = resumed.optimizer.param_groups
    assert (group["d"], group["growth"]) == (1e-3 * 2**3, 3.0)


def resaved(folder: Path, change: Any, *, says_shapes: bool) -> None:
    """Write an optimizer's file again as another program does: changed, and without what hvdtrain says of it if asked to."""
    stored = torch.load(folder / "optimizer.pt", weights_only=True)
    change(stored)
    if not says_shapes:
        del stored["shapes"]
    torch.save(stored, folder / "optimizer.pt")


def drop(name: str, entry: str | None = None) -> Any:
    def change(stored: dict[str, Any]) -> None:
        number = stored["param_names"].index(name)
        if entry is None:
            del stored["optimizer"]["state"][number]
        else:
            del stored["optimizer"]["state"][number][entry]

    return change


def cut(name: str, entry: str) -> Any:
    def change(stored: dict[str, Any]) -> None:
        of_one = stored["optimizer"]["state"][stored["param_names"].index(name)]
        of_one[entry] = of_one[entry][:1]

    return change


CHANGES = {"state": drop("last"), "entry": drop("last", "exp_avg_sq"), "shape": cut("last", "exp_avg")}


@pytest.mark.parametrize("case", CHANGES)
@pytest.mark.parametrize("sharded", [False, True])
def test_a_state_that_another_program_has_damaged_is_refused_by_parameter(case: str, sharded: bool, tmp_path: Path) -> None:
    def on_rank(comm: Communicator) -> None:
        save(updated(learner(comm, "adam", sharded), comm, 0, 3), comm, tmp_path)
        if comm.rank == 0:
            resaved(tmp_path, CHANGES[case], says_shapes=True)
        comm.gather(None, name="resaved")
        with pytest.raises(
            DamagedCheckpoint, match=rf"{tmp_path}/optimizer.pt: expected .* of the parameter last as it was saved"
        ):
            learner(comm, "adam", sharded).state.load(tmp_path / "model.pt", tmp_path / "optimizer.pt")

    on_ranks(2, on_rank)


def test_a_file_that_does_not_say_what_it_had(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Of an earlier release, or of another program: a wrong shape is refused, a state that is missing is told."""
    comm = SingleCommunicator()
    open_log(LogKeys(), 0, 1)
    files = tmp_path / "model.pt", tmp_path / "optimizer.pt"
    save(updated(learner(comm, "adam"), comm, 0, 3), comm, tmp_path)
    resaved(tmp_path, drop("last"), says_shapes=False)
    learner(comm, "adam").state.load(*files)
    assert "the optimizer's state begins anew for last, unused: the file has none" in capfd.readouterr().out
    save(updated(learner(comm, "adam"), comm, 0, 3), comm, tmp_path)
    resaved(tmp_path, cut("last", "exp_avg"), says_shapes=False)
    with pytest.raises(CheckpointError, match=r"optimizer.pt: .*exp_avg of last has the shape \(1, 2\) instead of \(4, 2\)"):
        learner(comm, "adam").state.load(*files)
    save(updated(learner(comm, "sgd"), comm, 0, 3), comm, tmp_path)
    resaved(tmp_path, lambda stored: None, says_shapes=False)
    learner(comm, "sgd").state.load(*files)
    assert "begins anew" not in capfd.readouterr().out, "this optimizer has no state"


def test_a_ranks_own_file_that_is_damaged_is_refused_by_parameter(tmp_path: Path) -> None:
    comm = SingleCommunicator()
    made = updated(learner(comm, "adam"), comm, 0, 3)
    file = tmp_path / "model.rank-0-of-2.pt"
    for change, told in (
        (lambda stored: stored["optimizer"]["state"].pop(0), "of the parameter first as it was saved"),
        (lambda stored: stored["parameters"].pop("unused"), "expected parameters.unused as it was saved"),
        (lambda stored: stored["parameters"].update(first=torch.ones(1)), r"parameters.first as it was saved, .*got \(1,\)"),
    ):
        made.state.write_rank(file, ("parameters", "optimizer"))
        learner(comm, "adam").state.load_rank(file, ("parameters", "optimizer"))
        stored = torch.load(file, weights_only=True)
        change(stored)
        torch.save(stored, file)
        with pytest.raises(DamagedCheckpoint, match=told):
            learner(comm, "adam").state.load_rank(file, ("parameters", "optimizer"))
        del stored["shapes"]
        torch.save(stored, file)
        if "optimizer" not in told and "first" not in told:
            with pytest.raises(DamagedCheckpoint, match="expected the parameters of this config's model, got others"):
                learner(comm, "adam").state.load_rank(file, ("parameters", "optimizer"))


def test_other_groups_get_the_state_of_the_same_parameters(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """As where a weight decay is new, or where a release of before let other parameters decay."""
    comm = SingleCommunicator()
    open_log(LogKeys(), 0, 1)

    def grouped(*numbers: int) -> Any:
        def optimizer(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
            decayed = [parameters[number] for number in numbers]
            others = [one for number, one in enumerate(parameters) if number not in numbers]
            return torch.optim.Adam([{"params": decayed, "weight_decay": 0.1}, {"params": others}])

        return optimizer

    save(updated(learner(comm, grouped(0, 1)), comm, 0, 3), comm, tmp_path)
    resumed = learner(comm, grouped(1, 2))
    resumed.state.load(tmp_path / "model.pt", tmp_path / "optimizer.pt")
    model = resumed.model
    same_again = learner(comm, grouped(0, 1))
    same_again.state.load(tmp_path / "model.pt", tmp_path / "optimizer.pt")
    for name in ("first", "last", "seldom"):
        one, other = (made.optimizer.state[getattr(made.model, name)]["exp_avg"] for made in (resumed, same_again))
        assert torch.equal(one, other)
        assert one.shape == getattr(model, name).shape
    told = capfd.readouterr().out
    assert told.count("from here on") == 2
    assert "optimizer.weight_decay: 0 from here on, 0.1 in the checkpoint (of first)" in told
    assert "optimizer.weight_decay: 0.1 from here on, 0 in the checkpoint (of seldom)" in told


def test_the_state_of_another_class_is_refused(tmp_path: Path) -> None:
    comm = SingleCommunicator()
    save(updated(learner(comm, {"class": "adam"}), comm, 0, 1), comm, tmp_path)
    with pytest.raises(CheckpointError, match="expected the state of the optimizer Lion, got that of Adam"):
        learner(comm, SPECS["Lion"]).state.load(tmp_path / "model.pt", tmp_path / "optimizer.pt")


NEEDS_MORE = {
    "schedulefree": {"AdamWScheduleFreeClosure", "RAdamScheduleFreeClosure", "SGDScheduleFreeClosure"},
    "lion_pytorch": set(),
    "torch_optimizer": {"Adahessian", "Lookahead"},
    "pytorch_optimizer": set(
        "AdaGO AdaHessian AdaLOMO AdaMuon AdaShift AdamMini AliG BSAM Conda DeMo DistributedMuon FriendlySAM GSAM LBFGS "
        "LOMO LoRARite LookSAM Lookahead Muon MuonClip NorMuon OrthoGrad PCGrad Ranger21 SAM SCION SCIONLight SPlus "
        "SafeFP16Optimizer ScalableShampoo ScheduleFreeWrapper SophiaH TRAC WSAM".split()
    ),
}
"""Classes that need a closure, the model, another optimizer, or more options or groups; or whose state no file can hold without
code. They end with an error in the first update at the latest."""


@pytest.mark.again
@pytest.mark.parametrize("package", NEEDS_MORE)
def test_classes_of_other_packages(package: str, tmp_path: Path) -> None:
    found = vars(pytest.importorskip(package))
    kinds = [one for one in found.values() if isinstance(one, type) and issubclass(one, torch.optim.Optimizer)]
    tried = 0
    for kind in sorted({one for one in kinds if one is not torch.optim.Optimizer}, key=lambda one: one.__name__):
        folder = tmp_path / kind.__name__
        folder.mkdir()
        spec = {"class": f"{package}.{kind.__name__}"}
        if kind.__name__ in NEEDS_MORE[package]:
            try:
                there_and_back(SingleCommunicator(), spec, folder, sharded=False)
            except Exception:
                continue
            pytest.fail(f"{kind} works now")
        alone, *others = there_and_back(SingleCommunicator(), spec, folder, sharded=False)
        assert all(same(alone, other) for other in others), kind
        is_refused = kind.__name__ in COUPLED | DRAWS | SAVES_MORE and package == "pytorch_optimizer"
        if is_refused:
            with pytest.raises(ConfigError, match="sharded: expected an optimizer whose update of a parameter does not depend"):
                learner(SingleCommunicator(), spec, sharded=True)
        if package == "pytorch_optimizer" and kind.__name__ in DRAWS | AMPLIFIES | {"StableSPAM"}:
            continue
        for sharded in (False,) if is_refused else (False, True):
            ranks = on_ranks(2, lambda comm: there_and_back(comm, spec, folder, sharded))  # noqa: B023
            for one in [weights for rank in ranks for weights in rank]:
                assert same(one, ranks[0][0]), kind
                assert all(torch.allclose(one[each], alone[each], rtol=1e-3, atol=1e-5) for each in alone), kind
        tried += 1
    print(f"{package}: {tried} classes work")
    assert tried
