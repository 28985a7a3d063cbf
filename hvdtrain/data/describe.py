"""Lines for the log that describe datasets and batches, before training starts."""

from __future__ import annotations

from collections import Counter
from os.path import abspath

import numpy

from hvdtrain.data.feed import Feed
from hvdtrain.data.files import size_text
from hvdtrain.data.plan.batch_keys import BatchKeys
from hvdtrain.data.plan.bounds import count_too_long
from hvdtrain.data.plan.costs import count_in_cost, sorting_lengths
from hvdtrain.data.plan.selection import select_by_length

Line = tuple[int, str]
"""The lowest `log_verbosity` at which a line is shown, and the line."""


def feed_lines(feed: Feed, local_size: int = 1) -> list[Line]:
    """Describe a dataset: its size, its order, its cache, and the sequences that are left out.

    Args:
        local_size: the number of ranks on this host.
    """
    how = feed.dataset.how_read()
    ordering = feed.order_keys.seq_ordering
    order_name = ordering if isinstance(ordering, str) else getattr(ordering, "__name__", "a function")
    if feed.dataset.window is not None:
        order_name += f" in windows of {feed.dataset.window}"
    elif feed.dataset.has_fixed_order:
        order_name = "in its own order"
    lengths = feed.dataset.lengths
    size = sum(int(lengths[key].sum(dtype=numpy.int64)) * stream.frame_size for key, stream in feed.dataset.streams.items())
    repeated = [(path, times) for inner in feed.parts for path, times in Counter(map(abspath, inner.files)).items() if times > 1]
    parts = [f"{feed.name}: {feed.dataset.num_sequences} sequences, {order_name}", *([how] if how else []), size_text(size)]
    lines = [
        (4, "; ".join(parts)),
        *((2, f"{feed.name}: {text}") for text in (*feed.dataset.warnings(), *feed.broken.warnings())),
        *((2, f"{feed.name}: {path} is in the list of files {times} times") for path, times in repeated),  # patterns may overlap
        *((4, f"{feed.name}: {line}") for line in feed.cache.lines(local_size)),
    ]
    used = numpy.arange(feed.dataset.num_sequences) if feed.subset is None else feed.subset
    if feed.subset is not None:
        lines.append((4, f"{feed.name}: {len(used)} of them are listed in {feed.order_keys.seq_list_filter_file}"))
    keys = feed.batch_keys
    selected = select_by_length(feed.dataset.lengths, used, keys.min_seq_length, keys.max_seq_length)
    mix = feed.dataset.mix
    shares = None if mix is None else mix.shares(sorting_lengths(feed.dataset.lengths), selected)
    if feed.chunks is not None:
        selected, about = feed.chunks.shares(selected)
        lines += [(4, f"{feed.name}: {about}")] if about else []
    for name, column in feed.dataset.lengths.items():
        empty = selected[column[selected] == 0]
        if len(empty):
            example = f"the first is {feed.dataset.tags([int(empty[0])])[0]!r}; min_seq_length = 1 drops them"
            lines.append((2, f"{feed.name}: {len(empty)} sequences have no frames in {name!r} ({example})"))
    if len(selected) < len(used):
        lines.append(
            (2, f"{feed.name}: a full epoch loses {len(used) - len(selected)} of {len(used)} sequences, too short or too long")
        )
    lines += [] if shares is None else [(4, f"{feed.name}: {shares}")]
    elements = selected if feed.chunks is None else feed.chunks.numbers_of(selected)
    sizes, limits, _ = count_in_cost(keys, {name: column[elements] for name, column in feed.lengths.items()}, keys.limits(1))
    alone = count_too_long(sizes, limits)
    if keys.frame_batches:
        left_out = [repr(name) for name in feed.dataset.streams if name not in feed.frame_keys]
        more = f"; without {', '.join(left_out)}, which extern_data does not name" if left_out else ""
        lines.append((4, f"{feed.name}: batches of frames: sequences are joined and cut at batch_size{more}"))
    elif alone:
        lines.append((2, f"{feed.name}: {alone} sequences are longer than batch_size allows: each makes a batch by itself"))
    return lines


def batch_lines(keys: BatchKeys, epoch: int, size: int) -> list[Line]:
    """Describe the limits of the training's batches, per rank and over all ranks."""
    limits = keys.limits(epoch)
    parts = []
    if limits.max_seqs is not None:
        parts.append(f"{limits.max_seqs} sequences per rank, {limits.max_seqs * size} in all")
    units = ("padded frames", "frames without padding") if keys.batch_cost is None else ("padded cost", "cost without padding")
    if keys.frame_batches:
        units = ("frames", units[1])
    for limit, unit in zip((limits.batch_size, limits.packed_batch_size), units, strict=True):
        if isinstance(limit, int):
            parts.append(f"{limit} {unit} per rank, {limit * size} in all")
        elif limit is not None:
            parts.append(f"{limit} {unit} per rank")
    lines = [(4, f"batch, at most: {'; '.join(parts)}")]
    group = keys.balance_ranks
    if group % size:
        lines.append(
            (2, f"balance_ranks: {group} is not a multiple of the {size} ranks: some steps mix batches of different size")
        )
    return lines
