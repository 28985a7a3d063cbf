"""Damaged checkpoints: flipped bits, files that do not belong together, entries that cannot be true. Each is refused with the
file's name and with what to continue from; or the result is that of an undisturbed training."""

import errno
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from fuzzing import cases, generator
from launching import TOY, Finished, hvdtrain

from hvdtrain.learner.integrity import damage

KEYS: dict[str, object] = {"part": "two.hdf", "max_seqs": 1, "num_epochs": 2, "log_interval": 60}


@pytest.fixture(scope="module")
def trained(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A training of two epochs, and what follows in epoch 3; the same in a folder with a model in the format safetensors."""
    folder = tmp_path_factory.mktemp("damaged")
    for name, more in FORMATS.items():
        assert hvdtrain(TOY, {**KEYS, **more, "corpus": corpus, "model": folder / name / "model"}).status == 0
        shutil.copytree(folder / name, folder / f"{name}-on")
        ended = go_on(corpus, folder / f"{name}-on", **more)
        assert ended.status == 0, ended.err
    return folder


FORMATS: dict[str, dict[str, object]] = {"pt": {}, "safetensors": {"checkpoint_format": "safetensors"}}


def go_on(corpus: Path, folder: Path, **more: object) -> Finished:
    return hvdtrain(TOY, {**KEYS, **more, "corpus": corpus, "model": folder / "model", "num_epochs": 3})


def weights(folder: Path) -> dict[str, torch.Tensor]:
    if (folder / "model.003.pt").exists():
        return torch.load(folder / "model.003.pt", weights_only=True)["model"]
    from safetensors.torch import load_file

    return load_file(folder / "model.003.safetensors")


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def rewrite(file: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the entries of a file of PyTorch's."""
    stored = torch.load(file, weights_only=True)
    change(stored)
    torch.save(stored, file)


def flip(file: Path, place: int) -> None:
    """Flip one bit."""
    contents = bytearray(file.read_bytes())
    contents[place // 8] ^= 1 << place % 8
    file.write_bytes(contents)


def place_of(file: Path, values: torch.Tensor) -> int:
    """The place of some tensor's first bit in a file."""
    return 8 * file.read_bytes().index(values.numpy().tobytes())


@pytest.mark.parametrize("part", ["model", "optimizer"])
@pytest.mark.parametrize("name", FORMATS)
def test_one_flipped_bit_of_a_tensor(corpus: Path, tmp_path: Path, trained: Path, name: str, part: str) -> None:
    folder = tmp_path / name
    shutil.copytree(trained / name, folder)
    file = folder / (f"model.002.{name}" if part == "model" else "model.002.opt.pt")
    if part == "optimizer":
        state = torch.load(file, weights_only=True)["optimizer"]["state"]
        values = max((one["momentum_buffer"] for one in state.values()), key=torch.Tensor.numel)
    elif name == "pt":
        values = torch.load(file, weights_only=True)["model"]["last.weight"]
    else:
        from safetensors.torch import load_file

        values = load_file(file)["last.weight"]
    flip(file, place_of(file, values) + 3)
    ended = go_on(corpus, folder, **FORMATS[name])
    assert ended.status == 2, ended.out
    assert f"{file}: expected the file as it was written, got other bytes" in ended.err
    remedy = "move model.002.* to another folder, and the same command continues after epoch 1)"
    assert f"({folder / f'model.001.{name}'} is whole: {remedy}" in ended.err
    for one in folder.glob("model.002.*"):
        one.rename(tmp_path / one.name)
    ended = go_on(corpus, folder, **FORMATS[name])
    assert ended.status == 0, "what the message says is true"
    assert same(weights(folder), weights(trained / f"{name}-on"))


def test_an_evaluation_of_a_damaged_model(corpus: Path, tmp_path: Path, trained: Path) -> None:
    shutil.copytree(trained / "pt", tmp_path / "pt")
    file = tmp_path / "pt" / "model.002.pt"
    flip(file, place_of(file, torch.load(file, weights_only=True)["model"]["last.weight"]))
    ended = go_on(corpus, tmp_path / "pt", task="eval", evaluated=True)
    assert (ended.status, ended.err.count(f"{file}: expected the file as it was written")) == (2, 1)


def copied(source: Path, target: Path) -> Path:
    shutil.copyfile(source, target)
    return target


def without_metadata(file: Path) -> Path:
    from safetensors.torch import load_file, save_file

    save_file(load_file(file), file, {"format": "pt"})
    return file


def in_pt(name: str, change: dict[str, Any] | Callable[[dict[str, Any]], object]) -> Callable[[Path], Path]:
    """A file with other entries."""

    def damaged(folder: Path) -> Path:
        rewrite(folder / name, change if callable(change) else lambda stored: stored.update(change))
        return folder / name

    return damaged


MODEL, OPTIMIZER = "model.002.pt", "model.002.opt.pt"


def last_state(stored: dict[str, Any]) -> tuple[dict[int, Any], int, str]:
    """The state of an optimizer, and the number and the name of its last parameter with one."""
    state = stored["optimizer"]["state"]
    return state, max(state), stored["param_names"][max(state)]


def without_a_state(stored: dict[str, Any]) -> None:
    state, number, _ = last_state(stored)
    del state[number]


def with_another_shape(stored: dict[str, Any]) -> None:
    state, number, _ = last_state(stored)
    state[number]["momentum_buffer"] = state[number]["momentum_buffer"][:2]


OF_LAST_BIAS = "of the parameter last.bias as it was saved, of the shape (5,), got "
DAMAGES: dict[str, tuple[Callable[[Path], Path], str]] = {
    "an optimizer of another epoch": (
        lambda folder: copied(folder / "model.001.opt.pt", folder / OPTIMIZER),
        "expected the state that was saved together with model.002.pt (epoch 2, step 4), got that of another checkpoint "
        "(epoch 1, step 2)",
    ),
    "renamed": (
        lambda folder: [copied(folder / f"model.001{end}", folder / f"model.002{end}") for end in (".opt.pt", ".pt")][1],
        "expected the state after epoch 2, as its name says, got that after epoch 1, step 2 (was the file renamed?)",
    ),
    "no metadata": (
        lambda folder: without_metadata(folder / "model.002.safetensors"),
        "expected the position in the training, got a file without epoch and step",
    ),
    "another training": (in_pt(OPTIMIZER, {"save_id": "0123"}), "expected the state that was saved together with model.002.pt"),
    "no optimizer": (in_pt(OPTIMIZER, lambda stored: stored.pop("optimizer")), "got a file without 'optimizer'"),
    "a state too few": (in_pt(OPTIMIZER, without_a_state), f"{OF_LAST_BIAS}a file without it"),
    "a state of another shape": (in_pt(OPTIMIZER, with_another_shape), f"{OF_LAST_BIAS}(2,)"),
    "a list": (in_pt(OPTIMIZER, {"optimizer": [1]}), "as it was saved, of the shape (8, 4, 3), got a file without it"),
    "no step": (in_pt(MODEL, lambda stored: stored.pop("step")), "got a file without step"),
    "text as epoch": (in_pt(MODEL, {"epoch": "two"}), "expected epoch of type int"),
    "a step of type float": (in_pt(MODEL, {"step": 4.5}), "expected step of type int"),
    "a list as history": (in_pt(MODEL, {"history": [1]}), "expected history[0] of type dict, got 1"),
    "a score that is text": (
        in_pt(MODEL, lambda stored: stored["history"][0]["scores"].update(train_loss_ce="x")),
        "expected history[0].scores.train_loss_ce of type float, got 'x'",
    ),
    "an entry of the future": (
        in_pt(MODEL, lambda stored: stored["history"][0].update(colour=1)),
        "got 'colour' (was it written by a later release?)",
    ),
    "data of another type": (
        in_pt(MODEL, lambda stored: stored["data"]["train"][0].update(bounds="x")),
        "expected data.train[0].bounds of type list[int], got 'x'",
    ),
    "a model of another type": (in_pt(MODEL, {"model": 3}), "expected the parameters of this config's model, got others"),
    "keys of another type": (
        in_pt(MODEL, {"keys": {"accumulation.accum_grad_multiple_step": [1]}}),
        "expected keys.accumulation.accum_grad_multiple_step of type str",
    ),
    "a reducer's state of another type": (in_pt(MODEL, {"reducer": [7]}), "expected reducer[0] of type"),
    "no reducer's state": (
        in_pt(MODEL, {"reducer": [{}]}),
        "expected the state of this config's reducer in 'reducer', got another",
    ),
    "more ranks than states": (in_pt(MODEL, {"size": 2}), "expected the reducer's state of 2 ranks, got 1"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_what_does_not_belong_together_or_cannot_be(corpus: Path, tmp_path: Path, trained: Path, name: str) -> None:
    disturb, told = DAMAGES[name]
    kind = "safetensors" if name == "no metadata" else "pt"
    shutil.copytree(trained / kind, tmp_path / kind)
    file = disturb(tmp_path / kind)
    ended = go_on(corpus, tmp_path / kind, **FORMATS[kind])
    assert ended.status == 2, ended.out
    assert told in ended.err
    assert f"{file}: " in ended.err
    assert "Traceback" not in ended.err


def test_positions_within_an_epoch_that_cannot_be(corpus: Path, tmp_path: Path) -> None:
    given = {**KEYS, "corpus": corpus, "num_epochs": 10**6, "max_seqs": 1, "part": "train.hdf", "save_interval": 10**6}
    limit = {"time_limit": "0:01:01", "time_limit_margin": 60}
    first = hvdtrain(TOY, {**given, **limit, "model": tmp_path / "first" / "model"})
    assert first.status == 75, first.err
    [found] = (tmp_path / "first").glob("model.*.step-*.opt.pt")
    file = found.name.replace(".opt", "")
    stored = torch.load(tmp_path / "first" / file, weights_only=True)
    done = stored["step"] - stored["within"]["first_step"]
    for entry, value, told in (
        ("position", 10**6, "expected a position of at most"),
        ("position", done - 1, f"expected within.position of at least {done}"),
        ("first_step", stored["step"] + 1, "expected within.first_step between 0 and step"),
        ("epoch", 0, f"expected within.epoch {stored['epoch']}, as in its entry epoch, got 0"),
        ("scores", {"ce": [1.0]}, "expected within.scores.ce[0] of type"),
    ):
        folder = tmp_path / f"{entry}-{value}"[:20]
        shutil.copytree(tmp_path / "first", folder)
        for one in (file, found.name):
            rewrite(folder / one, lambda stored, entry=entry, value=value: stored["within"].update({entry: value}))  # type: ignore[misc]
        ended = hvdtrain(TOY, {**given, **limit, "model": folder / "model"})
        assert ended.status == 2, ended.out
        assert told in ended.err
        assert f"{folder / file}: " in ended.err


def test_a_file_that_needs_code_is_refused_without_advice_to_run_it(corpus: Path, tmp_path: Path, trained: Path) -> None:
    shutil.copytree(trained / "pt", tmp_path / "pt")
    rewrite(tmp_path / "pt" / MODEL, lambda stored: stored.update(extra=Path("x")))
    ended = go_on(corpus, tmp_path / "pt")
    assert ended.status == 2
    assert (
        f"{tmp_path / 'pt' / MODEL}: expected tensors and plain values, got a file that needs code to be loaded: pathlib"
        in ended.err
    )
    assert "never runs code from a file (and neither should you" in ended.err
    assert "Re-running" not in ended.err
    assert "arbitrary code" not in ended.err


@pytest.mark.parametrize(
    ("error", "where"),
    [
        (RuntimeError("can't start new thread"), "torch.load"),
        (RuntimeError("can't start new thread"), "hvdtrain.learner.integrity.damage"),
        (MemoryError(), "torch.load"),
        (OSError(errno.EMFILE, "Too many open files"), "torch.load"),
        (KeyError("unforeseen, but the checksum is right"), "torch.load"),
    ],
)
def test_an_error_of_this_process_is_no_damage(
    corpus: Path, tmp_path: Path, trained: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, where: str
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise error

    shutil.copytree(trained / "pt", tmp_path / "pt")
    monkeypatch.setattr(where, fails)
    ended = go_on(corpus, tmp_path / "pt")
    assert ended.status == 2
    assert f"{tmp_path / 'pt' / MODEL}: expected to read it, got: {str(error) or 'MemoryError'} (an error of this" in ended.err
    assert "move" not in ended.err


def test_without_an_older_one(corpus: Path, tmp_path: Path, trained: Path) -> None:
    shutil.copytree(trained / "pt", tmp_path / "pt")
    (tmp_path / "pt" / "model.001.opt.pt").unlink()
    (tmp_path / "pt" / OPTIMIZER).write_bytes(b"")
    ended = go_on(corpus, tmp_path / "pt")
    older = tmp_path / "pt" / "model.001.pt"
    assert f"({older} is whole, but has no optimizer: ++start_epoch 2 ++load {older} continues after epoch 1" in ended.err
    assert go_on(corpus, tmp_path / "pt", start_epoch=2, load=older).status == 0
    shutil.rmtree(tmp_path / "pt")
    shutil.copytree(trained / "pt", tmp_path / "pt")
    older.unlink()
    (tmp_path / "pt" / OPTIMIZER).unlink()
    (tmp_path / "pt" / "model.001.opt.pt").unlink()
    (tmp_path / "pt" / OPTIMIZER).write_bytes(b"x")
    ended = go_on(corpus, tmp_path / "pt")
    assert "(no older checkpoint is whole: move model.002.* to another folder, and the same command begins anew)" in ended.err


def test_checkpoints_of_earlier_releases_are_read(corpus: Path, tmp_path: Path, trained: Path) -> None:
    """Without a name that all files share, without what epochs minimized, and safetensors without a checksum."""
    shutil.copytree(trained / "pt", tmp_path / "pt")
    for name in (MODEL, OPTIMIZER):

        def change(stored: dict[str, Any]) -> None:
            del stored["save_id"]
            for record in stored["history"]:
                del record["losses"]

        rewrite(tmp_path / "pt" / name, change)
    ended = go_on(corpus, tmp_path / "pt")
    assert ended.status == 0, ended.err
    assert same(weights(tmp_path / "pt"), weights(trained / "pt-on"))


@pytest.mark.fuzz
@pytest.mark.parametrize("name", FORMATS)
def test_random_damage(corpus: Path, tmp_path: Path, trained: Path, name: str) -> None:
    """Flipped bits, files that are cut off, and bytes that are others, in any file of the newest checkpoint."""
    undisturbed = weights(trained / f"{name}-on")
    for case in range(cases(6)):
        numbers = generator(f"damaged {name}", case)
        folder = tmp_path / f"{case}"
        shutil.copytree(trained / name, folder)
        file = folder / numbers.choice([f"model.002.{name}", OPTIMIZER])
        how = disturbed(file, numbers)
        ended = go_on(corpus, folder, **FORMATS[name])
        told = f"case {case}, {how}: {ended.err}"
        assert ended.status in (0, 2), told
        if ended.status == 0:
            assert same(weights(folder), undisturbed), told
        else:
            assert f"{file}: " in ended.err, told
            assert "Traceback" not in ended.err, told
            assert "is whole" in ended.err, told
        shutil.rmtree(folder)


def disturbed(file: Path, numbers: random.Random) -> str:
    """Damage a file; what was done."""
    contents = bytearray(file.read_bytes())
    kind = numbers.choice(["bits", "bits", "cut", "bytes", "swapped"])
    place = numbers.randrange(len(contents))
    if kind == "bits":
        for _ in range(numbers.choice([1, 1, 8])):
            place = numbers.randrange(len(contents))
            contents[place] ^= 1 << numbers.randrange(8)
    elif kind == "cut":
        del contents[place:]
    elif kind == "bytes":
        length = numbers.choice([1, 64, 4096])
        contents[place : place + length] = numbers.randbytes(length)
    else:
        other = numbers.randrange(len(contents))
        contents[place : place + 8], contents[other : other + 8] = contents[other : other + 8], contents[place : place + 8]
    file.write_bytes(contents)
    return f"{kind} at {place} of {file.name}"


@pytest.mark.fuzz
def test_every_bit_of_a_safetensors_file_counts(tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    from hvdtrain.learner.model_format import atomic_write, header

    numbers = generator("safetensors")
    rows = numpy.frombuffer(numbers.randbytes(300_000), numpy.uint8)
    file = tmp_path / "model.safetensors"
    with atomic_write(file) as unfinished:
        save_file({"a": rows, "b": rows[:5]}, unfinished, header("tf", {"epoch": 1}))
    whole = file.read_bytes()
    assert damage(file) is None
    for _ in range(cases(100)):
        place = numbers.randrange(8 * len(whole))
        file.write_bytes(whole)
        flip(file, place)
        found = damage(file)
        digits = whole.index(b'"hvdtrain_checksum":"')
        if place // 8 in range(8) or place // 8 in range(digits, digits + 31):
            continue  # the length of the header, and what the checksum is found by: the package or we see these in other ways
        assert found is not None, place
    file.write_bytes(whole[: len(whole) // 32768 * 32768 - 65536] + whole[-65536:])
    assert damage(file) is not None
