"""Keys with values that do not belong there: refused with the name of the key, or trained."""

import json
import math
import random
from pathlib import Path

import numpy
import pytest
from forked import run_forked
from fuzzing import cases, generator
from launching import hvdtrain, refused

from hvdtrain.config.keys import Key
from hvdtrain.data.plan.bounds import group_by_cost
from hvdtrain.errors import DataError
from hvdtrain.plugins.chunks.fixed import make_chunks
from hvdtrain.plugins.chunks.keys import ChunkKeys
from hvdtrain.settings import all_keys, read_settings

CONFIG = """
import hvdtrain, numpy, torch
from math import inf, nan

train = dev = [numpy.full((length, 2), length % 3, "float32") for length in range(1, 13)]
max_seqs, num_epochs, num_threads, learning_rate, lengths_dir = 4, 2, 1, 0.1, None

def get_model(**_):
    return torch.nn.Linear(2, 1)

def train_step(*, model, extern_data, **_):
    data = extern_data["data"]
    losses = (model(data.raw_tensor)[data.mask] - 1).square().sum(-1)
    hvdtrain.get_run_ctx().mark_as_loss(losses, "square", use_normalized_loss=True)

"""

APART = {
    *("task", "backend", "model", "device", "torch_compile", "profile_steps", "watchdog_timeout", "num_epochs", "deterministic"),
    *("log", "lengths_dir", "cache_dir", "learning_rate_file", "output_file", "trace_sequences", "horovod_timeline", "load"),
    "search_output_file",
    *("import_model_train_epoch1", "load_epoch", "start_epoch", "use_horovod", "torch_distributed", "ngpu", "overfit_batches"),
    *("use_wandb", "use_mlflow", "use_tensorboard", "tensorboard_histograms", "time_limit", "max_restarts", "min_ngpu"),
    *("horovod_timeline", "startup_callback", "trackers", "track_epoch"),
}
"""Keys that choose another program, write elsewhere, or take long."""

VALUES = [
    *("None", "True", "False", "0", "1", "-1", "2", "0.5", "-0.5", "1e300", "-1e300", "1e-300", "nan", "inf", "-inf", "10**30"),
    *("-10**30", "''", "'0'", "'nan'", "'x'", "'1e3'", "'../x'", "[]", "[1]", "[nan]", "[-1, 'x']", "{}", "{'a': 1}", "{1: nan}"),
    *(
        "{'class': 'x'}",
        "{'class': None}",
        "(1, 2)",
        "b'x'",
        "{1}",
        "lambda: None",
        "lambda **_: nan",
        "lambda **_: -1",
        "object()",
    ),
    *("numpy.float32(0.25)", "numpy.int64(3)", "numpy.array([1.0])", "numpy.nan", "Ellipsis", "range(3)"),
]

NUMBERS = ["0", "1", "2", "-1", "0.5", "1.5", "nan", "inf", "1e300", "10**30", "True", "None", "'1'", "[]", "1e-9"]


def schedule(numbers: random.Random) -> str:
    names = [
        "num_warmup_steps",
        "num_warmup_epochs",
        "initial",
        "final",
        "num_steps",
        "num_epochs",
        "peak",
        "power",
        "decay",
        "x",
    ]
    entries = {"class": repr(numbers.choice(["linear", "cosine", "constant", "inverse_square_root", "one_cycle", "x"]))}
    entries |= {name: numbers.choice(NUMBERS) for name in numbers.sample(names, numbers.randrange(4))}
    return "{" + ", ".join(f"{name!r}: {value}" for name, value in entries.items()) + "}"


def rates(numbers: random.Random) -> str:
    some = [numbers.choice(NUMBERS) for _ in range(numbers.randrange(1, 4))]
    return (
        f"[{', '.join(some)}]"
        if numbers.random() < 0.5
        else "{" + ", ".join(f"{numbers.choice(NUMBERS[:-2])}: {one}" for one in some) + "}"
    )


def optimizer(numbers: random.Random) -> str:
    options = ["betas", "eps", "weight_decay", "momentum", "amsgrad", "foreach", "nesterov", "lambd", "lr", "x"]
    entries = {"class": repr(numbers.choice(["adam", "adamw", "sgd", "RMSprop", "x", "torch.nn.Linear"]))}
    entries |= {name: numbers.choice([*NUMBERS, "(0.9, 2.0)"]) for name in numbers.sample(options, numbers.randrange(3))}
    return "{" + ", ".join(f"{name!r}: {value}" for name, value in entries.items()) + "}"


MADE = {"learning_rate_schedule": schedule, "learning_rates": rates, "optimizer": optimizer}


def drawn(keys: list[Key], numbers: random.Random) -> tuple[str, str]:
    """A key and a value for it, as Python."""
    if numbers.random() < 0.3:
        name = numbers.choice(list(MADE))
        return name, MADE[name](numbers)
    return numbers.choice(keys).name, numbers.choice(VALUES)


@pytest.mark.fuzz
def test_random_values_are_refused_by_the_name_of_their_key_or_trained(tmp_path: Path) -> None:
    (tmp_path / "config.py").write_text(CONFIG)
    assert hvdtrain(tmp_path / "config.py", {"model": tmp_path / "first" / "model"}).status == 0  # imports what all children need
    keys = [key for key in all_keys() if key.name not in APART and "." not in key.name]
    assert len(keys) > 80
    for number in range(cases(30)):
        numbers = generator("values of keys", number)
        name, value = drawn(keys, numbers)
        config = tmp_path / f"{number}.py"
        config.write_text(f"{CONFIG}{name} = {value}\n")
        finished = run_forked([config, "++model", tmp_path / str(number) / "model"], seconds=20)
        label = f"case {number}: {name} = {value}: status {finished.status}"
        if finished.status == 0:
            reports = (tmp_path / str(number) / "scores.jsonl").read_text().splitlines()
            scores = [score for line in reports for score in json.loads(line)["scores"].values()]
            assert len(reports) == 2, label
            assert all(map(math.isfinite, scores)), f"{label}, {scores}"
        else:
            # By its name, or by that of the file that it is; a model may also fail on what is data.
            is_told = name in finished.err or value.strip("'") in finished.err or "in this batch: " in finished.err
            assert is_told or "expected finite losses" in finished.err, f"{label}: {finished.err[-1500:]}"
            assert "Traceback" not in finished.err or "lambda" in value or "in this batch: " in finished.err, (
                f"{label}: {finished.err[-1500:]}"
            )


@pytest.mark.parametrize(
    ("name", "value", "rule"),
    [
        ("context_window", "1e300", "out-of-range"),
        ("context_window", "2**40", "out-of-range"),
        ("context_window", "{'data': 10**30}", "out-of-range"),
        ("context_window", "({'data': 2**40}, {'data': 1})", "out-of-range"),
        ("chunking", "({'data': 2**40}, {'data': 2**40})", "out-of-range"),
        ("max_seqs", "1e300", "out-of-range"),
        ("num_epochs", "10**400", "out-of-range"),
        ("num_threads", "2**40", "out-of-range"),
        ("ngpu", "2**31", "out-of-range"),
        ("learning_rate", "1e300", "out-of-range"),
        ("gradient_clip", "10**400", "out-of-range"),
    ],
)
def test_numbers_beyond_those_of_arrays_are_out_of_range(tmp_path: Path, name: str, value: str, rule: str) -> None:
    """Found by random values as tracebacks of numpy and PyTorch."""
    (tmp_path / "config.py").write_text(f"{CONFIG}{name} = {value}\n")
    with refused(f"{name}: {rule}"):
        read_settings([tmp_path / "config.py"], {"model": str(tmp_path / "model")})


def test_context_that_makes_sequences_too_long_is_named() -> None:
    with pytest.raises(DataError, match=r"context_window: .* 2147483646 of the data key data with sequences of up to 5"):
        make_chunks({"data": numpy.array([3, 5])}, ChunkKeys(context_window=2**31 - 1))


def test_groups_of_more_batches_than_there_are_are_none() -> None:
    found = group_by_cost(numpy.arange(5), 2**62, numpy.random.RandomState(1))
    assert sorted(found) == list(range(5))
