"""What each consumer of a model's tensors does with each role, with ranks that are threads."""

from typing import Any

import pytest
import torch
from learners import learner_of
from thread_ranks import on_ranks

from hvdtrain.comm.base import Communicator
from hvdtrain.learner.reducer import EpochStart, FinishedUpdate
from hvdtrain.learner.reducers import ReduceKeys
from hvdtrain.learner.torch.learner import TorchLearner
from hvdtrain.runtime.timer import Timer

HAS_BATCH = ((True, True), (True, False))
"""By update, whether each of two ranks has a batch: their weights are 4/3 and 2/3."""


class Roles(torch.nn.Module):
    """A tensor of each role, and of each kind that has been taken for another one."""

    def __init__(self) -> None:
        super().__init__()
        self.trained = torch.nn.Parameter(torch.tensor([1.0, 2.0]))
        self.complex = torch.nn.Parameter(torch.tensor([1.0 + 2.0j]))
        self.narrow = torch.nn.Parameter(torch.tensor([0.1], dtype=torch.bfloat16))
        self.frozen = torch.nn.Parameter(torch.tensor([0.1]), requires_grad=False)
        for name, values in {
            "statistic": torch.tensor([0.1, -torch.inf]),
            "codes": torch.tensor([1.0 + 1.0j]),
            "mask": torch.triu(torch.full((3, 3), -torch.inf), 1),
            "lowest": torch.triu(torch.full((3, 3), torch.finfo(torch.float32).min), 1),
            "sines": torch.sin(torch.linspace(0, 9, 7)),
            "expanded": torch.tensor([0.1, 0.2]).expand(3, 2),
            "counter": torch.tensor(0),
            "positions": torch.arange(3),
        }.items():
            self.register_buffer(name, values)
        self.register_buffer("cache", torch.zeros(1), persistent=False)

    @torch.no_grad()
    def train_alone(self, rank: int) -> None:
        """What a batch changes on one rank."""
        self.trained += 1 + rank
        self.complex += (1 + rank) * 1j
        self.statistic[0] += 1 + rank
        self.codes += (1 + rank) * 1j
        self.counter += 1
        self.cache = torch.full((2 + rank,), float(rank))


CONSTANT = ("frozen", "mask", "lowest", "sines", "expanded", "positions")


def learner(comm: Communicator | None = None, **keys: Any) -> TorchLearner:
    made: TorchLearner = learner_of(lambda **_: Roles(), lambda **_: None, comm, **keys)
    return made


def trained(comm: Communicator, has_batch: Any = HAS_BATCH, **keys: Any) -> Roles:
    """A rank's model after an epoch of a few updates."""
    made, sync = learner(comm), ReduceKeys(**keys).reducer(comm, Timer()).sync
    sync.begin_epoch(made.state, EpochStart(1, 0, len(has_batch), 0.1, is_resumed=False))
    for step, have in enumerate(has_batch, 1):
        if have[comm.rank]:
            made.model.train_alone(comm.rank)
        sync.after_update(made.state, FinishedUpdate(have, step))
    saved: dict[str, torch.Tensor] = {}
    with sync.averaged_model(made.state):
        saved |= {name: one.clone() for name, one in made.model.state_dict().items()}
    sync.end_of_epoch(made.state)
    for name, one in made.model.state_dict().items():
        if name != "counter":  # a rank's own
            torch.testing.assert_close(saved[name], one, rtol=1e-2, atol=0, msg=name)
    return made.model


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize(
    "keys",
    [
        {"reduce_type": "grad"},
        {"reduce_type": "param", "sync_steps": 9},
        {"reduce_type": "param"},
        {"reduce_type": "param", "group": 2},
        {"reduce_type": "param", "sync_steps": 9, "compression": "int4"},
    ],
    ids=str,
)
def test_ranks_average_what_they_have_trained_and_leave_constants_as_they_are(keys: dict[str, Any]) -> None:
    first = Roles()
    for has_batch, weights in ((HAS_BATCH, (2, 1)), (((True, False),), (1, 0))):
        models = on_ranks(2, lambda comm, has_batch=has_batch: trained(comm, has_batch, **keys))
        for rank, model in enumerate(models):
            for name in CONSTANT:
                assert bits(model.state_dict()[name]) == bits(first.state_dict()[name]), name
            once = (weights[0] * weights[0] + 2 * weights[1] * weights[1]) / sum(weights)
            if keys.get("sync_steps") == 9 or keys["reduce_type"] == "grad":
                assert model.statistic[0].item() == pytest.approx(0.1 + once)
                assert model.codes.item() == pytest.approx(1 + 1j * (1 + once))
            assert model.statistic[1] == -torch.inf
            assert model.counter == models[0].counter
            assert model.cache.shape == ((2 + rank,) if weights[rank] else (1,)), "is not sent"
            if keys["reduce_type"] == "param" and "group" not in keys:
                assert torch.equal(model.trained, models[0].trained)
                assert torch.equal(model.complex, models[0].complex)
