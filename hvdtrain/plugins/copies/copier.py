"""Copying the data files of a job, on all ranks together, with lines for the log."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from hvdtrain.comm.base import Communicator
from hvdtrain.config.keys import Sections
from hvdtrain.data.files import parse_size, size_text
from hvdtrain.data.remote import Copier, url_problems, without_query
from hvdtrain.errors import Problem, problem
from hvdtrain.plugins.copies import CopyKeys
from hvdtrain.plugins.copies.folder import Copies, CopyFolder, copy_files
from hvdtrain.plugins.copies.heartbeat import run_with_heartbeat
from hvdtrain.runtime import log
from hvdtrain.runtime.watchdog import Watchdog
from hvdtrain.settings import Settings

FEW_HOSTS = 8
"""The most hosts whose copies have a line each."""


def remote_problems(sections: Sections, urls: Mapping[str, Sequence[str]]) -> list[Problem]:
    """Problems with what reading remote data files needs: packages, and a folder for local copies.

    Args:
        urls: of the files, by the config key of their dataset.
    """
    problems = [problem for name, some in urls.items() for problem in url_problems(name, some)]
    keys = sections.get(CopyKeys)
    if urls and keys is not None and keys.cache_dir is None:
        name, some = next(iter(urls.items()))
        problems += problem(
            "missing",
            f"cache_dir: expected a folder on a local disk for copies of the remote files of {name}, such as "
            f"{without_query(some[0])}, got None",
        )
    return problems


def copy_data(
    settings: Settings, files: Sequence[str], comm: Communicator, watchdog: Watchdog, at_the_end: ExitStack
) -> Mapping[str, str]:
    """Collective. Copy data files to a local disk of every host, if the config asks for it.

    Args:
        files: their paths or URLs.

    Returns:
        By path, that of the copy.

    Raises:
        DataError: a file cannot be read, or there is no room for a remote one.
    """
    keys = settings.of(CopyKeys)
    if keys.cache_dir is None:
        return {}
    folder = CopyFolder(Path(keys.cache_dir).expanduser(), parse_size(keys.cache_dir_size))
    last_line = time.monotonic()

    def work(progress: Callable[[int], None]) -> Copies:
        return copy_files(folder, files, progress, comm.local_rank, comm.local_size)

    def report(copied: list[int]) -> None:
        nonlocal last_line
        watchdog.beat("copying the data files")
        if time.monotonic() - last_line >= settings.log.log_interval:
            last_line = time.monotonic()
            log.detail(f"copied {size_text(max(copied))} so far ...")

    log.detail(f"copying the data files to {keys.cache_dir}, where there is no copy yet ...")
    at_the_end.callback(folder.close)
    copies = run_with_heartbeat(comm, work, report, name="copy_data")
    everywhere = comm.gather(replace(copies, places={}), name="copies")  # these may be many
    for level, line in copy_lines(keys.cache_dir, everywhere):
        log.write(level, line)
    return copies.places


CACHE_DIR = Copier(remote_problems, copy_data)


def copy_lines(folder: str, everywhere: Sequence[Copies]) -> list[tuple[int, str]]:
    """Describe the copies of data files, host by host or, on many hosts, all together, and the files that could not be copied.

    Args:
        everywhere: by rank.
    """
    hosts: dict[str, list[Copies]] = {}
    for report in everywhere:
        hosts.setdefault(report.host, []).append(report)
    if len(hosts) > FEW_HOSTS:
        hosts = {f"{len(hosts)} hosts": list(everywhere)}
    lines = []
    for name, ranks in hosts.items():
        num_new = sum(report.num_new for report in ranks)
        new_size = sum(report.new_size for report in ranks)
        seconds = max(report.seconds for report in ranks)
        number, size = max((report.number, report.size) for report in ranks)
        copied = f"{number} files ({size_text(size)}) are read from copies in {folder}"
        now = f", {num_new} copied now ({size_text(new_size)} in {seconds:.1f} s)" if num_new else ", all made before"
        if number:
            lines.append((4, f"{name}: {copied}{now}"))
        not_copied = {path: why for report in ranks for path, why in report.not_copied.items()}
        lines += [(2, f"{name}: not copied, read from its original path: {path}: {why}") for path, why in not_copied.items()]
    return lines
