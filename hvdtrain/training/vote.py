"""The ranks count their requests to stop, to save, to evaluate, or to report a loss that is not finite.

No rank waits for the others: after every N updates (about a tenth of a second; more if ranks update independently), each rank
starts an all-reduce of a few numbers, and reads its result when it starts the next one. So all ranks know of a request after two
such intervals, after the same update, and the exchange runs while they compute.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

import numpy

from hvdtrain.comm.base import Communicator, Tensor
from hvdtrain.learner.reducer import Reducer

INTERVAL = 0.1
"""Seconds between two exchanges, or between two updates if these take longer."""

LOCAL_UPDATES_INTERVAL = 1.0
"""The same if ranks do not wait for each other in every update: more frequent exchanges would slow down a rank that is ahead."""

TASK_INTERVAL = 10.0
"""The same if ranks exchange nothing else before the end, as in `forward`: those with less to compute would wait there for so
long that the watchdog would take the others for hung. More frequent exchanges would be slower with uneven batches."""

COMPARED = 512
"""Checksums are compared in the first exchanges, less and less often, and then in every 512th: once in a minute or more."""


def vote_interval(reducer: Reducer, grace: float | None) -> float:
    """The seconds between two exchanges of a training.

    Args:
        grace: the seconds for which the launcher lets ranks live after a signal to stop; None: as long as they need.
    """
    if reducer.gradients.keeps_ranks_alike:
        return INTERVAL
    return LOCAL_UPDATES_INTERVAL if grace is None else min(LOCAL_UPDATES_INTERVAL, grace / 10)  # two of them, then it saves


class Requests(NamedTuple):
    """The requests of a rank (0 or 1 each), or the number of ranks that request it; whether their checksums differ.

    Attributes:
        stop: end the training with a checkpoint, except after Ctrl-C.
        stop_by_hand: the same after Ctrl-C.
        save: write a checkpoint.
        not_finite: end with an error about a loss that is not finite.
        evaluate: evaluate within the epoch.
        compare: the ranks' checksums differ.
    """

    stop: int = 0
    stop_by_hand: int = 0
    save: int = 0
    not_finite: int = 0
    evaluate: int = 0
    compare: int = 0


NONE = Requests()


class Vote:
    """Counts the ranks' requests. Collective: all ranks call `step` after every update and every step of an evaluation.

    Args:
        tensor: makes a tensor that can be sent to other ranks (`Learner.numbers`).
        interval: seconds between two exchanges.
    """

    def __init__(
        self,
        comm: Communicator,
        tensor: Callable[[Sequence[float]], Tensor],
        interval: float,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._comm = comm
        self._tensor = tensor
        self._interval = interval
        self._clock = clock
        self._exchanges = 0
        self._handle: object = None
        self._since = clock()
        self._every = 1
        self._steps = 0
        self._kind: Hashable = None
        self._is_new_kind = False  # since the exchange under way began

    def step(
        self, requests: Callable[[], Requests], kind: Hashable = None, checksum: Callable[[], int] | None = None
    ) -> Requests | None:
        """The counted requests, if an exchange ends after this update or step; otherwise None.

        Args:
            requests: returns this rank's requests; called when an exchange starts.
            kind: steps of another kind take another time, so that their first one exchanges at once.
            checksum: returns a number below 2 ** 20 that is to be the same on all ranks; called now and then.
        """
        if kind != self._kind:
            self._kind = kind
            self._is_new_kind = True
            self._every = 1
            self._steps = 0
        self._steps += 1
        if self._steps < self._every:
            return None
        counted = self.finish()
        seconds, self._since = self._clock() - self._since, self._clock()
        wanted = max(1, min(2 * self._steps, round(self._steps * self._interval / max(seconds, 1e-6))))
        # Rank 0 decides on the interval, as the ranks' clocks may differ.
        self._exchanges += 1
        is_compared = checksum is not None and (self._exchanges & (self._exchanges - 1) == 0 or self._exchanges % COMPARED == 0)
        compared = checksum() if checksum is not None and is_compared else 0
        numbers = [*requests(), wanted if self._comm.rank == 0 else 0, compared, compared**2]
        self._handle = self._comm.start([self._tensor(numbers)], "sum", name="requests")
        self._steps = 0
        self._is_new_kind = False
        return counted

    def finish(self) -> Requests | None:
        """Collective. The result of the last exchange; waits for it if necessary. None: there was none."""
        if self._handle is None:
            return None
        [numbers] = self._comm.finish(self._handle)
        self._handle = None
        *counts, every, total, squares = map(round, numpy.asarray(numbers).tolist())
        self._every = 1 if self._is_new_kind else every
        # Numbers are all the same if, and only if, this is so (Cauchy and Schwarz).
        return Requests(*counts)._replace(compare=int(self._comm.size * squares != total**2))
