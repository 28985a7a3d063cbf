"""What the log tells of datasets and batches before training starts."""

from __future__ import annotations

import numpy

from hvdtrain.data.bounds import too_long
from hvdtrain.data.feed import Feed
from hvdtrain.data.plan import BatchKeys
from hvdtrain.data.selection import within

Line = tuple[int, str]
"""From which `log_verbosity` on a line is shown, and the line."""


def feed_lines(feed: Feed) -> list[Line]:
    """What is to be told of a dataset, each line with its level: its size, its order, and what of it is left out or too long."""
    how = getattr(feed.dataset, "how_read", lambda: "")()
    ordering = feed.order_keys.seq_ordering
    named = ordering if isinstance(ordering, str) else getattr(ordering, "__name__", "a function")
    lines = [(4, f"{feed.name}: {feed.dataset.num_sequences} sequences, {named}" + (f"; {how}" if how else ""))]
    used = numpy.arange(feed.dataset.num_sequences) if feed.subset is None else feed.subset
    if feed.subset is not None:
        lines.append((4, f"{feed.name}: {len(used)} of them are listed in {feed.order_keys.seq_list_filter_file}"))
    keys = feed.batch_keys
    kept = within(feed.dataset.lengths, used, keys.min_seq_length, keys.max_seq_length)
    if feed.chunks is not None:
        with_chunks = kept[numpy.diff(feed.chunks.first)[kept] > 0]
        lines.append((4, f"{feed.name}: {len(feed.chunks.of(with_chunks))} chunks of {len(with_chunks)} sequences"))
        kept = with_chunks
    if len(kept) < len(used):
        lines.append(
            (2, f"{feed.name}: a full epoch loses {len(used) - len(kept)} of {len(used)} sequences, too short or too long")
        )
    elements = kept if feed.chunks is None else feed.chunks.of(kept)
    alone = too_long({name: column[elements] for name, column in feed.lengths.items()}, keys.limits(1))
    if alone:
        lines.append((2, f"{feed.name}: {alone} sequences are longer than batch_size allows and make batches of their own"))
    return lines


def batch_lines(keys: BatchKeys, epoch: int, size: int) -> list[Line]:
    """What is to be told of the training's batches: what closes one, per rank and in all."""
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
        lines.append((2, f"balance_ranks: {group} is no multiple of the {size} ranks: some steps mix batches of different size"))
    return lines
