"""GPUs and their driver."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hvdtrain.doctor.findings import Finding, ok, problem, warning
from hvdtrain.doctor.programs import output

QUERY = [
    "nvidia-smi",
    "--query-gpu=index,name,driver_version,memory.total,memory.used,compute_mode",
    "--format=csv,noheader,nounits",
]


@dataclass(frozen=True)
class Gpu:
    """A line of nvidia-smi. Memory is in MB."""

    index: int
    name: str
    driver: str
    total: int
    used: int
    mode: str


def parse_gpus(text: str) -> list[Gpu]:
    """The answer to QUERY.

    >>> parse_gpus("0, NVIDIA H100, 535.54, 81559, 3, Default")
    [Gpu(index=0, name='NVIDIA H100', driver='535.54', total=81559, used=3, mode='Default')]
    """
    rows = [[part.strip() for part in line.split(",")] for line in text.splitlines()]
    return [
        Gpu(int(row[0]), row[1], row[2], _number(row[3]), _number(row[4]), row[5])
        for row in rows
        if len(row) == 6 and row[0].isdigit()
    ]


def check_gpus(environ: Mapping[str, str], ranks: int) -> tuple[list[Gpu], list[Finding]]:
    """The GPUs that the driver shows, and what is wrong with them.

    Args:
        ranks: of this host.
    """
    if not shutil.which("nvidia-smi"):
        if Path("/proc/driver/nvidia").exists():
            return [], [warning("GPU", "the driver is loaded, but nvidia-smi is not in PATH", "install the driver's utilities")]
        return [], [ok("GPU", "none: training runs on the CPU")]
    status, said = output(QUERY, seconds=30)
    if status != 0:
        return [], [
            problem(
                "GPU", f"nvidia-smi answers: {said.splitlines()[0] if said else 'nothing'}", "install the driver anew, or reboot"
            )
        ]
    gpus = parse_gpus(said)
    names = ", ".join(f"{sum(gpu.name == name for gpu in gpus)} x {name}" for name in dict.fromkeys(gpu.name for gpu in gpus))
    findings = [ok("GPU", f"{names}, driver {gpus[0].driver}" if gpus else "none")]
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    count = len(gpus) if visible is None else len([part for part in visible.split(",") if part.strip() not in ("", "-1")])
    if gpus and not count:
        findings.append(warning("GPU", "CUDA_VISIBLE_DEVICES hides all of them", "unset CUDA_VISIBLE_DEVICES"))
    elif ranks > count > 0:
        text = f"{ranks} ranks on this host share {count} GPU{'s' if count > 1 else ''}; NCCL refuses that"
        findings.append(problem("GPU", text, f"start {count} ranks on this host"))
    for gpu in gpus:
        if gpu.used > gpu.total // 2:
            text = f"GPU {gpu.index}: {gpu.used} of {gpu.total} MB are in use by others"
            findings.append(warning("GPU", text, "nvidia-smi shows by whom; choose others with CUDA_VISIBLE_DEVICES"))
        if gpu.mode == "Prohibited":
            findings.append(
                problem("GPU", f"GPU {gpu.index} is in compute mode Prohibited", f"nvidia-smi -i {gpu.index} -c DEFAULT")
            )
    return gpus, findings


def _number(text: str) -> int:
    return int(text) if text.isdigit() else 0
