"""BatchNorm's statistics, computed anew: on any number of ranks those of PyTorch on all batches."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy
import torch
from learners import batch_of, learner_of
from thread_ranks import on_ranks

import hvdtrain
from hvdtrain.comm.base import Communicator, all_reduce
from hvdtrain.comm.single import SingleCommunicator
from hvdtrain.learner.reducer import GradientExchange
from hvdtrain.plugins.average.batch_norm import fresh_statistics
from hvdtrain.runtime.timer import Timer

BATCHES = [numpy.random.default_rng(number).normal(number, 2, (3 + number, 4, 2)).astype("float32") for number in range(5)]


class Norms(torch.nn.Module):
    """One that is called, one that is called twice, and one that no batch reaches."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.twice, self.unreached = (torch.nn.BatchNorm1d(2) for _ in range(3))
        self.weight = torch.nn.Parameter(torch.ones(2))

    def forward(self, frames: torch.Tensor) -> torch.Tensor:
        frames = self.first(frames.transpose(1, 2)) * self.weight[:, None]
        return self.twice(self.twice(frames) + 1)


def train_step(*, model: Norms, extern_data: dict[str, Any], **_: object) -> None:
    hvdtrain.get_run_ctx().mark_as_loss(model(extern_data["data"].raw_tensor).square(), "loss")


def learner(comm: Communicator, synchronized: bool) -> Any:
    options = {"batch_norm": comm.channel("sync") if synchronized else None}
    return learner_of(lambda **_: Norms(), train_step, comm, gradients=GradientExchange(comm, Timer(), steps=0), options=options)


def statistics_on(comm: Communicator, batches: Sequence[numpy.ndarray], synchronized: bool = False) -> dict[str, torch.Tensor]:
    made = learner(comm, synchronized)
    rounds = -(-len(batches) // comm.size)
    own = list(batches[comm.rank :: comm.size])
    given = [batch_of(own[number]) if number < len(own) else None for number in range(rounds)]
    names = fresh_statistics(made, given, partial(all_reduce, comm, op="sum", name="statistics"))
    assert names == ["first", "twice", "unreached"]
    assert made.model.first.momentum == 0.1
    return {name: buffer.clone() for name, buffer in made.model.named_buffers()}


def test_any_number_of_ranks_has_the_statistics_of_pytorch() -> None:
    model = Norms()
    torch.optim.swa_utils.update_bn([torch.from_numpy(values) for values in BATCHES], model)
    expected = dict(model.named_buffers())
    for size in (1, 2, 3):
        work = partial(statistics_on, batches=BATCHES)
        found = [work(SingleCommunicator())] if size == 1 else on_ranks(size, work)
        for of_rank in found:
            for name in ("running_mean", "running_var"):
                for norm in ("first", "twice"):
                    torch.testing.assert_close(of_rank[f"{norm}.{name}"], expected[f"{norm}.{name}"], rtol=1e-5, atol=1e-6)
            assert torch.equal(of_rank["unreached.running_var"], torch.ones(2)), "what no batch reaches stays as it was"
            assert of_rank["first.num_batches_tracked"] == 0


def test_synchronized_statistics_are_those_of_the_global_batches() -> None:
    pairs = [numpy.concatenate(BATCHES[place : place + 2]) for place in (0, 2, 4)]
    alone = statistics_on(SingleCommunicator(), pairs)
    for of_rank in on_ranks(2, partial(statistics_on, batches=BATCHES, synchronized=True)):
        for name in ("first.running_mean", "first.running_var"):
            torch.testing.assert_close(of_rank[name], alone[name], rtol=1e-5, atol=1e-6)
