"""Running a model over a dataset on all ranks, and passing on its outputs in the dataset's order."""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from hvdtrain.comm.base import Communicator, on_rank_zero, together
from hvdtrain.config.absent import import_part
from hvdtrain.config.references import as_function
from hvdtrain.data.feed import Feed
from hvdtrain.data.naming import Naming
from hvdtrain.data.types import Array, Batch, Items, Stream
from hvdtrain.errors import ConfigError, DataError
from hvdtrain.learner.base import Learner
from hvdtrain.plugins.forward import ForwardKeys
from hvdtrain.plugins.forward.split import Outputs, split_by_sequence
from hvdtrain.runtime import log
from hvdtrain.runtime.scores import Scores
from hvdtrain.runtime.watchdog import Watchdog
from hvdtrain.training.account import Account
from hvdtrain.training.agreement import plan_together
from hvdtrain.training.vote import TASK_INTERVAL, Requests, Vote

SLICE = 1.0
"""Rank 0 passes on outputs for about this many seconds before it meets the waiting ranks, so that the watchdog sees progress."""

WRITER = "hvdtrain.plugins.hdf_tools.writer"
"""The module that writes HDF files."""


@dataclass(frozen=True)
class SequenceOutput:
    """One output of one sequence, as passed to a callback. Attributes: raw_tensor: a numpy array of shape (frames, ...)."""

    raw_tensor: Array


class OutputWriter(Protocol):
    """Takes the outputs of one sequence after the other, in the dataset's order. Its block leaves a file, or nothing."""

    def __enter__(self) -> OutputWriter: ...

    def __exit__(self, failed: type[BaseException] | None, *_: object) -> None: ...

    def entry(self, outputs: Mapping[str, Array]) -> object:
        """What is written of a sequence. Raises: ConfigError, DataError."""

    def add(self, tag: str, outputs: Mapping[str, Array]) -> None:
        """Write a sequence. Raises: ConfigError, DataError."""


WriterMaker = Callable[[Mapping[str, Stream]], OutputWriter]
"""Makes a writer, given the streams of the dataset."""


class Spool:
    """This rank's file of outputs, in the order in which they were computed, until rank 0 reads them.

    Attributes:
        places: the index of each sequence, and the offset of its outputs in the file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.places: list[tuple[int, int]] = []
        self._file = path.open("wb")

    def add(self, index: int, outputs: Outputs) -> None:
        self.places.append((index, self._file.tell()))
        pickle.dump((dict(outputs), outputs.vectors), self._file, protocol=pickle.HIGHEST_PROTOCOL)

    def close(self) -> None:
        self._file.close()


class PaddedOutputs:
    """Notices outputs that are written with the padding of their batches, as they have no numbers of frames."""

    def __init__(self) -> None:
        self._frames: dict[tuple[str, str], set[int]] | None = None
        self._padded = set[str]()
        self._vectors = frozenset[str]()

    def check(self, batch: Batch, outputs: Outputs) -> None:
        """Compare the outputs of a batch's first sequence with its longest sequences.

        Raises:
            ConfigError: an output had as many frames as the longest sequence in batches of different lengths.
        """
        self._vectors = outputs.vectors
        frames = {name: len(outputs[name]) for name in outputs.uncut if outputs[name].ndim}
        columns = {key: column for key, column in batch.data.items() if not isinstance(column, Items)}
        self._padded |= {key for key, column in columns.items() if column.seq_lens.min() < column.seq_lens.max()}
        longest = {(name, key): int(column.seq_lens.max()) for name in frames for key, column in columns.items()}
        alike = [pair for pair, length in longest.items() if length == frames[pair[0]]]
        before = dict.fromkeys(alike, frozenset[int]()) if self._frames is None else self._frames
        self._frames = {pair: {*before[pair], longest[pair]} for pair in alike if pair in before}
        for (name, key), lengths in self._frames.items():
            if len(lengths) > 1 and key in self._padded:
                raise ConfigError.of(
                    "wrong-result",
                    f"forward_step: expected seq_lens in mark_as_output(..., {name!r}), which has as many frames as the longest "
                    f"sequence of {key!r} in each batch, got none, so that shorter ones would have padding "
                    f"(seq_lens=extern_data[{key!r}].seq_lens cuts it off)",
                )

    def warnings(self) -> list[str]:
        """Of outputs that may be padded, where all batches are equally long."""
        names = {name: key for name, key in self._frames or () if key in self._padded and name not in self._vectors}
        return [
            f"forward_step: {name!r} has as many frames as the longest sequence of {key!r} in its batch, also for shorter ones: "
            f"if that is padding, mark_as_output(..., seq_lens=extern_data[{key!r}].seq_lens) cuts it off"
            for name, key in names.items()
        ]


def forward(
    comm: Communicator,
    learner: Learner,
    watchdog: Watchdog,
    feed: Feed,
    epoch: int,
    keys: ForwardKeys,
    spool_prefix: Path,
    makers: Sequence[WriterMaker] = (),
) -> tuple[int, dict[str, float]]:
    """Collective. Every sequence's outputs go to a callback, into files, or both; returns the number of steps, and the exact
    means of the losses and errors that the learner computes with the outputs.

    Each rank collects its outputs in a temporary file next to `spool_prefix`; rank 0 passes them on when all are complete.

    Args:
        makers: of writers, besides those of the keys.

    Raises:
        ConfigError: none of output_file and forward_callback is set, with no other writer, or forward_step marks no output.
        DataError: a file exists or cannot be written, or the ranks did not use exactly what was planned.
    """
    together(comm, lambda: _check(keys, is_written=bool(makers)), name="outputs")
    writers = together(comm, lambda: [make(feed.dataset.streams) for make in makers], name="writers")
    callback = together(comm, lambda: _callback(keys) if comm.rank == 0 else None, name="forward_callback")
    if callback is not None:
        callback.init(model=learner.model)
    plan = plan_together(comm, feed, epoch)
    rank_batches = feed.rank_batches(plan)
    account = Account(feed, plan)
    spool = together(comm, lambda: _open_spool(spool_prefix, comm.rank), name="open_spool")
    padded = PaddedOutputs()
    try:
        stop_vote = Vote(comm, learner.numbers, TASK_INTERVAL)
        with learner.evaluating(feed.name), feed.read(rank_batches, epoch, learner.staging) as batches:
            for number in range(-(-plan.num_batches // comm.size)):
                watchdog.beat(f"forwarding {feed.name}, batch {number}", "steps")
                batch = next(batches, None)
                if batch is not None:
                    with Naming(batch, feed):
                        by_sequence = split_by_sequence(learner.forward(batch), batch)
                    for outputs in by_sequence[:1]:
                        padded.check(batch, outputs)
                    for index, outputs in zip(batch.indices.tolist(), by_sequence, strict=True):
                        for writer in writers if number == 0 else ():
                            writer.entry(outputs)  # what cannot be written is an error now, not when all is computed
                        spool.add(index, outputs)
                    account.add(batch.indices)
                stop_vote.step(Requests)
        stop_vote.finish()
        for warning in padded.warnings():
            log.warning(warning)
        spool.close()
        gathered = comm.gather(
            (spool.path, spool.places, learner.meter.take_scores(), account.take(plan.num_batches)), name="spools"
        )
        account.check("forward", [used for *_, used in gathered])
        spools = [(path, places) for path, places, *_ in gathered]
        if (remark := _selection_warning(feed, [index for _, places in spools for index, _ in places])) is not None:
            log.warning(remark)
        total = sum(len(places) for _, places in spools)
        done = 0
        with closing(_hand_on(feed, spools, callback, keys.output_file, writers)) as work:
            while done < total:
                watchdog.beat(f"handing on the outputs of {feed.name}, {done} of {total} sequences", "handing on")
                done = on_rank_zero(comm, lambda: _some(work, total), name="hand_on")
            watchdog.beat("finishing the files of outputs and forward_callback", "unhurried")
            together(comm, lambda: next(work, None) if comm.rank == 0 else None, name="finish_hand_on")
    finally:
        spool.path.unlink(missing_ok=True)
    return len(rank_batches), Scores.merge(scores for *_, scores, _ in gathered).means()


SELECTING = ("partition_epoch", "repeat_epoch", "max_batches", "seq_list_filter_file", "min_seq_length", "max_seq_length")
"""Keys by which an epoch has not each sequence of its dataset once."""


def _selection_warning(feed: Feed, passed_on: Sequence[int]) -> str | None:
    """A warning, if the sequences that are passed on are not those of the dataset, each once."""
    different = len(set(passed_on))
    if len(passed_on) == different == feed.dataset.num_sequences:
        return None
    values = {name: getattr(feed.order_keys, name, None) or getattr(feed.batch_keys, name, None) for name in SELECTING}
    given = [f"{name} = {value!r}" for name, value in values.items() if value not in (None, 1)]
    several = f", {len(passed_on)} outputs in all" if len(passed_on) != different else ""
    return (
        f"{feed.name}: the outputs are those of {different} of {feed.dataset.num_sequences} sequences{several} "
        f"({', '.join(given) or 'which its order has'})"
    )


def _check(keys: ForwardKeys, *, is_written: bool) -> None:
    """Raises: ConfigError, DataError."""
    if keys.output_file is None and keys.forward_callback is None and not is_written:
        raise ConfigError.of(
            "missing",
            "output_file, forward_callback: expected one of them for the task forward or search, or search_output_file for the "
            "task search, got none",
        )
    if keys.output_file is not None and Path(keys.output_file).exists():
        raise DataError(f"{keys.output_file}: expected a file that does not exist yet (output_file), got an existing one")
    if keys.output_file is not None:
        import_part(WRITER)  # what is missing is said before all is computed


def _callback(keys: ForwardKeys) -> Any:
    """The user's object. Raises: ConfigError."""
    value = as_function(keys.forward_callback, "forward_callback")
    callback = value() if isinstance(value, type) or not hasattr(value, "process_seq") and callable(value) else value
    missing = [name for name in ("init", "process_seq", "finish") if callback is not None and not hasattr(callback, name)]
    if missing:
        raise ConfigError.of(
            "missing", f"forward_callback: expected the method {missing[0]}, got a {type(callback).__name__} without it"
        )
    return callback


def _open_spool(prefix: Path, rank: int) -> Spool:
    path = prefix.with_name(f"{prefix.name}.forward.rank-{rank}.unfinished")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return Spool(path)
    except OSError as error:
        raise DataError(f"{path}: expected to be able to write, got: {error.strerror}") from None


def _some(work: Iterator[int], total: int) -> int:
    """Continue for about a second, at most up to the last sequence; return how many sequences are done."""
    until = time.monotonic() + SLICE
    done = 0
    for done in work:
        if done == total or time.monotonic() >= until:
            break
    return done


def _hand_on(
    feed: Feed,
    spools: list[tuple[Path, list[tuple[int, int]]]],
    callback: Any,
    output_file: str | None,
    output_writers: Sequence[OutputWriter],
) -> Generator[int, None, None]:
    """On rank 0: pass on all outputs in the dataset's order. Yields the number of sequences after each; then it finishes."""
    with ExitStack() as stack:
        writer = None
        if output_file is not None:
            Path(output_file).parent.mkdir(parents=True, exist_ok=True)
            writer = stack.enter_context(import_part(WRITER).HDFWriter(Path(output_file)))
        for output_writer in output_writers:
            stack.enter_context(output_writer)
        for number, (tag, outputs, vectors) in enumerate(_read_spools(feed, spools), start=1):
            if writer is not None:
                writer.add(tag, _streams(outputs, vectors))
            for output_writer in output_writers:
                output_writer.add(tag, outputs)
            if callback is not None:
                callback.process_seq(seq_tag=tag, outputs={name: SequenceOutput(value) for name, value in outputs.items()})
            yield number
    if callback is not None:
        callback.finish()


def _read_spools(
    feed: Feed, spools: list[tuple[Path, list[tuple[int, int]]]]
) -> Iterator[tuple[str, dict[str, Array], frozenset[str]]]:
    places = sorted((index, rank, place) for rank, (_, entries) in enumerate(spools) for index, place in entries)
    files = [path.open("rb") for path, _ in spools]
    try:
        for index, rank, place in places:
            files[rank].seek(place)
            yield feed.dataset.tags([index])[0], *pickle.load(files[rank])
    finally:
        for file in files:
            file.close()


def _streams(outputs: dict[str, Array], vectors: frozenset[str]) -> dict[str, Array]:
    """The data keys of an HDF file: 'data' is the output 'output', or else the first one; a number or a vector is one frame."""
    default = "output" if "output" in outputs else next(iter(outputs)) if "data" not in outputs else "data"
    framed = {name: value[None] if name in vectors else value for name, value in outputs.items()}
    arrays = {"data" if name == default else name: value for name, value in framed.items()}
    return {name: value.reshape(1) if value.ndim == 0 else value for name, value in arrays.items()}
