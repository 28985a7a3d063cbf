"""How long `python -m hvdtrain --help` takes, as a multiple of `python -c "import numpy"`: `make help-time`.

The two run in turn, so that a change of the machine's speed meets both; the ratio is the median over the pairs. Processor time
is compared, too: other work on the machine hardly changes it.
"""

import argparse
import os
import subprocess
import sys
import time
from statistics import median

COMMANDS = {"python -m hvdtrain --help": ["-m", "hvdtrain", "--help"], 'python -c "import numpy"': ["-c", "import numpy"]}


def seconds(arguments: list[str]) -> tuple[float, float]:
    """Elapsed time and processor time of a run of Python, in seconds."""
    started = time.perf_counter()
    process = subprocess.Popen([sys.executable, *arguments], stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    elapsed = time.perf_counter() - started
    process.returncode = os.waitstatus_to_exitcode(status)  # or Popen would wait for it again
    if process.returncode:
        sys.exit(f"{' '.join(arguments)}: expected exit status 0, got {process.returncode}")
    return elapsed, usage.ru_utime + usage.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=11, help="runs of each command (default 11)")
    options = parser.parse_args()
    for arguments in COMMANDS.values():
        seconds(arguments)  # compiles what is not compiled yet; not counted
    runs: dict[str, list[tuple[float, float]]] = {name: [] for name in COMMANDS}
    for _ in range(options.pairs):
        for name, arguments in COMMANDS.items():
            runs[name].append(seconds(arguments))
    for name, times in runs.items():
        print(f"{name:28} {median(wall for wall, _ in times):.3f} s, processor {median(cpu for _, cpu in times):.3f} s")
    pairs = list(zip(*runs.values(), strict=True))
    for number, what in ((0, "time"), (1, "processor time")):
        print(f"{what}: {median(ours[number] / theirs[number] for ours, theirs in pairs):.2f} times import numpy")


if __name__ == "__main__":
    main()
