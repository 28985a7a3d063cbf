"""The data benchmarks, and that of a GPU, run on tiny data, and print what the documents say they print.

Of the trainers that benchmarks/peers compares, hvdtrain alone. That of balance_ranks runs in tests/data/plan/test_balance.py.
"""

import importlib.util
import runpy
import sys
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import pytest
import tqdm
from inside import nothing_changes
from launching import ROOT, Finished, launch

TINY = {
    "opening": ["--sequences", "1000", "--rounds", "1"],
    "caching": ["--sequences", "40", "--rounds", "1", "--compression", "gzip"],
    "two_readers": ["--sequences", "40", "--rounds", "1", "--seconds", "0.1"],
    "hdf_layouts": ["--sequences", "20", "--seconds", "0.01"],
    "hdf_alignment": ["--sequences", "200", "--rounds", "1"],
    "shards": ["--sequences", "100", "--rounds", "1"],
    "join_by_tag": ["1000"],
    "saving": "--millions 1 --rounds 1".split(),
    "checks": "--sequences 2 --frames 10 --width 4 --rounds 1".split(),
    "planning": ["--sequences", "1000", "--ranks", "1"],
    "long_sequences": ["--sequences", "40", "--rounds", "1"],
    "speech": "--recordings 2 --seconds 1 --rounds 1 --cuts 100".split(),
    "step_log": ["--steps", "10", "--rounds", "1"],
    "attention_cost": "--sequences 40 --longest 60 --batch_size 300 --width 8 --ranks 2".split(),
    "packing/compare": ["--sequences", "32", "--rounds", "1"],
    "everything": ["--steps", "4", "--rounds", "1", "--services", "", "--settle", "0"],
    "short_sequences": ["--sequences", "1000", "--of_returnn", "100", "--rounds", "1"],
    "simulate": "--ranks 16 --steps 3".split(),
    "gpu_loop": "--device cpu --sequences 20 --rounds 0 --layers 1 --width 32".split(),
    "returnn_training": "--models mlp --ranks 1 --rounds 1 --scale 0.15".split(),
    "step_cost": "--only loop hvdtrain --ranks 1 --rounds 1 --steps 20".split(),
    "peers/compare": "--no_actions --only hvdtrain --ranks 1 --rounds 1 --speed_words 80".split(),
}
PRINTED = {
    "opening": "| 1,000 | 2 |",
    "caching": "| gzip | ",
    "two_readers": "reader 1: of the mapped file",
    "hdf_layouts": "| chunks (270, 10) |",
    "hdf_alignment": "| not aligned | ",
    "shards": "| parquet in blocks | ",
    "saving": "| 1 M | ",
    "checks": "| comparing | ",
    "join_by_tag": "a file with random order",
    "planning": "| 1,000 | 1 |",
    "long_sequences": "epoch 3: RETURNN",
    "short_sequences": "| RETURNN, sequences, cached |",
    "everything": "| wall-clock time | ",
    "attention_cost": "idle share of the CPU seconds",
    "packing/compare": "acoustic ",
    "speech": "| 100 cuts, later start |",
    "step_log": "| a bar, and lines every 10 s |",
    "simulate": "| 16 | 1.0 | 0 | ",
    "gpu_loop": "hvdtrain relative to hand-written: ",
    "returnn_training": "mlp, 1 rank: weights at most 0e+00 apart",
    "step_cost": "| 1 rank(s) | CPU us a step |",
    "peers/compare": "| ms, 1 rank | relative to hvdtrain |",
}
AGAIN = ("returnn_training", "packing/compare")
SLOW = ("two_readers", "saving", "long_sequences", "short_sequences", "simulate", "step_cost", "peers/compare")
IN_PROCESSES = ("saving", "long_sequences", "short_sequences", "simulate", "step_cost", "peers/compare", *AGAIN)
"""These set up what a process keeps: TensorFlow, RETURNN, and processes of their own that last."""

NEEDS = {
    "speech": "lhotse",
    "returnn_training": "returnn",
    "long_sequences": "returnn",
    "short_sequences": "returnn",
    "hdf_layouts": "hdf5plugin",
    "shards": "pyarrow",
}


def marks_of(name: str) -> list[pytest.MarkDecorator]:
    return [pytest.mark.again] * (name in AGAIN) + [pytest.mark.slow] * (name in SLOW)


def run_here(script: str, monkeypatch: pytest.MonkeyPatch, arguments: list[str]) -> Finished:
    """Run a program in this process, which has imported most of what it needs."""
    monkeypatch.setattr(sys, "argv", [script, *arguments])
    monkeypatch.syspath_prepend(Path(script).parent)
    monkeypatch.setattr(tqdm.tqdm, "monitor_interval", 0)  # no thread of its that would stay
    status = None
    with nothing_changes(), redirect_stdout(StringIO()) as out:
        try:
            runpy.run_path(script, run_name="__main__")
        except SystemExit as end:
            status = end.code
    return Finished(int(status or 0), out.getvalue(), "", 0.0)


@pytest.mark.parametrize("name", [pytest.param(name, marks=marks_of(name)) for name in TINY])
def test_a_benchmark_on_tiny_data(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if name in NEEDS and importlib.util.find_spec(NEEDS[name]) is None:
        pytest.skip(f"{NEEDS[name]} is not installed")
    script = str(ROOT / "benchmarks" / f"{name}.py")
    finished = launch([script, *TINY[name]]) if name in IN_PROCESSES else run_here(script, monkeypatch, TINY[name])
    assert finished.status == 0, finished.err
    assert PRINTED[name] in finished.out
