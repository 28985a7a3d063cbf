"""A training that is stopped within epochs ends as if it had not been: the same sequences, scores, and weights bit for bit."""

import json
from collections import Counter
from math import isfinite
from pathlib import Path

import pytest
from hdf_files import frames_of_epochs
from launching import TOY, hvdtrain
from trainings import Run, Trained, Trainings, assert_same, trains

ONE, TWO, TENSORFLOW = Run("torch", "horovod", 1), Run("torch", "horovod", 2), Run("tensorflow", "horovod", 2)

STOPS = {"torch": "SIGTERM,{rank},3,18,24", "tensorflow": "SIGTERM,{rank},18"}
"""A stop comes two steps after its signal: after step 5, after the first batch of an evaluation or all of an epoch, ...; an
epoch has 20 steps, in the last of which only one rank has a batch. TensorFlow, which traces its graphs anew, stops once."""

TRAININGS: dict[str, dict[str, object]] = {
    "gradients": {
        "layers": "statistics",
        "losses": "several",
        "optimizer": {"class": "adam"},
        "gradient_clip_global_norm": 1.0,
        "learning_rate_schedule": {"class": "cosine", "num_warmup_steps": 7, "final": 0.1},
        "evaluated": True,
    },
    "local": {
        "horovod_reduce_type": "param",
        "horovod_param_start": 6,
        "horovod_param_sync_step": 6,
        "horovod_param_sync_delay": 4,
        "horovod_param_sync_parts": 2,
        "horovod_param_outer": {"class": "nesterov", "momentum": 0.5},
        "layers": "statistics",
        "losses": "mean",
        "optimizer": {"class": "adam"},
        "gradient_noise": 0.01,
        "gradient_clip_global_norm": 5.0,
        "evaluated": True,
    },
}
BACKGROUND: dict[str, object] = {
    "save_in_background": True,
    "checkpoint_format": "safetensors",
    "optimizer": {"class": "adam"},
    "layers": "statistics",
    "horovod_dataset_distribution": "random_seed_offset",
    "chunking": {"data": 5, "classes": 5, "id": 1},
    "max_seqs": 16,
    "shuffle_batches": True,
    "save_interval_minutes": 0.0005,
    "learning_rate_control": "newbob",
    "evaluated": True,
    "newbob_relative_error_threshold": -0.5,
}
"""What is no framework's own, all at once."""


SAME = ("scores", "steps", "global_step", "learning_rate", "learning_rates", "epoch_learning_rate", "padding", "syncs", "sent")
"""What a line of scores.jsonl says that does not depend on the time."""

SAME_IN_STEPS = ("epoch", "step", "progress", "learning_rate", "scores", "gradient_norm")
"""The same of steps.jsonl."""


def whole_and_stopped(run: Run, given: dict[str, dict[str, object]]) -> dict[str, dict[str, object]]:
    """Every training twice: in one go, and stopped, by signals to one rank."""
    stops = {"fault": STOPS[run.framework].format(rank=run.size - 1), "save_interval_steps": 8}
    made = {}
    for name, keys in given.items():
        made[f"{name}.whole"] = {"num_epochs": 2, "record": True, **keys}
        made[f"{name}.stopped"] = made[f"{name}.whole"] | stops
    return made


@trains(ONE, TWO)
def trainings(run: Run, folder: Path) -> dict[str, dict[str, object]]:
    return whole_and_stopped(run, TRAININGS if run == TWO else {"gradients": TRAININGS["gradients"]})


@trains(slow=[TWO, TENSORFLOW])
def in_background(run: Run, folder: Path) -> dict[str, dict[str, object]]:
    """With TensorFlow, everything at once; test_update_together.py stops it within an epoch."""
    half = {"mixed_precision": "float16", "grad_scaler": {"init_scale": 64.0}}
    together = TRAININGS["local"] | BACKGROUND | half | {"save_interval_minutes": None}
    return whole_and_stopped(run, {"background": BACKGROUND} if run == TWO else {"local": together})


CASES = [
    pytest.param(trainings, ONE, "gradients", id="one rank"),
    *(pytest.param(trainings, TWO, name, id=name) for name in TRAININGS),
    pytest.param(in_background, TWO, "background", id="background", marks=pytest.mark.slow),
    pytest.param(in_background, TENSORFLOW, "local", id="tensorflow", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("function", "of", "name"), CASES)
def test_weights_scores_sequences_and_files_are_the_same(trained: Trained, function: Trainings, of: Run, name: str) -> None:
    """The weights to the last bit."""
    made = trained(function, of)
    whole, stopped = f"{name}.whole", f"{name}.stopped"
    for rank in range(of.size):
        assert_same(made.weights(whole, rank), made.weights(stopped, rank))
        # in the same order, too
        assert made.needed(f"{whole}.ids.{rank}").read_text() == made.needed(f"{stopped}.ids.{rank}").read_text()
    assert [line["epoch"] for line in made.reports(stopped)] == [1, 2]
    for one, other in zip(made.reports(whole), made.reports(stopped), strict=True):
        assert all(one.get(key) == other.get(key) for key in SAME)
        assert ("learning_rates" in one) == (name == "gradients")
    of_steps = [made.models[one].with_name("steps.jsonl").read_text().splitlines() for one in (whole, stopped)]
    lines = [[json.loads(line) for line in of_one] for of_one in of_steps]
    assert len(lines[0]) == sum(line["steps"] for line in made.reports(whole))
    shared = [[[line[key] for key in SAME_IN_STEPS] for line in of_one] for of_one in lines]
    assert shared[0] == shared[1]
    norms = [line["gradient_norm"] for line in lines[0]]
    assert all(norm is not None for norm in norms) if name != "background" else norms == [None] * len(norms)
    names = [sorted(path.name for path in (made.folder / one).iterdir()) for one in (whole, stopped)]
    assert names[0] == names[1]
    told = [line for line in made.out(stopped).splitlines() if line.startswith("stopped by SIGTERM in epoch")]
    assert len(told) >= (2 if of.framework == "torch" else 1), told
    assert all("status 75" in line for line in told)


CHAIN = [(Run("torch", "horovod", 3), 4), (Run("torch", "horovod", 1), 20), (Run("torch", "horovod", 2), None)]
"""Numbers of ranks, one after the other, and the step in which each is stopped."""


def of_chain(run: Run, folder: Path) -> dict[str, dict[str, object]]:
    number = [link for link, _ in CHAIN].index(run)
    given = {
        "grad": {"layers": "statistics"},
        "param": {
            "horovod_reduce_type": "param",
            "horovod_param_sync_step": 5,
            "horovod_param_sync_delay": 2,
            "horovod_param_outer": {"class": "bmuf", "momentum": 0.3},
            "optimizer": {"class": "adam"},
        },
        "stream": {"configs": [TOY, TOY.with_name("stream.py")], "streamed": "shuffled"},
        "frames": {"configs": [TOY, TOY.with_name("frames.py")], "batch_size": 20, "batch_size_total": None},
    }
    made: dict[str, dict[str, object]] = {}
    for name, overrides in given.items():
        model = folder.parent.parent / f"chain-{name}" / "model"
        made[name] = {"num_epochs": 2, "max_seqs": 4, "evaluated": True, "record": True, "model": model, **overrides}
        if (stop := CHAIN[number][1]) is not None:
            made[name] |= {"fault": f"SIGTERM,0,{stop}", "once": True}
    return made


@trains(slow=[CHAIN[0][0]])
def first_of_chain(run: Run, folder: Path) -> dict[str, dict[str, object]]:
    return of_chain(run, folder)


@trains(slow=[CHAIN[1][0]], after=CHAIN[0][0])
def second_of_chain(run: Run, folder: Path) -> dict[str, dict[str, object]]:
    return of_chain(run, folder)


@trains(slow=[CHAIN[2][0]], after=CHAIN[1][0])
def third_of_chain(run: Run, folder: Path) -> dict[str, dict[str, object]]:
    return of_chain(run, folder)


@pytest.mark.slow
def test_another_number_of_ranks_goes_on_with_the_rest_of_the_epoch(trained: Trained, corpus: Path) -> None:
    """From 3 ranks to 1 in the midst of an epoch, and from there to 2: every sequence is trained on once an epoch."""
    links = []
    for trainings_of_link, (run, stop) in zip((first_of_chain, second_of_chain, third_of_chain), CHAIN, strict=True):
        links.append(trained(trainings_of_link, run))
        for name in links[-1].names if stop is not None else ():
            assert f"stopped by SIGTERM in epoch 1 after step {stop + 2};" in links[-1].out(name)
    for name in links[0].names:
        counted = sum((link.trained_on(name) for link in links), Counter())
        every_sequence = {(epoch, sequence): 1 for epoch in (1, 2) for sequence in range(231)}
        assert counted == (frames_of_epochs(corpus / "train.hdf", 2) if name == "frames" else every_sequence)
        lines = links[-1].reports(name)
        assert [line["epoch"] for line in lines] == [1, 2]
        assert all(isfinite(line["scores"]["train_loss_ce"]) for line in lines)


@trains(ONE, TWO)
def stopped(run: Run, folder: Path) -> dict[str, dict[str, object]]:
    keys = {"max_seqs": 4, "fault": f"SIGUSR1,{run.size - 1},4", "once": True, "record": True}
    return {"stopped": keys | ({"horovod_dataset_distribution": "random_seed_offset"} if run.size == 2 else {})}


def test_what_cannot_go_on_within_an_epoch_says_why(corpus: Path, trained: Trained) -> None:
    one, two = trained(stopped, ONE), trained(stopped, TWO)
    for made in (one, two):
        assert "stopped by SIGUSR1 in epoch 1" in made.out("stopped")
        assert "status 75" in made.out("stopped")
    keys = {"corpus": corpus, "model": two.models["stopped"], "max_seqs": 4}
    alone = hvdtrain(TOY, {**keys, "horovod_dataset_distribution": "random_seed_offset"})
    assert alone.status == 2
    assert "expected the 2 ranks that wrote it in the middle of epoch 1, got 1" in alone.err
    other = hvdtrain(TOY, {**keys, "model": one.models["stopped"], "max_seqs": 5})
    assert other.status == 2
    assert "epoch 1: expected the batches it began with, got others after" in other.err
    assert (
        f"max_seqs per rank: 5, expected 4 (continue with what was expected, or remove {one.models['stopped']}.001.step-"
        in other.err
    )
