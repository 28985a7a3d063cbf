"""The commit of a repository, read from its files: a training must not wait for git at its start."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path


def commit_of(folder: Path) -> str:
    """The commit that is checked out in the repository around a folder; empty if there is none, or if it cannot be read."""
    for parent in (folder, *folder.parents):
        repository = parent / ".git"
        if repository.exists():
            with suppress(OSError, UnicodeDecodeError):
                return _head(_linked(repository))
            return ""
    return ""


def _linked(repository: Path) -> Path:
    """The folder of a repository; in a worktree and in a submodule, .git is a file that names it."""
    if repository.is_dir():
        return repository
    return repository.parent / repository.read_text(encoding="utf-8").strip().removeprefix("gitdir: ")


def _head(repository: Path) -> str:
    head = (repository / "HEAD").read_text(encoding="utf-8").strip()
    if not head.startswith("ref: "):
        return head
    name = head.removeprefix("ref: ")
    common = repository / "commondir"  # a worktree has branches in common with the others
    main = repository / common.read_text(encoding="utf-8").strip() if common.exists() else repository
    if (main / name).exists():
        return (main / name).read_text(encoding="utf-8").strip()
    packed = re.search(rf"^([0-9a-f]+) {re.escape(name)}$", (main / "packed-refs").read_text(encoding="utf-8"), re.MULTILINE)
    return packed[1] if packed is not None else ""
