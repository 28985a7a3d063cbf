#!/usr/bin/env python3
"""The speed of training without padding (`packed`), relative to padded batches of the same sequences.

The numbers are real frames per CPU second, in the last epoch, of complete trainings on one core.
"""

import argparse
import json
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

CONFIG = Path(__file__).with_name("config.py")


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sequences", type=int, default=320, help="sequences of an epoch (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="how often each is measured (%(default)s)")
    parser.add_argument("--models", nargs="+", default=["perceptron", "acoustic"], help="which ones (default: both)")
    parser.add_argument("--spread", type=float, default=0.22, help="deviation of the logarithms of the lengths (%(default)s)")
    options = parser.parse_args()

    print(f"{'model':<12} {'padding':>8} {'padded frames/s':>16} {'packed frames/s':>16} {'ratio':>6}")
    for model in options.models:
        rates: dict[bool, list[float]] = {False: [], True: []}
        for _ in range(options.rounds):
            for packed, measured in rates.items():
                rate, padding = train(model, packed, options.sequences, options.spread)
                measured.append(rate)
                share = share if packed else padding  # noqa: F821  it was bound in the round before
        ratio = statistics.median(packed / padded for padded, packed in zip(*rates.values(), strict=True))
        padded, packed = (statistics.median(measured) for measured in rates.values())
        print(f"{model:<12} {share:>8} {padded:>16,.0f} {packed:>16,.0f} {ratio:>6.2f}")
    return 0


def train(model: str, packed: bool, sequences: int, spread: float) -> tuple[float, str]:
    """Real frames per CPU second, and the share of padding, as the log says."""
    with tempfile.TemporaryDirectory() as folder:
        keys = {
            "of": model,
            "packed": packed,
            "sequences": sequences,
            "spread": spread,
            "result": f"{folder}/result",
            "model": f"{folder}/model",
        }
        command = [
            sys.executable,
            "-m",
            "hvdtrain",
            str(CONFIG),
            *(word for name, value in keys.items() for word in (f"++{name}", str(value))),
        ]
        out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        frames, seconds = json.loads(Path(folder, "result").read_text())
    return frames / seconds, re.findall(r"padding: data ([\d.]+%)", out)[-1]


if __name__ == "__main__":
    sys.exit(main())
