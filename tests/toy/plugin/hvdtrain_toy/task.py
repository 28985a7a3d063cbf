"""A task: count the sequences and frames of the training data."""

from __future__ import annotations

from hvdtrain.data.opening import open_dataset
from hvdtrain.runtime import log
from hvdtrain.runtime.log import open_log
from hvdtrain.settings import Settings
from hvdtrain.start_up.ranks import open_communicator


def count_frames(settings: Settings) -> None:
    """Print how much there is to train on."""
    with open_communicator(settings) as comm:
        open_log(settings.log, comm.rank, comm.size)
        dataset = open_dataset(settings.train)
        log.result(f"{dataset.num_sequences} sequences with {int(dataset.lengths['data'].sum())} frames")
