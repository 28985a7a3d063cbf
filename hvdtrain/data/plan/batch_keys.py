"""The keys of batches, and the limits that they set in an epoch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from numbers import Integral
from typing import Any

from hvdtrain.config.keys import ALONE, Rule, Section, Sections, key, not_negative, positive
from hvdtrain.data.keys import DataKeys
from hvdtrain.data.plan.order_keys import call_for_epoch
from hvdtrain.errors import DataError, Problem, problem

COST = "cost"
"""The name of the cost of a sequence in limits, next to the data keys."""

LARGEST = 2**62
"""The largest limit, as sums of lengths are int64."""

LIMITS_OF_LENGTHS = ("max_pad_size", "max_seq_length", "min_seq_length")
"""Limits by data key, of which a dataset may have none."""

LIMITS_OF_SIZES = (
    *("batch_size", "batch_size_train", "batch_size_dev", "batch_size_total"),
    *("packed_batch_size", "packed_batch_size_train", "packed_batch_size_dev"),
)
"""Limits by data key without which a batch may be of any size."""

NO_LIMIT = "batch_size: expected batch_size or max_seqs (one of them at least), got neither"

Limit = int | Mapping[str, int] | None
"""One limit for every data key, limits by data key, or none."""


@dataclass(frozen=True)
class Limits:
    """The limits of a batch. Each is checked for every data key that it applies to.

    Attributes:
        batch_size: maximal number of padded frames (longest sequence times number of sequences).
        max_seqs: maximal number of sequences.
        packed_batch_size: maximal number of frames without padding.
        max_pad_size: maximal number of frames of padding.
    """

    batch_size: Limit = None
    max_seqs: int | None = None
    packed_batch_size: Limit = None
    max_pad_size: Limit = None


Size = int | dict[str, int] | Callable[..., Any] | None

Frames = int | dict[str, int] | None

positive_or_unlimited = Rule("a positive number, or -1 for no limit", lambda value: value > 0 or value == -1)


@dataclass(frozen=True, kw_only=True)
class BatchKeys(Section):
    """How sequences are gathered into batches. Sizes are per rank."""

    batch_size: Size = key(
        None,
        "maximal number of padded frames in a rank's batch (longest sequence times number of sequences), for every "
        "data key or by key, or a function {signature} that returns it; None: no limit",
        positive,
        signature="*, epoch, **_",
    )
    batch_size_train: Size = key(None, "batch_size in training, if it differs", positive, signature="*, epoch, **_")
    batch_size_dev: Size = key(None, "batch_size in evaluation, if it differs", positive, signature="*, epoch, **_")
    max_seqs: int | Callable[..., Any] | None = key(
        None,
        "maximal number of sequences in a rank's batch, or a function {signature} that returns it; None or -1: no limit",
        positive_or_unlimited,
        signature="*, epoch, **_",
    )
    max_seqs_train: int | Callable[..., Any] | None = key(
        None, "max_seqs in training, if it differs", positive_or_unlimited, signature="*, epoch, **_"
    )
    max_seqs_dev: int | Callable[..., Any] | None = key(
        None, "max_seqs in evaluation, if it differs", positive_or_unlimited, signature="*, epoch, **_"
    )
    batch_size_total: int | dict[str, int] | None = key(
        None,
        "batch_size for the batches of all ranks together, as in ESPnet2: the batch_size of a rank is this divided by "
        "the number of ranks",
        positive,
    )
    max_seqs_total: int | None = key(None, "max_seqs for the batches of all ranks together, in the same way", positive)
    packed_batch_size: Frames = key(
        None, "maximal number of frames in a rank's batch without the padding, for every data key or by key", positive
    )
    packed_batch_size_train: Frames = key(None, "packed_batch_size in training, if it differs", positive)
    packed_batch_size_dev: Frames = key(None, "packed_batch_size in evaluation, if it differs", positive)
    max_pad_size: Frames = key(
        None,
        "maximal number of frames of padding in a rank's batch (padded minus real frames), for every data key or by key",
        not_negative,
    )
    batch_cost: Callable[..., Any] | dict[str, Any] | None = key(
        None,
        "the cost of a sequence, in which batch_size and packed_batch_size then count instead of in frames: a function "
        "{signature} that gets the lengths of all sequences by data key and returns their costs, in any unit; or "
        "{'class': 'quadratic', 'at': N}: n + n * n / N for n frames of the data key 'data' (or the first one; or of the entry "
        "'key'); None: frames",
        signature="lengths",
    )
    max_seq_length: Frames = key(
        None,
        "drop sequences with more frames in any data key, or by key, in training and evaluation, before they are cut "
        "into chunks; None or 0: no limit",
        not_negative,
    )
    min_seq_length: Frames = key(None, "drop sequences with fewer frames, like max_seq_length", not_negative)
    packed: bool | list[str] = key(
        False,
        "batches without padding: the frames of one sequence after the other, so that raw_tensor is (frames, ...); True, or the "
        "data keys that are packed",
    )
    frame_batches: bool = key(
        False,
        "for models that treat every frame by itself: join the sequences of an epoch and cut them after every batch_size frames, "
        "without padding; a batch is (1, frames, ...)",
    )
    shuffle_batches: bool = key(
        False, "train on the batches of an epoch in random order, from the same seed as the order of the sequences"
    )
    online_shuffle_batches: int | dict[str, int] | None = key(
        None,
        "train on N batches after the other in random order, then on the next N, so that batches stay near their "
        "place in the order of the sequences; a number, or {'buffer_size': N}",
        positive,
    )
    largest_batches_first: bool = key(
        False,
        "train on the largest batches of an epoch, and those with the longest sequences, first: if memory does not suffice for "
        "them, the training fails at the beginning of the epoch",
    )
    balance_ranks: int = key(
        0,
        "give the ranks batches of similar size in every step: the batches of an epoch come in groups of this many of "
        "similar size, the groups in random order; set it to the number of ranks or a multiple of it; 0: off",
        not_negative,
    )

    def problems(self, sections: Sections = ALONE) -> list[Problem]:
        for total, name in (("batch_size_total", "batch_size"), ("max_seqs_total", "max_seqs")):
            if getattr(self, total) is not None and (
                getattr(self, name) is not None or getattr(self, f"{name}_train") is not None
            ):
                return problem("conflict", f"{total}: expected either {total} (of all ranks) or {name} (of each rank), got both")
        data = sections.get(DataKeys)
        if data is not None and data.may_limit_batches:
            pass  # `limited` looks again when the datasets are open
        elif not self.training_keys().has_limit and self.batch_size_total is None and self.max_seqs_total is None:
            lifting = [
                name
                for name in ("batch_size_train", "max_seqs_train", "packed_batch_size_train")
                if getattr(self, name) is not None
            ]
            if lifting:
                return problem(
                    "missing",
                    f"{lifting[0]}: expected a limit of training batches, got {getattr(self, lifting[0])}, which lifts the only "
                    "one (set batch_size, max_seqs, batch_size_train or max_seqs_train)",
                )
            return problem("missing", NO_LIMIT)
        elif not self.evaluation_keys().has_limit and self.batch_size_total is None and self.max_seqs_total is None:
            return problem(
                "missing",
                "batch_size_dev: expected batch_size_dev or max_seqs_dev, as training has separate keys, got neither",
            )
        problems = self._cost_problems()
        if isinstance(self.online_shuffle_batches, dict) and list(self.online_shuffle_batches) != ["buffer_size"]:
            problems += problem(
                "wrong-type",
                f"online_shuffle_batches: expected a number or {{'buffer_size': N}}, got {self.online_shuffle_batches}",
            )
        problems += _problems_by_key("online_shuffle_batches", self.online_shuffle_batches, "a positive integer", 1)
        if self.shuffle_window and (self.shuffle_batches or self.balance_ranks):
            conflicting = "shuffle_batches" if self.shuffle_batches else "balance_ranks"
            problems += problem(
                "conflict",
                f"online_shuffle_batches: expected either it or {conflicting}, which order all batches of an epoch, got both",
            )
        for name in ("packed", "batch_cost", "largest_batches_first"):
            if self.frame_batches and getattr(self, name):
                problems += problem(
                    "conflict", f"{name}: expected it without frame_batches, whose batches have equally many frames, got both"
                )
        for name in LIMITS_OF_SIZES if self.frame_batches else ():
            if name.startswith("packed") and getattr(self, name) is not None:
                problems += problem(
                    "conflict", f"{name}: expected batch_size with frame_batches, whose batches have no padding, got {name}"
                )
        for name in LIMITS_OF_SIZES:
            problems += _problems_by_key(name, getattr(self, name), "a positive integer", 1)
        for name in LIMITS_OF_LENGTHS:
            problems += _problems_by_key(name, getattr(self, name), "zero or a positive integer", 0)
        return problems

    def _cost_problems(self) -> list[Problem]:
        cost = self.batch_cost
        if not isinstance(cost, dict):
            return []
        if cost.get("class") != "quadratic":
            return problem(
                "unknown-value",
                f"batch_cost: expected a function, or a dict with the class 'quadratic', got {cost.get('class')!r} as its class",
            )
        at = cost.get("at")
        if isinstance(at, bool) or not isinstance(at, (int, float)) or not 0 < at < float("inf"):
            return problem(
                "out-of-range", f"batch_cost.at: expected the frames at which the cost of a frame has doubled, got {at!r}"
            )
        unknown = ", ".join(sorted(map(str, cost.keys() - {"class", "at", "key"})))
        return (
            problem("unknown-key", f"batch_cost.{unknown}: unknown key of 'quadratic', which has at and key") if unknown else []
        )

    @property
    def shuffle_window(self) -> int:
        """The number of consecutive batches that `online_shuffle_batches` shuffles; 0: it is off."""
        window = self.online_shuffle_batches
        return (window.get("buffer_size", 0) if isinstance(window, dict) else window) or 0

    @property
    def has_limit(self) -> bool:
        """Whether a key limits the size of a batch."""
        return self.batch_size is not None or self.max_seqs not in (None, -1) or self.packed_batch_size is not None

    def limited(self, name: str, max_seqs: int | None, may_have_batches: bool = False) -> BatchKeys:
        """The keys of a dataset that asks for this number of sequences, which holds if no key sets a limit.

        Args:
            may_have_batches: whether a function orders the dataset, which may return batches.

        Raises:
            DataError: nothing limits batches.
        """
        if self.has_limit:
            return self
        if max_seqs is None and may_have_batches:
            return self
        if max_seqs is None:
            raise DataError(f"{name}: {NO_LIMIT}")
        return replace(self, max_seqs=max_seqs)

    def per_rank(self, ranks: int) -> BatchKeys:
        """The keys of each of `ranks` ranks. Raises: DataError, if there is less than one sequence for each."""
        if self.max_seqs_total is not None and self.max_seqs_total < ranks:
            raise DataError(
                f"max_seqs_total: expected at least one sequence for each of {ranks} ranks, got {self.max_seqs_total}"
            )
        total = self.batch_size_total
        if isinstance(total, dict):
            total = {name: max(1, size // ranks) for name, size in total.items()}
        return replace(
            self,
            batch_size=self.batch_size if total is None else total if isinstance(total, dict) else max(1, total // ranks),
            max_seqs=self.max_seqs if self.max_seqs_total is None else self.max_seqs_total // ranks,
            batch_size_total=None,
            max_seqs_total=None,
        )

    def remainder_line(self, ranks: int) -> str | None:
        """The warning that the ranks' batches have fewer sequences together than the config says; None: they have as many."""
        wanted = self.max_seqs_total
        if wanted is None or wanted % ranks == 0:
            return None
        share = wanted // ranks
        return (
            f"max_seqs_total: {ranks} ranks take {share * ranks} sequences in a step instead of {wanted}, {share} each: other "
            f"steps than on one rank (a multiple of {ranks}, such as {(share + 1) * ranks}, would be divided without a remainder)"
        )

    def training_keys(self) -> BatchKeys:
        """The keys that apply in training."""
        return self._replace_sizes(self.batch_size_train, self.max_seqs_train, self.packed_batch_size_train)

    def evaluation_keys(self) -> BatchKeys:
        """The keys that apply in evaluation, where batches stay in order."""
        keys = self._replace_sizes(self.batch_size_dev, self.max_seqs_dev, self.packed_batch_size_dev)
        return replace(keys, shuffle_batches=False, balance_ranks=0, online_shuffle_batches=None, largest_batches_first=False)

    def whole_sequences(self) -> BatchKeys:
        """The keys that apply where every sequence needs a row, as in `forward`."""
        return replace(self, frame_batches=False)

    def limits(self, epoch: int) -> Limits:
        """The limits of the batches of an epoch. Raises: DataError, if a function of the config returns no size."""
        batch_size = _size_in_epoch(self._spelling("batch_size"), self.batch_size, epoch)
        max_seqs = _size_in_epoch(self._spelling("max_seqs"), self.max_seqs, epoch)
        max_seqs = None if max_seqs == -1 else max_seqs
        return Limits(*map(_in_int64, (batch_size, max_seqs, self.packed_batch_size, self.max_pad_size)))

    def _spelling(self, name: str) -> str:
        """The key that a size comes from: that of training or evaluation may have replaced the one for both."""
        names = (f"{name}_train", f"{name}_dev")
        return next((alternative for alternative in names if getattr(self, alternative) is getattr(self, name)), name)

    def _replace_sizes(self, batch_size: Size, max_seqs: int | Callable[..., Any] | None, packed: Frames) -> BatchKeys:
        return replace(
            self,
            batch_size=self.batch_size if batch_size is None else batch_size,
            max_seqs=self.max_seqs if max_seqs is None else max_seqs,
            packed_batch_size=self.packed_batch_size if packed is None else packed,
        )


def _problems_by_key(name: str, value: object, rule: str, least: int) -> list[Problem]:
    if isinstance(value, dict) and any(not isinstance(size, int) or size < least for size in value.values()):
        return problem("out-of-range", f"{name}: expected {rule} for every data key, got {value}")
    return []


def _in_int64(limit: Any) -> Any:
    """A limit, or several by data key, capped so that it fits into int64: larger ones limit nothing either."""
    if isinstance(limit, Mapping):
        return {name: min(size, LARGEST) for name, size in limit.items()}
    return limit if limit is None else min(limit, LARGEST)


def _size_in_epoch(name: str, value: Any, epoch: int) -> Any:
    """A size, or what the function of the config returns for an epoch. Raises: DataError."""
    if not callable(value):
        return value
    size = call_for_epoch(name, value, epoch)
    members = list(size.values()) if isinstance(size, dict) and name.startswith("batch_size") else [size]
    numbers = [isinstance(member, Integral) and not isinstance(member, bool) for member in members]
    least = -1 if name.startswith("max_seqs") else 1  # -1: no limit
    if size is not None and not (all(numbers) and all(member > 0 or member == least for member in members)):
        rule = "a positive integer, a dict of them or None" if name.startswith("batch_size") else "a positive integer, -1 or None"
        raise DataError(f"{name}: expected the function to return {rule}, got {size!r} for epoch {epoch}")
    if isinstance(size, dict):
        return {key: int(member) for key, member in size.items()}
    return None if size is None else int(size)
