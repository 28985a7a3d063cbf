"""Opening the datasets of a job, and checks of the data against the keys."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace

import numpy

from hvdtrain.checkpoint.progress import Progress
from hvdtrain.comm.base import Communicator
from hvdtrain.config.plugins import Registry
from hvdtrain.data.broken import BrokenSequences
from hvdtrain.data.cache import CACHES, NO_CACHE
from hvdtrain.data.expected import check_lengths, check_streams
from hvdtrain.data.feed import Feed
from hvdtrain.data.files import Unchanged
from hvdtrain.data.keys import DatasetSpec
from hvdtrain.data.opening import OpeningContext, open_dataset
from hvdtrain.data.plan.batch_keys import COST, LIMITS_OF_LENGTHS, LIMITS_OF_SIZES
from hvdtrain.data.plan.chunks import CHUNKERS
from hvdtrain.data.plan.selection import find_listed, select_by_length
from hvdtrain.data.remote import COPIERS, is_remote
from hvdtrain.data.types import Stream
from hvdtrain.data.views import OneAtATime
from hvdtrain.errors import DataError, HvdtrainError
from hvdtrain.learner.frameworks import FRAMEWORKS
from hvdtrain.runtime import log
from hvdtrain.runtime.watchdog import Watchdog
from hvdtrain.settings import Settings
from hvdtrain.start_up.scanning import open_scanning

NO_COPIES: Mapping[str, str] = {}


@dataclass(frozen=True)
class DataCheck:
    """What a plug-in compares of the data of a training. All ranks call both functions.

    Attributes:
        with_checkpoint: called once what the training starts from is loaded; it notes in `Progress.data` what the next
            checkpoint has. Raises: CheckpointError, DataError.
        between_ranks: called before the first epoch, whose number it gets. Raises: ConfigError, DataError.
    """

    with_checkpoint: Callable[[Settings, Communicator, Progress, Sequence[Feed]], None]
    between_ranks: Callable[[Communicator, Sequence[Feed], int], None]


DATA_CHECKS: Registry[DataCheck] = Registry("data_checks")
"""Those of plug-ins."""


def compare_with_checkpoint(settings: Settings, comm: Communicator, progress: Progress, feeds: Sequence[Feed]) -> None:
    """Collective. Raises: CheckpointError, DataError."""
    for check in DATA_CHECKS.values():
        check.with_checkpoint(settings, comm, progress, feeds)


def copy_data(
    settings: Settings,
    specs: Iterable[DatasetSpec],
    comm: Communicator,
    watchdog: Watchdog,
    at_the_end: ExitStack,
    *,
    remote_only: bool,
) -> Mapping[str, str]:
    """Collective. Have the plug-in for that copy the data files to a local disk of every host, if the config asks for it.

    Args:
        remote_only: leave out files that can be read where they are.

    Returns:
        By path, that of the copy.

    Raises:
        DataError: a file cannot be read, or there is no room for a remote one.
    """
    paths = dict.fromkeys(path for spec in specs for dataset in spec.all() for path in dataset.copied)
    files = [path for path in paths if is_remote(path) or not remote_only]
    copier = None if remote_only and not files else COPIERS.last
    return NO_COPIES if copier is None else copier.copy(settings, files, comm, watchdog, at_the_end)


def changed_files(feeds: Iterable[Feed]) -> Iterator[tuple[str, DataError]]:
    """The datasets, by name, whose data files have changed since the start, and how."""
    for feed in feeds:
        try:
            feed.check_files()
        except DataError as error:
            yield feed.name, error


@contextmanager
def note_changed_files(feeds: list[Feed]) -> Iterator[None]:
    """If data files were changed meanwhile, add that as a note to a crash, which it may have caused."""
    try:
        yield
    except HvdtrainError:
        raise  # its message is complete
    except Exception as error:
        for name, changed in changed_files(feeds):
            error.add_note(f"in the meantime, the data of {name} was changed: {changed}")
        raise


def open_feeds(
    settings: Settings, comm: Communicator, copies: Mapping[str, str] = NO_COPIES, watchdog: Watchdog | None = None
) -> list[Feed]:
    """Open the datasets of a training, train first. Raises: DataError."""
    feeds = open_datasets(settings, comm, (settings.train, *settings.evaluations), copies, watchdog, skips_broken=True)
    streams = feeds[0].dataset.streams
    for feed in feeds[1:]:
        missing = [key for key in streams if key not in feed.dataset.streams]
        if missing:
            raise DataError(
                f"{feed.name}: expected the data keys of train ({', '.join(streams)}), got none called {', '.join(missing)}"
            )
        _check_some_fit(feed)
    check_limits(settings, streams)
    return feeds


def _check_some_fit(feed: Feed) -> None:
    """Refuse limits that leave out all of a dataset, before an epoch is trained. Raises: DataError."""
    lengths = feed.dataset.lengths
    indices = numpy.arange(feed.dataset.num_sequences) if feed.subset is None else feed.subset
    fitting = select_by_length(lengths, indices, feed.batch_keys.min_seq_length, feed.batch_keys.max_seq_length)
    if len(indices) and not len(fitting) and feed.dataset.at_epoch(2).lengths is lengths:
        limits = "min_seq_length and max_seq_length"
        raise DataError(
            f"{feed.name}: expected one of its {len(indices)} sequences to be left at least, got none that {limits} allow"
        )


def check_limits(settings: Settings, streams: Mapping[str, Stream]) -> None:
    """Compare the data keys that limits of batches name with those of train. Raises: DataError."""
    limits = {name: getattr(settings.batch, name) for name in (*LIMITS_OF_SIZES, *LIMITS_OF_LENGTHS)}
    by_key = {name: list(limit) for name, limit in limits.items() if isinstance(limit, dict)}
    by_key |= {"packed": settings.batch.packed} if isinstance(settings.batch.packed, list) else {}
    chunker = CHUNKERS.last
    for name, keys in {**by_key, **({} if chunker is None else chunker.data_keys(settings))}.items():
        absent = [key for key in keys if key not in streams and not (key == COST and settings.batch.batch_cost is not None)]
        if absent and (len(absent) == len(keys)) and name not in LIMITS_OF_LENGTHS:
            raise DataError(f"{name}: expected data keys of train ({', '.join(streams)}), got {absent[0]!r}")
        if absent:
            log.warning(
                f"{name}: without effect for {', '.join(map(repr, absent))}: the data keys of train are {', '.join(streams)}"
            )


def open_datasets(
    settings: Settings,
    comm: Communicator,
    specs: Iterable[DatasetSpec],
    copies: Mapping[str, str] = NO_COPIES,
    watchdog: Watchdog | None = None,
    skips_broken: bool = False,
) -> list[Feed]:
    """Open datasets. A file that has a copy is read from the copy.

    Args:
        skips_broken: whether `skip_broken` holds: outputs of broken sequences would be missing without a word.

    Raises:
        DataError: a file is bad.
    """
    scanning = open_scanning(settings, comm, watchdog)
    specs = list(specs)
    make_caches = CACHES.last
    caches = [NO_CACHE] * len(specs) if make_caches is None else make_caches(settings, specs, comm.local_size)
    feeds = []
    for spec, cache in zip(specs, caches, strict=True):
        scanning = replace(scanning, broken=BrokenSequences(spec.name, settings.data.skip_broken if skips_broken else 0))
        feeds.append(_open_feed(settings, comm, spec, OpeningContext(cache, copies, scanning)))
    return feeds


def _open_feed(settings: Settings, comm: Communicator, spec: DatasetSpec, context: OpeningContext) -> Feed:
    """Open a dataset, and check it against the config. Raises: DataError."""
    copies = context.copies
    files = Unchanged(copies.get(path, path) if path in inner.copied else path for inner in spec.all() for path in inner.files)
    dataset = OneAtATime(open_dataset(spec, context))
    check_lengths(spec.name, dataset)
    if dataset.collate is None:  # else `_check_collate` refuses them
        check_streams(spec.name, dataset.streams, spec.files, settings.expected)
    if not any(lengths.any() for lengths in dataset.lengths.values()):
        raise DataError(f"{spec.name}: expected frames, got {dataset.num_sequences} sequences, all of length 0")
    feed = Feed(
        spec.name,
        dataset,
        spec.order,
        settings.batch,
        comm.rank,
        comm.size,
        settings.reduce.dataset_distribution if spec is settings.train else "shard",
        files=files,
        cache=context.cache,
        parts=context.parts,
        expected=settings.expected,
        broken=context.scanning.broken,
    )
    try:
        return with_keys(feed, settings, spec, comm.size)
    except DataError:
        dataset.close()
        raise


def with_keys(feed: Feed, settings: Settings, spec: DatasetSpec, size: int) -> Feed:
    """A dataset with other keys of its order, its batches and its chunks. Raises: DataError.

    Args:
        size: the number of ranks that its batches are made for.
    """
    is_training = spec is settings.train
    dataset = feed.dataset
    chunker = CHUNKERS.last
    batch_keys = settings.batch.per_rank(size)
    batch_keys = batch_keys.training_keys() if is_training else batch_keys.evaluation_keys()
    feed = replace(
        feed,
        order_keys=spec.order,
        batch_keys=batch_keys.limited(spec.name, dataset.max_seqs, callable(spec.order.seq_ordering)),
        subset=find_listed(dataset, spec.order.seq_list_filter_file),
        chunks=None if dataset.has_fixed_order or chunker is None else chunker.make(settings, is_training, dataset.lengths),
        made_for=size,
    )
    if dataset.has_fixed_order:
        _check_fixed_order(feed, {} if chunker is None else chunker.uses(settings, is_training))
    if dataset.collate is not None:
        _check_collate(feed, settings)
    return feed


def _check_collate(feed: Feed, settings: Settings) -> None:
    """Refuse keys that need arrays, for a dataset whose batches a `collate` function makes. Raises: DataError."""
    uses = {
        "chunking or context_window": feed.chunks is not None,
        "packed": bool(feed.batch_keys.packed),
        "frame_batches": feed.batch_keys.frame_batches,
        "extern_data": bool(settings.expected),
        "import of returnn": settings.source.is_foreign,
        f"backend {settings.run.backend!r}": "trees of tensors" not in FRAMEWORKS[settings.run.backend].features,
    }
    for use in [use for use, is_used in uses.items() if is_used]:
        raise DataError(f"{feed.name}: expected no {use} with collate, whose batches are what it returns, got both")


def _check_fixed_order(feed: Feed, chunking: Mapping[str, bool]) -> None:
    """Refuse keys that change the order or need fixed lengths, for a dataset with a fixed order. Raises: DataError."""
    is_returnns = feed.dataset.window is None
    uses = {
        **chunking,
        "shuffle_batches": feed.batch_keys.shuffle_batches,
        "balance_ranks": bool(feed.batch_keys.balance_ranks),
        "largest_batches_first": feed.batch_keys.largest_batches_first,
        "online_shuffle_batches": bool(feed.batch_keys.shuffle_window),
        "random_seed_offset": feed.distribution == "random_seed_offset",
        "partition_epoch": not is_returnns and feed.order_keys.partition_epoch > 1,
        "seq_list_filter_file": not is_returnns and feed.subset is not None,
        "max_batches": feed.order_keys.max_batches is not None,
    }
    kind = "a dataset that RETURNN reads in its own order" if is_returnns else "an iterable, which is read from beginning to end"
    for key in [key for key, is_used in uses.items() if is_used]:
        raise DataError(
            f"{feed.name}: expected no {key} with {kind}, got it (convert it once with hvdtrain dump and train on the HDF file)"
        )
