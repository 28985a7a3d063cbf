"""Where the time of imports goes: `python tools/import_times.py -m hvdtrain CONFIG ++KEY VALUE ...`.

Runs Python with these arguments under `-X importtime`, several times, and prints for every package the seconds that its own files
took to import, in the run where that was least: other work on the machine only adds to it.
"""

import re
import subprocess
import sys
from collections import Counter

GROUPS = {
    "hvdtrain": ("hvdtrain",),
    "PyTorch": ("torch", "torchgen", "functorch"),
    "torch.compile's machinery (torch._dynamo)": ("torch._dynamo", "sympy", "mpmath"),
    "TensorFlow, Keras": ("tensorflow", "keras", "tensorboard"),
    "Horovod": ("horovod", "psutil", "cloudpickle", "yaml"),
    "NumPy": ("numpy",),
}
"""By line of the table: the modules whose imports count there, with all that they import first, unless that has a line too."""

RUNS = 5


def group_of(name: str) -> str | None:
    """The line of a module: that of its longest prefix in the table."""
    prefixes = {prefix: group for group, names in GROUPS.items() for prefix in names}
    matches = [prefix for prefix in prefixes if name == prefix or name.startswith(f"{prefix}.")]
    return prefixes[max(matches, key=len)] if matches else None


def seconds_by_group(log: str) -> Counter[str]:
    """Seconds by line of the table, from what `-X importtime` printed: children first, indented deeper than what imports them."""
    found: Counter[str] = Counter()
    importing: list[tuple[int, str | None]] = []
    for depth, name, own in reversed([(len(m[2]), m[3], int(m[1])) for m in re.finditer(r"(\d+) \|\s+\d+ \|( *)(\S+)", log)]):
        while importing and importing[-1][0] >= depth:
            importing.pop()
        outside = importing[-1][1] if importing else None
        group = group_of(name) or outside
        if outside is not None and "torch._dynamo" in outside and group == "PyTorch":
            group = outside  # parts of PyTorch that only this machinery imports
        importing.append((depth, group))
        found[group or "Python and others"] += own / 1e6
    return found


def main() -> None:
    if sys.argv[1:] in ([], ["-h"], ["--help"]):
        print(__doc__)
        return
    runs = []
    for _ in range(RUNS):
        command = [sys.executable, "-X", "importtime", *sys.argv[1:]]
        finished = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        if finished.returncode:
            sys.exit(f"{' '.join(command)}: expected exit status 0, got {finished.returncode}\n{finished.stderr[-2000:]}")
        runs.append(seconds_by_group(finished.stderr))
    for group in sorted({group for run in runs for group in run}, key=lambda group: -min(run[group] for run in runs)):
        print(f"{min(run[group] for run in runs):6.2f} s  {group}")
    print(f"{min(run.total() for run in runs):6.2f} s  in all")


if __name__ == "__main__":
    main()
