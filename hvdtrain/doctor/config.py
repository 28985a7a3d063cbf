"""The config and its data, by the trainer's own checks."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hvdtrain.comm.single import SingleCommunicator
from hvdtrain.data.describe import feed_lines
from hvdtrain.doctor.findings import Finding, ok, problem, warning
from hvdtrain.errors import ConfigError, HvdtrainError
from hvdtrain.feeds import open_feeds
from hvdtrain.hdf_check import check as check_file
from hvdtrain.settings import Settings, read_settings

MOST_FILES = 20
"""So many HDF files are looked into; all are opened."""

PLACES, PIECE = 16, 4096
"""A file's fingerprint is made of so many pieces of so many bytes, spread over it: enough to tell another file, and quick."""


def read_config(paths: list[Path], overrides: dict[str, str]) -> tuple[Settings | None, list[Finding]]:
    """The checked config, or None and its problems."""
    try:
        return read_settings(paths, overrides), [ok("config", ", ".join(map(str, paths)))]
    except ConfigError as error:
        return None, [problem("config", each, "docs/keys.md describes every key") for each in error.problems]


def check_data(settings: Settings, ranks: int) -> list[Finding]:
    """Whether the datasets can be opened, their HDF files are sound and read well, and there is work for every rank."""
    findings = []
    files = hdf_files(settings)
    for path in files[:MOST_FILES]:
        report = check_file(path, seconds=0)
        findings += [problem("data", each, "python -m hvdtrain.hdf_check tells more") for each in report.problems]
        cure = f"python -m hvdtrain.hdf_check {path} --repack OUT, if it is the layout"
        findings += [warning("data", each if str(path) in each else f"{path}: {each}", cure) for each in report.warnings]
    if len(files) > MOST_FILES:
        findings.append(
            ok("data", f"of {len(files)} HDF files, {MOST_FILES} were looked into (python -m hvdtrain.hdf_check: all)")
        )
    if any(finding.level == "problem" for finding in findings):
        return findings
    try:
        feeds = open_feeds(settings, SingleCommunicator())
        for feed in feeds:
            for level, line in feed_lines(feed):
                finding = (
                    ok("data", line) if level > 2 else warning("data", line, "look at batch_size, min_seq_length, max_seq_length")
                )
                findings.append(finding)
        batches = len(feeds[0].plan(1).share(0, 1))
        if batches < ranks:
            text = f"an epoch has {batches} batches for {ranks} ranks: some have nothing to do"
            findings.append(warning("data", text, "smaller max_seqs or batch_size, or fewer ranks"))
        for feed in feeds:
            feed.dataset.close()
    except HvdtrainError as error:
        findings.append(problem("data", str(error), "the trainer would stop with the same words"))
    return findings


def hdf_files(settings: Settings) -> list[Path]:
    """Every HDF file that the config's dataset dicts name, each once, in their order."""
    values = [settings.data.train, settings.data.dev, settings.data.eval, *settings.data.eval_datasets.values()]
    return list(dict.fromkeys(Path(name) for value in values for name in _files(value)))


def _files(value: Any) -> Iterator[str]:
    """The files in a dataset dict, in those inside it, or in a list of names. What a function returns is not asked for."""
    if isinstance(value, str):
        yield from (name.strip() for name in value.split(",") if name.strip().endswith((".hdf", ".h5", ".hdf5")))
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _files(each)
    elif isinstance(value, dict):
        if value.get("class", "HDFDataset") in ("HDFDataset", "FilesDataset"):
            files = value.get("files", [])
            yield from ([files] if isinstance(files, str) else files)
        for inside in ("dataset", "datasets"):
            inner = value.get(inside)
            yield from (_files(list(inner.values())) if inside == "datasets" and isinstance(inner, dict) else _files(inner))


def fingerprints(configs: list[Path], settings: Settings | None) -> dict[str, str]:
    """For every file that all hosts should have alike: its size, and a hash of parts of it."""
    paths = [*configs, *(hdf_files(settings) if settings else [])]
    return {str(path): fingerprint(path) for path in paths}


def fingerprint(path: Path) -> str:
    """A file's size, and a hash of pieces of it from its beginning to its end."""
    try:
        size = path.stat().st_size
        digest = hashlib.sha256()
        with path.open("rb") as file:
            for place in range(PLACES):
                file.seek(max(0, size - PIECE) * place // (PLACES - 1))
                digest.update(file.read(PIECE))
        return f"{size} bytes, {digest.hexdigest()[:8]}"
    except OSError as error:
        return f"not readable: {error.strerror}"
