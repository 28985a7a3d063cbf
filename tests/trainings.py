"""Trainings that tests look at when they are done: one launch for each framework and number of ranks runs those of all modules.

A process that imports PyTorch or TensorFlow costs seconds, a toy training a fraction of one. So a test module says at its
top what it wants trained, and a test looks at what came out:

    @trains(Run("torch", "horovod", 2))
    def trainings(run: Run, folder: Path) -> dict[str, dict[str, object]]:
        return {"plain": {}, "clipped": {"gradient_clip": 1.0}}

    def test_clipping_changes_the_weights(trained: Trained) -> None:
        results = trained(trainings, Run("torch", "horovod", 2))
        assert not same(results.weights("plain"), results.weights("clipped"))

The first test that asks starts the launch, with the trainings that the collected tests name, in the runs that these name:
`pytest -k` and `pytest -m` train no more than they need. What a test asks for beside that is launched by itself. The
other workers of pytest-xdist wait for it, and look at the same files. What the launch itself does (an exit status, a crash, what
is printed before the ranks are connected) is not for this; see launching.py.
"""

import fcntl
import json
import shutil
import subprocess
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import numpy
import pytest
from launching import TOY, Finished, launch, locked

CONFIGS = {
    "torch": TOY,
    "tensorflow": TOY.with_name("tensorflow_config.py"),
    "tensorflow-net-dict": TOY.with_name("network_config.py"),
}

TRANSPORTS: dict[str, dict[str, object]] = {
    "single": {},
    "horovod": {"use_horovod": True},
    "torch.distributed": {"torch_distributed": {"backend": "gloo"}},
}
"""The keys that choose a transport."""

SPECIAL = ("configs", "saved_as", "once", "timeline", "fails")

TIMEOUT = 1800.0
"""Seconds for all trainings of a launch."""


@dataclass(frozen=True)
class Run:
    """In which framework, over which transport and on how many ranks."""

    framework: str
    transport: str
    size: int

    def __str__(self) -> str:
        return f"{self.framework}-{self.transport}-{self.size}"

    @property
    def alone(self) -> "Run":
        """The same on one rank."""
        return Run(self.framework, "single", 1)


Trainings = Callable[[Run, Path], dict[str, dict[str, object]]]
"""The overrides of the toy config for each training by name, given the folder in which their models stand.

Besides keys: `configs`, others than the toy one; `saved_as`, another training whose model this one continues with; `once`, not
to continue after a stop; `timeline`, a file for Horovod's timeline of this training alone; `fails`, to start again after an
error that is planted on all ranks.
"""


@dataclass(frozen=True)
class Request:
    """What a module wants."""

    name: str
    module: Path
    function: Trainings
    runs: tuple[Run, ...]
    after: Run | None
    apart: bool
    slow: Sequence[Run]
    again: Sequence[Run]


REQUESTS: list[Request] = []


def trains(
    *runs: Run, after: Run | None = None, apart: bool = False, slow: Sequence[Run] = (), again: Sequence[Run] = ()
) -> Callable[[Trainings], Trainings]:
    """Have the trainings that the decorated function returns run in each of these ways.

    Args:
        after: where the trainings continue with what the same module's trainings left in another run: that one comes first.
        apart: are launched separately.
        slow: more runs, where tests of the module marked slow were collected.
        again: more runs, with --soak. Give the tests of both the mark with `marked`.
    """

    def register(function: Trainings) -> Trainings:
        module = Path(function.__globals__["__file__"])
        name = f"{module.stem.removeprefix('test_')}.{function.__name__}"
        REQUESTS.append(Request(name, module, function, runs, after, apart, slow, again))
        return function

    return register


def marked(runs: Sequence[Run], mark: pytest.MarkDecorator = pytest.mark.again) -> list[Any]:
    """Parameters of tests with a mark: `again` for runs that prove again what others prove, or `slow`."""
    return [pytest.param(run, marks=mark) for run in runs]


@dataclass(frozen=True)
class Results:
    """What the trainings of one module left, in one run.

    Attributes:
        folder: NAME/model..., NAME/scores.jsonl, NAME.rank-RANK.npz, NAME.out-RANK.
        models: the key `model` of each training.
        error: what the launch had to say, if it failed.
    """

    folder: Path
    run: Run
    models: dict[str, Path]
    error: str | None

    @property
    def names(self) -> list[str]:
        """The trainings."""
        return list(self.models)

    def weights(self, name: str, rank: int = 0) -> dict[str, numpy.ndarray]:
        """A rank's parameters and buffers at the end."""
        with numpy.load(self.needed(f"{name}.rank-{rank}.npz")) as stored:
            return dict(stored)

    def reports(self, name: str) -> list[dict[str, Any]]:
        """The lines of scores.jsonl."""
        self.needed(f"{name}.out-0")
        return [json.loads(line) for line in self.models[name].with_name("scores.jsonl").read_text().splitlines()]

    def scores(self, name: str) -> list[dict[str, float]]:
        """The scores of every epoch."""
        return [report["scores"] for report in self.reports(name)]

    def evaluations(self, name: str) -> list[dict[str, Any]]:
        """The lines of evaluations.jsonl, but for what takes how long."""
        self.needed(f"{name}.out-0")
        lines = self.models[name].with_name("evaluations.jsonl").read_text().splitlines()
        return [{key: value for key, value in json.loads(line).items() if key not in ("elapsed", "seconds")} for line in lines]

    def trained_on(self, name: str) -> Counter[tuple[int, int]]:
        """How often each sequence was trained on in each epoch, over all ranks, if the training has `record`."""
        lines = [line for rank in range(self.run.size) for line in self.needed(f"{name}.ids.{rank}").read_text().splitlines()]
        return Counter((int(line.split()[0]), int(line.split()[1])) for line in lines)

    def out(self, name: str, rank: int = 0) -> str:
        """What a rank printed."""
        return self.needed(f"{name}.out-{rank}").read_text()

    def needed(self, file: str) -> Path:
        """A file that a training left, unless the launch failed before."""
        path = self.folder / file
        assert path.exists(), f"{self.run}: {file} is missing; the launch says: {self.error}"
        return path


def model_of(folder: Path, name: str, given: dict[str, object]) -> Path:
    """The key `model` of a training."""
    return Path(str(given.get("model", folder / str(given.get("saved_as", name)) / "model")))


def named_by(item: pytest.Function) -> tuple[set[Trainings], set[Run]]:
    """The trainings and the runs that a test names: in its parameters, and as variables of its module in its code and in that of
    the fixtures and functions of the module that it uses.
    """
    if "trained" not in item.fixturenames:
        return set(), set()
    trainings: set[Trainings] = {item.module.trainings} if "results" in item.fixturenames else set()
    runs: set[Run] = set()
    registered = {request.function for request in REQUESTS}
    fixtures = [one.func for several in item._fixtureinfo.name2fixturedefs.values() for one in several]
    values: list[Any] = [item.function, *fixtures, *getattr(getattr(item, "callspec", None), "params", {}).values()]
    seen: list[Any] = []
    is_alone = False
    while values:
        value = values.pop()
        if any(value is one for one in seen):
            continue
        seen.append(value)
        if isinstance(value, Run):
            runs.add(value)
        elif isinstance(value, (tuple, list)):
            values += value
        elif isinstance(value, FunctionType) and value in registered:
            trainings.add(value)
        elif isinstance(value, FunctionType) and value.__module__ == item.module.__name__:
            names = names_in(value.__code__)
            values += [value.__globals__.get(name) for name in names]
            is_alone |= "alone" in names
    return trainings, runs | ({run.alone for run in runs} if is_alone else set())


def names_in(code: CodeType) -> set[str]:
    """The global names in a function's code, and in that of functions inside of it."""
    inner = (names_in(constant) for constant in code.co_consts if isinstance(constant, CodeType))
    return set(code.co_names).union(*inner)


ResultsOf = Callable[[Run], Results]


class Trained:
    """Launches what is asked for, once. Use it as the fixture `trained`.

    Args:
        folder: which all workers share.
        modules: whose tests were collected.
        slow: those of them with tests marked slow.
        named: what each test names.
    """

    def __init__(
        self,
        corpus: Path,
        folder: Path,
        modules: set[Path],
        slow: set[Path],
        named: Sequence[tuple[set[Trainings], set[Run]]],
        soak: bool,
    ) -> None:
        self._corpus = corpus
        self._folder = folder
        wanted = [request for request in REQUESTS if request.module in modules]
        wanted = [replace(one, runs=(*one.runs, *one.slow)) if one.module in slow else one for one in wanted]
        self._requests = [replace(one, runs=(*one.runs, *one.again)) if soak else one for one in wanted]
        self._named = {(function, run) for functions, runs in named for function in functions for run in runs}
        for request in reversed(self._requests):  # what continues comes after what it continues with
            if request.after is not None and any((request.function, run) in self._named for run in request.runs):
                self._named.add((self._before(request).function, request.after))
        self._errors: dict[str, str | None] = {}
        self._begun: set[str] = set()

    def __call__(self, function: Trainings, run: Run) -> Results:
        """The results of a module's trainings in one run."""
        request = next(request for request in self._requests if request.function is function)
        self._launch(run, request)
        folder = self._of(request, run)
        models = {name: model_of(folder, name, given) for name, given in function(run, folder).items()}
        return Results(folder, run, models, self._errors[self._launch_of(request, run)])

    def _launch_of(self, request: Request, run: Run) -> str:
        """The name of the launch to which trainings belong."""
        is_alone = request.apart or (request.function, run) not in self._named
        return f"{run.framework}-{run.size}" + (f"-{request.name}" if is_alone else "")

    def _before(self, request: Request) -> Request:
        """That which has to come before one with `after`."""
        return next(one for one in self._requests if one.module == request.module and request.after in one.runs)

    def _of(self, request: Request, run: Run) -> Path:
        return self._folder / str(run) / request.name

    def _launch(self, run: Run, wanted: Request) -> None:
        """Place everything that belongs into the same launch as what a request wants in a run."""
        name = self._launch_of(wanted, run)
        if name in self._errors:
            return
        assert name not in self._begun, (
            f"a cycle of launches: {name} continues with what another one leaves that continues with it"
        )
        self._begun.add(name)
        folder = self._folder / name
        outcome = folder / "outcome"
        self._folder.mkdir(exist_ok=True)
        with locked(folder.with_name(f"{name}.lock"), fcntl.LOCK_EX):
            if not outcome.exists():
                finished = self._train(run, wanted, folder)
                (folder / "out").write_text(finished.out)
                outcome.write_text(f"status {finished.status}: {_shorten(finished.err)}" if finished.status else "")
        self._errors[name] = outcome.read_text() or None

    def _train(self, run: Run, wanted: Request, folder: Path) -> Finished:
        jobs = []
        for transport in TRANSPORTS:  # connecting the ranks costs time: each transport once
            same = Run(run.framework, transport, run.size)
            for request in self._requests:
                if same in request.runs and self._launch_of(request, same) == folder.name:
                    if request.after is not None:
                        self._launch(request.after, self._before(request))
                    jobs += self._jobs(request, same)
        folder.mkdir(parents=True)
        (folder / "jobs.json").write_text(json.dumps(jobs))
        command = [TOY.with_name("several.py"), folder / "jobs.json"]
        return launch(command, run.size, TIMEOUT, {"HOROVOD_TIMELINE": "DYNAMIC", **take_naps(folder)})

    def _jobs(self, request: Request, run: Run) -> list[dict[str, object]]:
        folder = self._of(request, run)
        folder.mkdir(parents=True)
        jobs = []
        for name, given in request.function(run, folder).items():
            configs: Any = given.get("configs", [CONFIGS[run.framework]])
            own = {"corpus": self._corpus} if CONFIGS[run.framework] in configs else {}
            overrides = {**own, **TRANSPORTS[run.transport], **{key: given[key] for key in given if key not in SPECIAL}}
            overrides["model"] = model_of(folder, name, given)
            if "record" in overrides:
                overrides["record"] = folder / f"{name}.ids"
            texts = {key: str(value) for key, value in overrides.items()}
            job = {"name": name, "folder": str(folder), "configs": list(map(str, configs)), "overrides": texts}
            jobs.append(job | {key: str(given[key]) for key in ("once", "timeline", "fails") if key in given})
        return jobs


def saved_model(model: Path, epoch: int) -> dict[str, numpy.ndarray]:
    """The parameters and buffers in a checkpoint, as any program would read them."""
    [file] = [
        path for suffix in ("pt", "npz", "safetensors") if (path := model.with_name(f"model.{epoch:03d}.{suffix}")).exists()
    ]
    return read_model(file)


def read_model(file: Path) -> dict[str, numpy.ndarray]:
    """The parameters and buffers in a model's file."""
    if file.suffix == ".pt":
        import torch

        return {key: value.numpy() for key, value in torch.load(file, map_location="cpu", weights_only=True)["model"].items()}
    if file.suffix == ".safetensors":
        from safetensors.numpy import load_file

        return load_file(file)
    with numpy.load(file) as stored:
        return {key: stored[key] for key in stored.files if key != "progress"}


def assert_same(one: dict[str, numpy.ndarray], other: dict[str, numpy.ndarray]) -> None:
    """The same arrays, bit for bit."""
    assert one.keys() == other.keys()
    differing = [name for name in one if not numpy.array_equal(one[name], other[name])]
    assert not differing, f"expected the same arrays, got other ones for {differing}"


def assert_alike(one: dict[str, numpy.ndarray], other: dict[str, numpy.ndarray], tolerance: float = 1e-5) -> None:
    """Equal up to a tolerance relative to each array's largest element."""
    assert one.keys() == other.keys()
    for name, array in one.items():
        difference = numpy.abs(array.astype(float) - other[name].astype(float)).max()
        assert difference <= tolerance * numpy.abs(array.astype(float)).max(), name


def take_naps(folder: Path) -> dict[str, str]:
    """What has ranks sleep while they wait, where there is a C compiler: there are fewer cores than workers and ranks."""
    if shutil.which("cc") is None:
        return {}
    library = folder / "naps.so"
    subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-o", library, TOY.with_name("naps.c")], check=True)
    return {"LD_PRELOAD": str(library)}


def _shorten(text: str, most: int = 8000) -> str:
    """The beginning, where the rank that failed first says why, and the end."""
    return text if len(text) <= 2 * most else f"{text[:most]}\n...\n{text[-most:]}"
