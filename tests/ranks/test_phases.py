"""Every phase of a training x every event: the results are those of an undisturbed training, and callbacks find the same.

An epoch has five steps; evaluations within it come after steps 3, 6 and 9.
"""

import json
from itertools import product
from pathlib import Path

import pytest
from launching import TOY
from trainings import Results, Run, Trained, Trainings, assert_same, trains

ONE, TWO = Run("torch", "single", 1), Run("torch", "horovod", 2)

PARAM: dict[str, object] = {"horovod_reduce_type": "param", "horovod_param_sync_step": 2}
WAYS: dict[str, dict[str, object]] = {
    "grad": {"ema_decay": 0.9},
    "param": {"ema_decay": 0.9, **PARAM},
    "grad.plain": {},
    "param.plain": PARAM,
    "modes": {"modes": True},
}
"""How ranks train, with and without averaged weights, and with an optimizer that has others for evaluations."""

PHASES = {
    "start": "train_begin,0",
    "epoch-begins": "epoch_begin,5",
    "train": "train,7",  # it stops after step 9, before an evaluation
    "step-ends": "step_end,7",
    "last-step": "step_end,5",
    "evaluation-within-begins": "evaluation_begin,6",
    "evaluation-within": "evaluate,9",
    "evaluation-within-ends": "evaluation_end,6",
    "evaluation-begins": "evaluation_begin,5",
    "evaluation": "evaluate,5",
    "evaluation-ends": "evaluation_end,5",
    "epoch-ends": "epoch_end,5",
    "save": "save,5",
    "last-evaluation": "evaluate,10",
    "stop": "stop,10",
}
"""Where something happens: what is called, and the number of steps done."""

EVENTS = {
    "signal": {},
    "fail": {},
    "fail.often": {"save_interval_minutes": 1e-9, "eval_interval_minutes": 1e-9},
    "sleep": {},
    "stop": {},
}
"""What happens: a signal to one rank; an error on all, also where checkpoints and evaluations are due all the time; the end of
the time limit; a callback's request."""

Row = tuple[str, str, tuple[str, ...]]
"""A way, an event, and the phases in which it happens, one after the other: each after the training has gone on."""

SIGNALS = (("start", "last-step", "train", "stop"), ("evaluation-begins", "evaluation-ends", "evaluation-within"), ("save",))
FAILURES = ("evaluation", "epoch-ends", "epoch-begins", "evaluation-within-begins", "evaluation-within-ends", "step-ends")
QUICK: list[Row] = [
    *(("grad", "signal", phases) for phases in SIGNALS),
    ("grad", "fail.often", (*FAILURES, "last-evaluation")),
    ("param", "signal", SIGNALS[0][1:3]),
    ("param", "signal", SIGNALS[1]),
]
ALL: list[Row] = [(way, event, (phase,)) for way, phase, event in product(WAYS, PHASES, EVENTS)]


def rows(wanted: list[Row]) -> dict[str, dict[str, object]]:
    common = {"configs": [TOY, TOY.with_name("phases.py")], "layers": "statistics", "evaluated": True, "eval_interval_steps": 3}
    made = {way: {**common, **WAYS[way]} for way, _, _ in wanted}
    for way, event, phases in wanted:
        kind, is_callback = event.split(".")[0], not PHASES[phases[0]].startswith(("train,", "evaluate,"))
        if is_callback or kind != "stop":  # which only callbacks request
            row = {"event": kind, "places": ",".join(PHASES[phase] for phase in phases), "fails": True}
            made[f"{way}.{event}.{'+'.join(phases)}"] = {**common, **WAYS[way], **EVENTS[event], **row}
    return made


@trains(TWO)
def trainings(run: Run, folder: Path) -> dict[str, dict[str, object]]:
    return rows(QUICK)


@trains(again=[ONE, TWO])
def all_trainings(run: Run, folder: Path) -> dict[str, dict[str, object]]:
    of_one = ("grad", "grad.plain", "modes")
    return rows([row for row in ALL if run == TWO or row[0] in of_one])


def seen(made: Results, name: str, rank: int) -> set[tuple[object, ...]]:
    """What callbacks and train_step found, but not where a start begins or ends, or a checkpoint is written."""
    lines = [json.loads(line) for line in made.needed(f"{name}.notes.{rank}").read_text().splitlines()]
    passing = ("train_begin", "epoch_begin", "stop", "save")
    return {tuple(map(str, line)) for line in lines if line[0] not in passing}


AGAIN = [pytest.param(all_trainings, run, marks=pytest.mark.again) for run in (ONE, TWO)]


@pytest.mark.parametrize(("function", "run"), [(trainings, TWO), *AGAIN])
def test_nothing_that_happens_in_any_phase_changes_a_result(trained: Trained, function: Trainings, run: Run) -> None:
    made = trained(function, run)
    for name in made.names:
        way = next(way for way in sorted(WAYS, key=len, reverse=True) if name.startswith(way))
        for rank in range(run.size):
            assert_same(made.weights(way, rank), made.weights(name, rank))
            more = "often" in name  # evaluations
            undisturbed, found = seen(made, way, rank), seen(made, name, rank)
            assert not undisturbed - found, name
            assert more or not found - undisturbed, name
        assert made.scores(way) == made.scores(name)
        assert more or made.evaluations(way) == made.evaluations(name), name
        if name != way:
            phases = name.rsplit(".", 1)[1].split("+")
            happened = len([*made.folder.glob(f"{name}.notes.{run.size - 1}.done*")])
            assert happened == len(phases), f"{name}: not everything happened"
