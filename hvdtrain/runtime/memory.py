"""The free memory of this host."""

from __future__ import annotations

from pathlib import Path


def host_memory() -> int | None:
    """Bytes of free memory on this host, or in the control group of this process if that is less; None: unknown."""
    free_sizes = [_available_memory(Path("/proc/meminfo"))]
    try:
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            number, _, group_path = line.split(":", 2)
            if number == "0":  # version 2; the limit may be set on a parent group
                group = Path("/sys/fs/cgroup") / group_path.strip("/")
                free_sizes += [_memory_left(folder) for folder in (group, *group.parents) if (folder / "memory.max").exists()]
    except (OSError, ValueError):
        pass
    return min((size for size in free_sizes if size is not None), default=None)


def _available_memory(meminfo: Path) -> int | None:
    try:
        lines = dict(line.split(":", 1) for line in meminfo.read_text().splitlines() if ":" in line)
        return int(lines["MemAvailable"].split()[0]) << 10
    except (OSError, KeyError, ValueError):
        return None


def _memory_left(group: Path) -> int | None:
    """The limit of a control group minus the memory that it uses, without the page cache."""
    try:
        limit = int((group / "memory.max").read_text())
        used = int((group / "memory.current").read_text())
        files = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        return max(0, limit - used + int(files.get("file", 0)))
    except (OSError, ValueError):  # "max": no limit
        return None
