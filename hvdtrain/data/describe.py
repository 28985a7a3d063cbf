"""Describing data: lines of the log about datasets and batches before training starts, and the batch in which an error occurs."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy

from hvdtrain.data.combine.cache import frame_size
from hvdtrain.data.feed import Feed
from hvdtrain.data.files.copies import Copies
from hvdtrain.data.files.sizes import size_text
from hvdtrain.data.plan.bounds import too_long
from hvdtrain.data.plan.epoch import BatchKeys
from hvdtrain.data.plan.selection import select_by_length
from hvdtrain.data.types import Batch
from hvdtrain.errors import HvdtrainError

Line = tuple[int, str]
"""The `log_verbosity` from which on a line is shown, and the line."""


def feed_lines(feed: Feed, local_size: int = 1) -> list[Line]:
    """Describe a dataset: its size, its order, its cache, and the sequences that are left out.

    Args:
        local_size: the number of ranks on this host.
    """
    how = feed.dataset.how_read()
    ordering = feed.order_keys.seq_ordering
    named = ordering if isinstance(ordering, str) else getattr(ordering, "__name__", "a function")
    if feed.dataset.window is not None:
        named += f" in windows of {feed.dataset.window}"
    elif feed.dataset.own_order:
        named = "in its own order"
    lengths = feed.dataset.lengths
    size = sum(int(lengths[key].sum(dtype=numpy.int64)) * frame_size(stream) for key, stream in feed.dataset.streams.items())
    parts = [f"{feed.name}: {feed.dataset.num_sequences} sequences, {named}", *([how] if how else []), size_text(size)]
    lines = [
        (4, "; ".join(parts)),
        *((2, f"{feed.name}: {text}") for text in feed.dataset.warnings()),
        *_cache_lines(feed, local_size),
    ]
    used = numpy.arange(feed.dataset.num_sequences) if feed.subset is None else feed.subset
    if feed.subset is not None:
        lines.append((4, f"{feed.name}: {len(used)} of them are listed in {feed.order_keys.seq_list_filter_file}"))
    keys = feed.batch_keys
    kept = select_by_length(feed.dataset.lengths, used, keys.min_seq_length, keys.max_seq_length)
    if feed.chunks is not None:
        with_chunks = kept[numpy.diff(feed.chunks.first)[kept] > 0]
        lines.append((4, f"{feed.name}: {len(feed.chunks.of(with_chunks))} chunks of {len(with_chunks)} sequences"))
        kept = with_chunks
    for name, column in feed.dataset.lengths.items():
        empty = kept[column[kept] == 0]
        if len(empty):
            some = f"the first is {feed.dataset.tags([int(empty[0])])[0]!r}; min_seq_length = 1 drops them"
            lines.append((2, f"{feed.name}: {len(empty)} sequences have no frames in {name!r} ({some})"))
    if len(kept) < len(used):
        lines.append(
            (2, f"{feed.name}: a full epoch loses {len(used) - len(kept)} of {len(used)} sequences, too short or too long")
        )
    elements = kept if feed.chunks is None else feed.chunks.of(kept)
    alone = too_long({name: column[elements] for name, column in feed.lengths.items()}, keys.limits(1))
    if alone:
        lines.append((2, f"{feed.name}: {alone} sequences are longer than batch_size allows and make batches of their own"))
    return lines


def _cache_lines(feed: Feed, local_size: int) -> list[Line]:
    """Describe the cache."""
    if feed.budget is None or feed.budget.size == 0:
        return []
    if not feed.budget.caches:
        return [(4, f"{feed.name}: no cache: all data is memory-mapped, and cached by the system for all ranks of the host")]
    whole = sum(cache.size() for cache in feed.budget.caches)
    size = whole if feed.budget.size is None else min(whole, feed.budget.size)
    return [
        (
            4,
            f"{feed.name}: cache: up to {size_text(size)} per rank, {size_text(local_size * size)} on this host; "
            f"{size_text(whole)} would hold all of it" + (", more than the host has" if feed.budget.is_cut(whole) else ""),
        )
    ]


def copy_lines(folder: str, everywhere: Sequence[tuple[str, Copies]]) -> list[Line]:
    """Describe the copies of data files, host by host, and the files that could not be copied.

    Args:
        everywhere: by rank, its host and its copies.
    """
    hosts: dict[str, list[Copies]] = {}
    for host, copies in everywhere:
        hosts.setdefault(host, []).append(copies)
    lines = []
    for host, ranks in hosts.items():
        made, made_size = sum(copies.made for copies in ranks), sum(copies.made_size for copies in ranks)
        seconds = max(copies.seconds for copies in ranks)
        copied = f"{len(ranks[0].places)} files ({size_text(ranks[0].size)}) are read from copies in {folder}"
        now = f", {made} copied now ({size_text(made_size)} in {seconds:.1f} s)" if made else ", all made before"
        if ranks[0].places:
            lines.append((4, f"{host}: {copied}{now}"))
        not_copied = {path: why for copies in ranks for path, why in copies.not_copied.items()}
        lines += [(2, f"{host}: not copied, but read from its original path: {path}: {why}") for path, why in not_copied.items()]
    return lines


def batch_lines(keys: BatchKeys, epoch: int, size: int) -> list[Line]:
    """Describe the limits of the training's batches, per rank and over all ranks."""
    limits = keys.limits(epoch)
    parts = []
    if limits.max_seqs is not None:
        parts.append(f"{limits.max_seqs} sequences per rank, {limits.max_seqs * size} in all")
    for limit, what in ((limits.batch_size, "padded frames"), (limits.packed_batch_size, "frames without padding")):
        if isinstance(limit, int):
            parts.append(f"{limit} {what} per rank, {limit * size} in all")
        elif limit is not None:
            parts.append(f"{limit} {what} per rank")
    lines = [(4, f"batch, at most: {'; '.join(parts)}")]
    group = keys.balance_ranks
    if group % size:
        lines.append(
            (2, f"balance_ranks: {group} is not a multiple of the {size} ranks: some steps mix batches of different size")
        )
    return lines


FEW_TAGS = 5
"""How many sequences of a batch are named."""

WANTS_LONG = re.compile(r"\bLong\b|not implemented for '(Int|Short|Char|Byte)'")
"""What PyTorch says of class indices that are not int64."""


@contextmanager
def naming(batch: Batch | None) -> Iterator[None]:
    """Around what the config's functions compute: an exception's traceback ends with a description of the batch."""
    try:
        yield
    except HvdtrainError:
        raise
    except Exception as error:
        if batch is not None:
            error.add_note(batch_text(batch))
            if WANTS_LONG.search(str(error)) and any(each.values.dtype.kind in "iu" for each in batch.data.values()):
                error.add_note(
                    "class indices have the type of the dataset: PyTorch's losses require int64, as in raw_tensor.long()"
                )
        raise


def batch_text(batch: Batch) -> str:
    """Type, shape and lengths of every data key, and some of the tags."""
    parts = [
        f"{key} {each.values.dtype} {each.values.shape}, seq_lens {each.seq_lens.min()} to {each.seq_lens.max()}"
        for key, each in batch.data.items()
    ]
    try:
        tags = [] if batch.seq_tags is None else batch.seq_tags()
    except HvdtrainError:  # the file has changed: whoever handles the exception says so
        tags = []
    more = [f"{len(tags) - FEW_TAGS} more"] if len(tags) > FEW_TAGS else []
    sequences = f"; sequences: {', '.join([*tags[:FEW_TAGS], *more])}" if tags else ""
    return f"in this batch: {'; '.join(parts)}{sequences}"
