"""A step calls few functions: what does not change from step to step is not computed in each."""

import sys
from itertools import pairwise
from pathlib import Path
from types import FrameType

from inside import run_inside
from launching import TOY

from hvdtrain.engine import Engine

MOST = 245
"""Calls of a step on one rank, with a loss and an error: of functions and of what is built in, but those within PyTorch. There
were 572 before they were counted, then 334 and 231. Seconds would depend on the machine. Who adds to every step may raise it,
and says what for."""


def test_a_step_makes_few_calls(corpus: Path, tmp_path: Path) -> None:
    calls, at_steps = 0, []

    def count(frame: FrameType, event: str, _: object) -> None:
        nonlocal calls
        if event in ("call", "c_call") and "/torch/" not in frame.f_code.co_filename:
            calls += 1
            if event == "call" and frame.f_code is Engine._next_batch.__code__:
                at_steps.append(calls)

    sys.setprofile(count)
    try:
        finished = run_inside([TOY, "++corpus", corpus, "++model", tmp_path / "model", "++log_interval", 100])
    finally:
        sys.setprofile(None)
    assert finished.status == 0, finished.err
    assert len(at_steps) == 20
    # The shortest step: what comes by the clock, on a busy machine in most steps, adds thirty.
    assert min(after - before for before, after in pairwise(at_steps)) <= MOST
