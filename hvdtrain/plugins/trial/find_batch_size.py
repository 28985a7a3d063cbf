"""`--find-batch-size`: the largest batches that fit into memory, found by trying; nothing is written."""

from __future__ import annotations

import re
import resource
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hvdtrain.comm.base import Communicator, gather_together
from hvdtrain.data.feed import Feed
from hvdtrain.data.plan.batch_keys import BatchKeys
from hvdtrain.data.plan.costs import costs_of
from hvdtrain.errors import DataError
from hvdtrain.plugins.trial.dry_run import Rounds, trainer
from hvdtrain.runtime import log
from hvdtrain.runtime.log import silence
from hvdtrain.runtime.memory import host_memory
from hvdtrain.schedule.history import EpochRecord
from hvdtrain.settings import Settings
from hvdtrain.start_up.job import open_session
from hvdtrain.start_up.limits import open_limits
from hvdtrain.start_up.ranks import open_communicator
from hvdtrain.start_up.without_files import writing_nothing
from hvdtrain.training.session import Session

PRECISION = 0.02
"""The search ends when a limit fits and one that is larger by this share does not."""

HOST_SHARE = 0.8
"""The share of a host's free memory that its ranks may use together. Beyond the memory, the system would kill them instead of
refusing it."""


def find_batch_size(settings: Settings) -> None:
    """Find the largest value of the key that limits batches with which every rank can train. Raises: HvdtrainError."""
    settings = writing_nothing(settings)
    with open_communicator(settings) as comm, open_session(settings, "dry_run", comm) as session:
        epoch = session.progress.epoch + 1
        feed = session.epochs.feeds(session.feeds, epoch)[0]
        search = Search(session, feed, epoch, settings.batch)
        with silence(), _limited_memory(session):
            search.train_once(settings)
            lines = search.run()
        for line in lines:
            log.result(line)


@dataclass(frozen=True)
class Limit:
    """A key that limits batches.

    Attributes:
        name: batch_size, packed_batch_size or max_seqs.
        given: its value for each rank, for the epoch.
        key: the key of the config that it comes from, such as max_seqs_total.
        ranks: the number of ranks that share the value of that key.
    """

    name: str
    value: int | Mapping[str, int]
    key: str
    ranks: int

    @classmethod
    def of(cls, name: str, value: int | Mapping[str, int], keys: BatchKeys, size: int) -> Limit:
        """The limit with the key that sets it in training.

        >>> Limit.of("max_seqs", 4, BatchKeys(max_seqs_total=8), 2).text(5)
        'max_seqs_total = 10'
        >>> Limit.of("max_seqs", 4, BatchKeys(max_seqs=8, max_seqs_train=4), 2).text(5)
        'max_seqs_train = 5'
        """
        spellings = {f"{name}_train": 1, f"{name}_total": size}
        return next(
            (cls(name, value, key, ranks) for key, ranks in spellings.items() if getattr(keys, key, None) is not None),
            cls(name, value, name, 1),
        )

    @property
    def number(self) -> int:
        """The value that the search changes: of several, the first one."""
        return self.value if isinstance(self.value, int) else next(iter(self.value.values()))

    def at(self, number: int) -> Any:
        """The key's value in a trial: limits by data key keep their ratios."""
        if isinstance(self.value, int):
            return number
        return {name: max(1, round(size * number / self.number)) for name, size in self.value.items()}

    def text(self, number: int) -> str:
        """The value of its key in a trial."""
        value = self.at(number)
        of_all = value * self.ranks if isinstance(value, int) else {name: size * self.ranks for name, size in value.items()}
        return f"{self.key} = {of_all}"


class Search:
    """Tries limits on batches: the largest batches of a plan, on every rank, without changing the model."""

    def __init__(self, session: Session, feed: Feed, epoch: int, keys: BatchKeys) -> None:
        self._session = session
        self._comm: Communicator = session.comm
        self._feed = feed
        self._epoch = epoch
        limits = feed.batch_keys.limits(epoch)
        limits_by_key = {name: getattr(limits, name) for name in ("batch_size", "packed_batch_size", "max_seqs")}
        [(name, value), *_] = [(name, value) for name, value in limits_by_key.items() if value is not None]
        self._limit = Limit.of(name, value, keys, session.comm.size)

    def train_once(self, settings: Settings) -> None:
        """Collective. Train on the smallest batches, so that the optimizer has its state, which takes memory, too."""
        feed = self._feed
        plan = self._with(self._smallest()).plan(self._epoch)
        rounds = Rounds(plan, feed.lengths_in(self._epoch), self._comm.size if feed.distribution == "shard" else 1)
        smallest = int(rounds.costs.argmin())
        limits = open_limits(settings, self._session.epochs)
        trainer(settings, self._session, limits, EpochRecord(self._epoch, 0.0))(replace(feed, only=rounds.only([smallest])))

    def run(self) -> list[str]:
        """Collective. Lines about the result. Raises: DataError, if a single sequence does not fit."""
        low = self._smallest()
        fits, fitting = self._try(low)
        if not fits:
            raise DataError(
                f"{self._limit.key}: expected memory for single sequences, got too little for {fitting} (set "
                "max_seq_length, or chunking)"
            ).on_all_ranks()
        high: int | None = None
        number = max(low, self._limit.number)
        while high is None or high - low > max(1, int(low * PRECISION)):
            if number > low:
                fits, largest = self._try(number)
                low, high, fitting = (number, high, largest) if fits else (low, number, fitting)
            if high is None and self._is_whole(low):
                return [f"find batch size: {self._limit.text(low)} fits, {fitting}; no other batch is larger"]
            number = 2 * low if high is None else (low + high) // 2
        more = f"{self._limit.text(high)} does not"
        return [
            f"find batch size: {self._limit.text(low)} fits on every rank, {more}; the largest batch that fits: {fitting}",
            "find batch size: memory also depends on the sequences that come together: leave some room, and try split_on_oom",
        ]

    def _smallest(self) -> int:
        """The limit with which every sequence makes a batch by itself, or fits into one."""
        lengths = self._feed.lengths_in(self._epoch)
        keys = self._feed.batch_keys
        if self._limit.name == "max_seqs":
            return 1
        costs = costs_of(keys, lengths)
        if costs is not None:
            return max(1, int(costs.max()) + 1)
        names = lengths if isinstance(self._limit.value, int) else self._limit.value
        return max(1, *(int(lengths[name].max()) for name in names if name in lengths))

    def _with(self, number: int) -> Feed:
        return replace(self._feed, batch_keys=replace(self._feed.batch_keys, **{self._limit.name: self._limit.at(number)}))

    def _try(self, number: int) -> tuple[bool, str]:
        """Collective. Whether every rank can compute the largest batch under a limit, and that with the longest sequence; and the
        largest batch in words.
        """
        self._session.watchdog.beat(f"trying {self._limit.name} = {number}")
        feed = self._with(number)

        def attempt() -> tuple[str, bool]:
            plan = feed.plan(self._epoch)
            rounds = Rounds(plan, feed.lengths_in(self._epoch), 1)
            largest = rounds.largest()
            with feed.read([plan.batch(batch) for batch in largest], self._epoch, self._session.learner.staging) as batches:
                fits = all(self._session.learner.try_batch(batch) for batch in batches if batch.if_any)
            return rounds.describe(largest[0]), fits

        attempts = gather_together(self._comm, attempt, name="try_batch")
        return all(fits for _, fits in attempts), attempts[self._comm.rank][0]

    def _is_whole(self, number: int) -> bool:
        plans = [self._with(limit).plan(self._epoch) for limit in (number, 2 * number)]
        return plans[0].num_batches <= self._comm.size or plans[0].num_batches == plans[1].num_batches


@contextmanager
def _limited_memory(session: Session) -> Iterator[None]:
    """Inside the `with` block, a rank that computes on the CPU gets no more than its share of the host's memory."""
    free = host_memory()
    status = Path("/proc/self/status")
    if session.learner.device_name != "CPU" or free is None or not status.exists():
        yield
        return
    used = int(re.search(r"^VmData:\s+(\d+) kB", status.read_text(), re.MULTILINE)[1]) << 10  # type: ignore[index]
    before = resource.getrlimit(resource.RLIMIT_DATA)
    wanted = used + int(HOST_SHARE * free) // session.comm.local_size
    soft = wanted if before[1] == resource.RLIM_INFINITY else min(wanted, before[1])
    resource.setrlimit(resource.RLIMIT_DATA, (soft, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)
