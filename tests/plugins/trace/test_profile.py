"""Traces of some steps, for Perfetto."""

import gzip
import json
import re
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy
import pytest
from launching import hvdtrain
from trainings import CONFIGS, Run, Trained, trains

from hvdtrain.plugins.trace.profile import PROFILED_AFTER, Profile
from hvdtrain.runtime.timer import Timer

TORCH = Run("torch", "horovod", 2)


@trains(TORCH)
def profiled(run: Run, folder: Path) -> dict[str, dict[str, object]]:
    return {"some": {"profile_steps": 3}}


def events_of(trace: Path) -> tuple[list[dict[str, Any]], Counter[str]]:
    """The events of a trace, and how many there are of each phase of hvdtrain's."""
    with gzip.open(trace, "rt") as file:
        events = json.load(file)["traceEvents"]
    names = [str(event.get("name")) for event in events]
    return events, Counter(name for name in names if name.startswith("hvdtrain: "))


def test_every_rank_writes_a_trace(trained: Trained) -> None:
    made = trained(profiled, TORCH)
    folder = made.models["some"].parent / "profile"
    for rank in range(2):
        events, phases = events_of(folder / f"rank-{rank}-of-2.json.gz")
        assert phases == {"hvdtrain: compute": 3, "hvdtrain: data wait": 3, "hvdtrain: communication": 3}
        assert all(event["dur"] > 0 for event in events if event.get("name") == "hvdtrain: compute")
        assert any("convolution" in str(event.get("name")) for event in events), "PyTorch's operators, too"
        process = next(event["pid"] for event in events if event.get("name") == "hvdtrain: compute")
        names = {event["pid"]: event["args"]["name"] for event in events if event.get("name") == "process_name"}
        assert names[process].startswith(f"rank {rank} of 2: ")
        assert process >> 22 == rank, "opened together, the ranks' processes differ"
    assert f"profile: 3 steps in {folder / 'rank-0-of-2.json.gz'}" in made.out("some")
    assert "grouped_allreduce.gradients" in (folder / "horovod.json").read_text()


@pytest.mark.slow
def test_a_profile_of_tensorflow_with_its_op_determinism(corpus: Path, tmp_path: Path) -> None:
    """Determinism is for the whole process, so this training runs in a separate one. The log has the layers, too."""
    keys = {"profile_steps": 3, "deterministic": True, "log_verbosity": 5, "corpus": corpus, "model": tmp_path / "model"}
    ended = hvdtrain(CONFIGS["tensorflow"], keys)
    assert ended.status == 0, ended.err
    events, phases = events_of(tmp_path / "profile" / "rank-0-of-1.json.gz")
    assert phases == {"hvdtrain: compute": 3, "hvdtrain: data wait": 3}, "it exchanges within its graph"
    assert any("Conv" in str(event.get("name")) for event in events), "TensorFlow's operations, too"
    assert re.search(r"^first +Conv1D +- +104 +yes$", ended.out, re.M), ended.out
    assert "\nmodel: 158 parameters\n" in ended.out
    assert "\n152 of the parameters are trained\n" in ended.out


class Recorder:
    """A profiler that writes down what it is asked."""

    def __init__(self, fails: str = "") -> None:
        self.calls: list[str] = []
        self._fails = fails

    def start(self) -> None:
        self._note("start")

    def stop(self, file: Path) -> None:
        self._note("stop")

    def range(self, name: str) -> Any:
        self._note(name)
        return nullcontext()

    def _note(self, call: str) -> None:
        self.calls.append(call)
        if call == self._fails:
            raise RuntimeError("no profiler here")


def steps(profile: Profile, timer: Timer, count: int) -> None:
    for step in range(count):
        profile(1, step, numpy.zeros(1, int))
        with timer.span("compute"):
            pass


def test_the_first_steps_are_left_out(tmp_path: Path) -> None:
    timer, recorder, timeline = Timer(), Recorder(), list[bool]()
    profile = Profile(recorder, timer, tmp_path / "profile" / "trace.json.gz", 2, timeline.append)
    steps(profile, timer, PROFILED_AFTER)
    assert not recorder.calls
    steps(profile, timer, 4)
    assert recorder.calls == ["start", "hvdtrain: compute", "hvdtrain: compute", "stop"]
    assert timeline == [True, False]
    profile.stop()
    assert recorder.calls.count("stop") == 1
    short = Profile(Recorder(), timer, tmp_path / "trace.json.gz", 2, timeline.append)
    steps(short, timer, PROFILED_AFTER + 1)
    short.stop()
    assert timeline == [True, False] * 2, "a training may end before"


@pytest.mark.parametrize("fails", ["start", "stop"])
def test_a_profiler_that_fails_ends_no_training(tmp_path: Path, fails: str, caplog: pytest.LogCaptureFixture) -> None:
    timer = Timer()
    profile = Profile(Recorder(fails), timer, tmp_path / "trace.json.gz", 1, lambda _: None)
    steps(profile, timer, PROFILED_AFTER + 3)
    assert timer.ranges is None
