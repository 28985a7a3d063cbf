"""A record of the sequences that each step trains on, to prove that a stopped training neither loses nor repeats any."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from hvdtrain.comm.base import on_rank_zero, together
from hvdtrain.config.writable import writable
from hvdtrain.data.types import Array
from hvdtrain.plugins.trace import TraceKeys
from hvdtrain.settings import Settings
from hvdtrain.training.session import Session, StepRecorder


@contextmanager
def record_sequences(settings: Settings, session: Session) -> Iterator[StepRecorder | None]:
    """Collective. Record the sequences that each step trains on, if the config asks for it."""
    wanted = settings.of(TraceKeys).trace_sequences
    if wanted is None:
        yield None
        return
    prefix = Path(wanted)
    run = on_rank_zero(session.comm, lambda: num_runs(prefix), name="trace")
    yield together(session.comm, lambda: Trace(prefix, run, session.comm.rank, session.progress.step), name="trace.file")


class Trace:
    """The file of one rank and start: a line of JSON for every step, written before the step.

    Args:
        run: the number of this start, from 0.
        first_step: the number of steps of the training before this start.

    Raises:
        ConfigError: the file is not writable.
    """

    def __init__(self, prefix: Path, run: int, rank: int, first_step: int) -> None:
        path = _path(prefix, run, rank)
        with writable("trace_sequences", path):
            prefix.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("w", encoding="utf-8", buffering=1)
        self._file.write(json.dumps({"first_step": first_step}) + "\n")

    def __call__(self, epoch: int, step: int, indices: Array) -> None:
        self._file.write(json.dumps({"epoch": epoch, "step": step, "indices": indices.tolist()}) + "\n")


def num_runs(prefix: Path) -> int:
    """The number of starts that have files."""
    return 1 + max((run for run, _ in _files(prefix)), default=-1)


def has_begun(prefix: Path, run: int, size: int) -> bool:
    """Whether all ranks have begun a step of this start (from 0) or of a later one."""
    return any(
        all(path.exists() and len(path.read_text(encoding="utf-8").splitlines()) > 1 for path in paths)
        for later in range(run, num_runs(prefix))
        for paths in [[_path(prefix, later, rank) for rank in range(size)]]
    )


def trained_on(prefix: Path) -> dict[int, Counter[int]]:
    """By epoch, how often all starts and ranks together have trained the model on each sequence.

    Steps after the checkpoint from which a later start resumed were lost and do not count.
    """
    lines: dict[int, list[dict[str, object]]] = {}
    first_steps: dict[int, int] = {}
    for run, path in _files(prefix):
        for text in path.read_text(encoding="utf-8").splitlines():
            with suppress(json.JSONDecodeError):  # half a line, if the process was killed
                line = json.loads(text)
                if "first_step" in line:
                    first_steps[run] = line["first_step"]
                else:
                    lines.setdefault(run, []).append(line)
    counted: dict[int, Counter[int]] = {}
    for run, steps in lines.items():
        lost_from = min((step for later, step in first_steps.items() if later > run), default=float("inf"))
        for line in steps:
            if line["step"] < lost_from:  # type: ignore[operator]  # a number
                counted.setdefault(line["epoch"], Counter()).update(line["indices"])  # type: ignore[arg-type, call-overload]
    return counted


def _path(prefix: Path, run: int, rank: int) -> Path:
    return prefix.with_name(f"{prefix.name}.run-{run}.rank-{rank}.jsonl")


def _files(prefix: Path) -> list[tuple[int, Path]]:
    pattern = re.compile(rf"{re.escape(prefix.name)}\.run-(\d+)\.rank-\d+\.jsonl")
    paths = prefix.parent.iterdir() if prefix.parent.is_dir() else []
    return [(int(match[1]), path) for path in paths if (match := pattern.fullmatch(path.name))]
