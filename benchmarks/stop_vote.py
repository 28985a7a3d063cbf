#!/usr/bin/env python3
"""The cost of the votes on stopping and saving: `mpirun -np 2 --bind-to none python benchmarks/stop_vote.py`.

Steps that only reduce a gradient, alternately with a vote after every step and without. Training holds about ten votes per
second.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from hvdtrain.comm.base import all_reduce  # noqa: E402
from hvdtrain.plugins.horovod.communicator import open_horovod  # noqa: E402
from hvdtrain.training import vote  # noqa: E402  # found through the line above

ROUNDS, STEPS = 40, 50


def numbers(values: Sequence[float]) -> torch.Tensor:
    """Creates tensors as a learner does."""
    return torch.tensor(values, dtype=torch.float64)


def main() -> None:
    torch.set_num_threads(1)
    comm = open_horovod("torch")
    votes = vote.Vote(comm, numbers, interval=0.0)
    gradient = torch.zeros(500_000)
    seconds: dict[bool, list[float]] = {True: [], False: []}
    for number in range(2 * ROUNDS + 2):
        began = time.perf_counter()
        for _ in range(STEPS):
            all_reduce(comm, [gradient], "average", name="gradient")
            if number % 2:
                votes.step(vote.Requests)
        seconds[bool(number % 2)].append((time.perf_counter() - began) / STEPS)
    votes.finish()
    with_votes, without = (median(seconds[which][1:]) for which in (True, False))
    if comm.rank == 0:
        more = (with_votes - without) * 1e6
        print(f"{comm.size} ranks: a step of {without * 1e6:.0f} us takes {more:.0f} us more with a vote;")
        print(f"ten votes per second take {10 * max(0.0, with_votes - without):.2%} of the time")
    comm.close()


if __name__ == "__main__":
    main()
