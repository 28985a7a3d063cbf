"""Which processes the keys `ngpu` and `dist_rank` ask this one to start, and starting them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from hvdtrain.comm import this_process
from hvdtrain.comm.keys import LaunchKeys
from hvdtrain.comm.launchers import Launcher, Place
from hvdtrain.errors import LaunchError
from hvdtrain.learner.frameworks import FRAMEWORKS
from hvdtrain.plugins.local_ranks.processes import PROGRAM, launch
from hvdtrain.plugins.local_ranks.restarts import Restarts
from hvdtrain.report.ends import LAUNCHER, append_end
from hvdtrain.runtime.goodput import process_began
from hvdtrain.runtime.records import records_of
from hvdtrain.settings import Settings
from hvdtrain.start_up.checkpoints import checkpoint_folder

STARTED_BY = {"slurm": "srun", "mpi": "mpirun"}
"""The launcher for each value of dist_launcher."""

FORKED_PROGRAM = ("-m", "hvdtrain.plugins.local_ranks")
"""As `PROGRAM`, for ranks that may be forked."""

IMPORTS = ("hvdtrain.run", "hvdtrain.tasks.tasks", "hvdtrain.data.hdf.dataset")
"""What ranks import besides their framework, if they are forked."""


def start(settings: Settings, arguments: Sequence[str], folder: str) -> int | None:
    """As `Launcher.start`. Raises: LaunchError."""
    launcher = this_process.launcher()
    processes = places(settings.launch, launcher.place)
    check_restarts(settings.launch, launcher, processes)
    if not processes:
        return None
    of_framework = FRAMEWORKS[settings.run.backend].imports if settings.launch.max_restarts else ()
    rule = restart_rule(settings)
    os.chdir(folder)  # the config may have changed it, and does so in each rank
    return launch(
        processes,
        arguments,
        this_process.environment(),
        rule,
        program=FORKED_PROGRAM if of_framework else PROGRAM,
        began=process_began(),
        imports=(*IMPORTS, *of_framework) if of_framework else (),
    )


def restart_rule(settings: Settings) -> Restarts:
    """The rule by which the processes are restarted."""
    prefix = Path(settings.run.model).absolute()
    checkpoints = checkpoint_folder(replace(settings, run=replace(settings.run, model=str(prefix))))

    def newest() -> Path | None:
        newest = checkpoints.newest()
        return None if newest is None else newest.model_file

    def record(why: str) -> None:
        if settings.run.task == "train" and (folder := records_of(prefix)).is_dir():
            append_end(folder, "failed", why, LAUNCHER)

    return Restarts(settings.launch.max_restarts, settings.launch.min_ngpu, newest, record)


def places(keys: LaunchKeys, place: Place) -> list[Place]:
    """The places of the processes that this one has to start; empty if this process itself is a rank.

    >>> from hvdtrain.comm.keys import LaunchKeys
    >>> [place.rank for place in places(LaunchKeys(ngpu=2, dist_rank=1, dist_world_size=2), Place(None))]
    [2, 3]

    Raises:
        LaunchError: the keys contradict the launcher, or do not determine this process's rank.
    """
    if place.launcher == "hvdtrain":
        return []
    if keys.dist_launcher is not None and place.launcher != STARTED_BY[keys.dist_launcher]:
        raise LaunchError(
            f"dist_launcher: expected processes that {STARTED_BY[keys.dist_launcher]} started for {keys.dist_launcher!r}, got "
            + ("a process without a launcher" if place.launcher is None else f"processes that {place.launcher} started")
        ).on_all_ranks()
    num_local = keys.ngpu or 1
    index, count = _index_and_count(keys, place)
    if num_local > 1 and place.size > 1 and not keys.multiprocessing_distributed:
        raise LaunchError(
            f"ngpu: expected 1 for processes that {place.launcher} started, got {num_local} (to train with these "
            f"{place.size} processes, leave ngpu out; to start {num_local} processes from each, "
            "++multiprocessing_distributed true)"
        ).on_all_ranks()
    if num_local == 1 and (place.launcher is not None or count == 1) and not keys.max_restarts:
        return []
    size = count * num_local
    local_size = place.local_size * num_local
    first = index * num_local
    first_local = place.local_rank * num_local
    return [Place("hvdtrain", first + number, size, first_local + number, local_size) for number in range(num_local)]


def _index_and_count(keys: LaunchKeys, place: Place) -> tuple[int, int]:
    if keys.dist_world_size is None:
        return place.rank, place.size
    if place.launcher is None:
        if keys.dist_rank is None and keys.dist_world_size > 1:
            raise LaunchError(
                f"dist_rank: expected the rank of this process, of dist_world_size = {keys.dist_world_size}, got nothing"
            ).on_all_ranks()
        return keys.dist_rank or 0, keys.dist_world_size
    rank = place.rank if keys.dist_rank is None else keys.dist_rank
    if (rank, keys.dist_world_size) != (place.rank, place.size):
        raise LaunchError(
            f"dist_rank, dist_world_size: expected what {place.launcher} says, {place.rank} of {place.size}, got {rank} of "
            f"{keys.dist_world_size} (leave them out)"
        )
    return place.rank, place.size


def check_restarts(keys: LaunchKeys, launcher: Launcher, processes: list[Place]) -> None:
    """Raise LaunchError if max_restarts is set, but hvdtrain's launcher does not start all processes of the job.

    Args:
        launcher: the launcher of this process.
        processes: those that this process has to start.
    """
    if not keys.max_restarts or launcher.name == "hvdtrain":
        return
    if launcher.name is not None:
        raise LaunchError(
            f"max_restarts: expected processes that hvdtrain starts itself (ngpu), got those of {launcher.name} "
            f"({launcher.max_restarts_hint})"
        ).on_all_ranks()
    if processes and len(processes) != processes[0].size:
        raise LaunchError(
            f"max_restarts: expected all {processes[0].size} processes on this host, got {len(processes)} of them (on "
            "several hosts: torchrun --max-restarts N)"
        ).on_all_ranks()
