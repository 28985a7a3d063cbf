"""Runs tests of RETURNN's own test modules for its TensorFlow engine and its updater, with hvdtrain in their place, and with
RETURNN's.

    python returnn_tf_engine.py FOLDER_WITH_THEIR_TESTS RESULTS TEST...

A test makes a config and datasets, gives them to an `Engine`, and asserts what came of it. For each test, one child process has
RETURNN's engine train, forward or search, and another one has hvdtrain do it with the values of that config, on the same
sequences. Tests of the updater get the updater of hvdtrain's networks. RESULTS.TEST.PROGRAM gets what was computed, and the error
if there was one, as a pickle.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import json
import os
import pickle
import re
import signal
import sys
import time
import traceback
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import h5py
import numpy

with contextlib.suppress(ImportError):  # before TensorFlow: see tests/conftest.py
    import triton  # noqa: F401

import returnn.tf.engine
import returnn.tf.updater
import tensorflow as tf
from returnn.datasets.basic import Dataset
from returnn.tf.native_op import OpMaker

from hvdtrain.plugins.forward.task import forward_all
from hvdtrain.plugins.returnn.network.gradients import FeedableUpdater, points_alone
from hvdtrain.plugins.returnn.network.learner import build_learner  # noqa: F401  # the children have it then
from hvdtrain.plugins.returnn.network.objective import objective_of
from hvdtrain.plugins.returnn.networks import our_name
from hvdtrain.plugins.returnn.sizes import size_name
from hvdtrain.run import train
from hvdtrain.settings import read_settings
from hvdtrain.start_up.job import open_session
from hvdtrain.tasks.tasks import evaluate_all

TEXT = "import values_of_their_test\nglobals().update(values_of_their_test.values)\n"
"""A config file with the values of a test."""

DEFAULTS = {"num_threads": 1, "log_verbosity": 3}
"""Keys that do not concern the result."""

PATIENCE = 600.0
"""The seconds that a test may take with one of the programs; RETURNN compiles its native operations at their first use."""


class Results:
    """What a test computed.

    Attributes:
        scores: of every epoch of all trainings, by hvdtrain's names.
        outputs: of every forward, by sequence tag.
        hypotheses: of every search, by sequence tag and layer: each with its score, if there is one.
        variables: of the updater's tests, the values afterwards.
        error: what the test raised; None: nothing.
        line: the line of the source that raised it.
    """

    def __init__(self) -> None:
        self.scores: list[dict[str, float]] = []
        self.outputs: list[dict[str, Any]] = []
        self.hypotheses: list[dict[str, Any]] = []
        self.variables: dict[str, Any] = {}
        self.error: str | None = None
        self.line = ""


def note_arguments() -> None:
    """From now on, every dataset of RETURNN knows the arguments that it was made with."""

    def make(cls: type, *args: Any, **options: Any) -> Any:
        made = object.__new__(cls)
        made.given = args, options
        return made

    Dataset.__new__ = make


OTHER_NUMBERS = ("DummyDataset", "Task12AXDataset")
"""Datasets that hvdtrain has itself, with other numbers."""


def dict_of(dataset: Any) -> dict[str, Any]:
    """The dict with which hvdtrain opens the same dataset."""
    cls, (args, options) = type(dataset), dataset.given
    bound = inspect.signature(cls.__init__).bind(dataset, *args, **options).arguments
    _, *named = bound.items()
    arguments = {name: value for name, value in named if name != "kwargs"} | bound.get("kwargs", {})
    found = {"class": cls.__name__, **arguments}
    return {"class": "ReturnnDataset", "dataset": found} if cls.__name__ in OTHER_NUMBERS else found


def starts_anew(config: Any) -> bool:
    """Whether RETURNN gives a network new weights when it builds it again, even after a training."""
    return bool(config.typed_dict.get("start_epoch") == 1)


class Weights:
    """The checkpoints with the weights that RETURNN did not train and with which it forwarded or searched, in turn."""

    def __init__(self, folder: Path, results: Results) -> None:
        self._folder, self._results = folder / "start", results

    @property
    def prefix(self) -> str:
        """That of the next one; afterwards, that of the last one."""
        count = len(self._results.outputs) + len(self._results.hypotheses)
        saved = [number for number in range(count + 1) if self._place(number).exists()]
        return str(self._place(max(saved, default=count)) / "model.001")

    def save(self, engine: Any) -> None:
        place = self._place(len(self._results.outputs) + len(self._results.hypotheses))
        place.mkdir(parents=True)
        engine.network.save_params_to_file(str(place / "model.001"), session=engine.tf_session)

    def _place(self, number: int) -> Path:
        return self._folder / f"of-{number}"


class Keeping:
    """A forward_callback that keeps the outputs."""

    def __init__(self, found: dict[str, Any], is_search: bool = False) -> None:
        self._found, self._is_search = found, is_search

    def init(self, *, model: Any) -> None:
        pass

    def process_seq(self, *, seq_tag: str, outputs: Any) -> None:
        arrays = {name: numpy.array(output.raw_tensor) for name, output in outputs.items()}
        self._found[seq_tag] = hypotheses_of(arrays) if self._is_search else arrays["output"]

    def finish(self) -> None:
        pass


def hypotheses_of(outputs: Mapping[str, Any]) -> dict[str, list[Any]]:
    """The outputs of a search by layer, in the form of `Results`."""
    found = {}
    for name in {re.sub(r"^beam_scores_|:size1$", "", name) for name in outputs}:
        values, scores, sizes = outputs[name], outputs.get(f"beam_scores_{name}"), outputs.get(size_name(name, 1))
        if scores is None:
            found[name] = [(values.tolist(), None)]
        else:
            ends = [None] * len(values) if sizes is None else sizes.tolist()
            found[name] = [(one[:end].tolist(), score) for one, end, score in zip(values, ends, scores.tolist(), strict=True)]
    return found


class ByHvdtrain:
    """What the tests use of RETURNN's engine, on hvdtrain. Its attributes are those of that engine."""

    def __init__(self, results: Results, folder: Path, weights: Weights, config: Any = None) -> None:
        self._results, self._folder, self._weights = results, folder, weights
        self.config = config
        self._data: dict[str, Any] = {}
        self._learner: Any = None
        self._has_new_weights = False
        self.use_search_flag, self.use_eval_flag, self.use_dynamic_train_flag = False, True, False
        self.start_epoch = 0
        self.dataset_provider = "hvdtrain reads ahead"
        self.learning_rate_control = SimpleNamespace(epoch_data={}, get_epoch_error_dict=self._errors)

    def init_train_from_config(
        self, config: Any = None, train_data: Any = None, dev_data: Any = None, eval_data: Any = None
    ) -> None:
        given = {"train": train_data, "dev": dev_data, "eval": eval_data}
        self._data = {name: dict_of(dataset) for name, dataset in given.items() if dataset is not None}
        self.use_dynamic_train_flag = True
        self._learner = None
        if self.config.value("task", "train") == "eval":
            evaluate_all(self._settings({}))

    def init_network_from_config(self, config: Any = None) -> None:
        self._learner = None
        self._has_new_weights = starts_anew(self.config)

    def train(self) -> None:
        try:
            self._learner = train(self._settings({})).learner
        finally:  # with the epochs before one that is refused
            self._read_scores()
        self._has_new_weights = False

    def _read_scores(self) -> None:
        path = self._folder / "scores.jsonl"
        records = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        self._results.scores += [record["scores"] for record in records]
        names = {record["epoch"]: {_their_name(name): score for name, score in record["scores"].items()} for record in records}
        self.learning_rate_control.epoch_data = {epoch: SimpleNamespace(error=scores) for epoch, scores in names.items()}

    def forward_to_hdf(self, data: Any, output_file: str, batch_size: int = 0) -> None:
        self._forward(data, {"batch_size": batch_size, "output_file": output_file})

    def forward_single(self, dataset: Any, seq_idx: int) -> Any:
        return list(self._forward(dataset, {}).values())[seq_idx]

    def search(
        self, dataset: Any, do_eval: bool = True, output_layer_names: Any = "output", output_file: str | None = None, **_: Any
    ) -> None:
        if not self.use_search_flag or self.use_dynamic_train_flag:
            self.use_search_flag, self.use_dynamic_train_flag = True, False
            self.init_network_from_config(self.config)
        found: dict[str, Any] = {}
        callback = Keeping(found, is_search=True)
        written = {"search_output_file": output_file, "search_output_file_format": "py"}
        keys = {
            "search_output_layer": output_layer_names,
            "search_do_eval": do_eval,
            "forward_callback": callback,
        }
        forward_all(self._settings({"task": "search", "search_data": dict_of(dataset), **keys, **written, **self._loaded()}))
        self._results.hypotheses.append(found)

    def finalize(self) -> None:
        """Nothing: hvdtrain closes what it opens."""

    @property
    def network(self) -> Any:
        """RETURNN's network, as hvdtrain builds it."""
        return self._opened().model

    @property
    def tf_session(self) -> Any:
        return self._opened()._graph.session

    def _opened(self) -> Any:
        if self._learner is None:
            unread = {
                "task": "search",
                "search_data": {"class": "Task12AXDataset", "num_seqs": 1},
            }  # the purpose "load" opens no data
            more = {**unread, **self._loaded()} if self.use_search_flag else {}
            with open_session(self._settings(more), "load" if self.use_search_flag else "train") as session:
                self._learner = session.learner
        return self._learner

    def _forward(self, dataset: Any, keys: dict[str, Any]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        data = {"task": "forward", "forward_data": dict_of(dataset), "forward_callback": Keeping(found)}
        forward_all(self._settings({**data, **keys, **self._loaded()}))
        self._results.outputs.append(found)
        return found

    def _loaded(self) -> dict[str, str]:
        """Where to start from, unless a training gave the weights."""
        is_trained = bool(self._results.scores) and not self._has_new_weights
        return {} if is_trained or "load_epoch" in self.config.typed_dict else {"load": self._weights.prefix}

    def _settings(self, more: dict[str, Any]) -> Any:
        module = ModuleType("values_of_their_test")
        given = {name: value for name, value in self.config.typed_dict.items() if not name.startswith("_")}
        prefix = Path(given.get("model") or self._folder / "model")
        self._folder = prefix.parent
        module.values = {**DEFAULTS, **given, **self._data, **more, "model": str(prefix)}  # type: ignore[attr-defined]
        sys.modules[module.__name__] = module
        path = self._folder / "their.config"
        path.write_text(TEXT)
        return read_settings([path], {})

    def _errors(self, epoch: int) -> dict[str, float]:
        return dict(self.learning_rate_control.epoch_data[epoch].error)


def engine_of_returnn(results: Results, folder: Path, weights: Weights) -> type:
    """RETURNN's engine, which leaves what it computes in the results."""

    class ByReturnn(returnn.tf.engine.Engine):  # type: ignore[misc]
        has_trained = False

        def init_network_from_config(self, config: Any = None, **options: Any) -> None:
            super().init_network_from_config(config, **options)
            if starts_anew(self.config):
                self.has_trained = False

        def train(self) -> None:
            super().train()
            self.has_trained = True
            records = sorted(self.learning_rate_control.epoch_data.items())
            for _, record in records:
                errors = {key: float(value) for key, value in record.error.items() if not key.startswith(":meta:")}
                results.scores.append({our_name(name): value for name, value in errors.items()})

        def forward_to_hdf(self, data: Any, output_file: str, **options: Any) -> None:
            self._keep_weights()
            super().forward_to_hdf(data, output_file, **options)
            results.outputs.append(read_hdf(output_file))

        def forward_single(self, dataset: Any, seq_idx: int, output_layer_name: str | None = None) -> Any:
            self._keep_weights()
            found = super().forward_single(dataset, seq_idx, output_layer_name)
            results.outputs.append({str(dataset.get_tag(seq_idx)): found})
            return found

        def search(self, dataset: Any, **options: Any) -> None:
            if not self.use_search_flag or self.use_dynamic_train_flag:
                self.use_search_flag, self.use_dynamic_train_flag = True, False
                self.init_network_from_config(self.config)
            self._keep_weights()
            found: dict[str, Any] = {}
            real = returnn.tf.engine.Runner
            returnn.tf.engine.Runner = partial(keeping_runner, real, found)
            try:
                super().search(dataset, **options)
            finally:
                returnn.tf.engine.Runner = real
            results.hypotheses.append(found)

        def _keep_weights(self) -> None:
            if not self.has_trained and "load_epoch" not in self.config.typed_dict:
                weights.save(self)

    return ByReturnn


def read_hdf(path: str) -> dict[str, Any]:
    """The sequences in an HDF file of RETURNN by their tags."""
    with h5py.File(path) as file:
        lengths = file["seqLengths"][:, 0]
        tags = [tag.decode() if isinstance(tag, bytes) else str(tag) for tag in file["seqTags"]]
        parts = numpy.split(file["inputs"][:], numpy.cumsum(lengths)[:-1])
    return dict(zip(tags, parts, strict=True))


def keeping_runner(runner: type, found: dict[str, Any], *, extra_fetches_callback: Any, **options: Any) -> Any:
    """A Runner of RETURNN for a search, which keeps what it hands on."""

    def keep(seq_tag: list[str], **fetched: Any) -> None:
        for name, values in fetched.items():
            if not name.startswith("output_"):
                continue
            layer = name.removeprefix("output_")
            scores = fetched[f"beam_scores_{layer}"]
            beam = len(values) // len(seq_tag)
            for number, tag in enumerate(seq_tag):
                own = [None] if scores is None else scores[number].tolist()
                texts = [numpy.asarray(one).tolist() for one in values[number * beam : (number + 1) * beam]]
                found.setdefault(tag, {})[layer] = list(zip(texts, own, strict=True))
        extra_fetches_callback(seq_tag=seq_tag, **fetched)

    return runner(extra_fetches_callback=keep, **options)


def _their_name(score: str) -> str:
    """The name of a score in RETURNN."""
    return re.sub(r"_loss_(score|error)", r"_\1", score)


def updater_of_hvdtrain(config: Any, network: Any, **options: Any) -> FeedableUpdater:
    """The updater of hvdtrain's networks on one rank."""
    objective = partial(objective_of, network)
    return FeedableUpdater(
        lambda compute, variables: points_alone(objective(), compute, variables), config=config, network=network, **options
    )


def keeping_variables(results: Results) -> Any:
    """In place of `make_scope` of the updater's tests."""

    @contextlib.contextmanager
    def make_scope() -> Iterator[Any]:
        with tf.Graph().as_default() as graph, tf.compat.v1.Session(graph=graph) as session:
            tf.compat.v1.set_random_seed(1)
            yield session
            found = {variable.name: variable for variable in tf.compat.v1.global_variables()}
            known = {
                name: variable for name, variable in found.items() if session.run(tf.compat.v1.is_variable_initialized(variable))
            }
            results.variables = session.run(known)

    return make_scope


def run(test: str, program: str, folder: Path) -> Results:
    """Run one test in this process."""
    results = Results()
    weights = Weights(folder.parent, results)
    tf.compat.v1.disable_eager_execution()
    name = "test_TFUpdater" if "pdater" in test or "numerics" in test else "test_TFEngine"
    note_arguments()
    module = importlib.import_module(name)
    if hasattr(module, "session"):
        module.session.close()  # an interactive one that no test uses
    if name == "test_TFUpdater":
        module.make_scope = keeping_variables(results)
        if program == "hvdtrain":
            module.Updater = updater_of_hvdtrain
    else:
        module.Engine = engine_of_returnn(results, folder, weights)
        if program == "hvdtrain":
            module.Engine = returnn.tf.engine.Engine = partial(ByHvdtrain, results, folder, weights)
    try:
        getattr(module, test)()
    except BaseException as error:  # an assert of the test, too
        traceback.print_exc()
        results.error = f"{type(error).__name__}: {error}"
        results.line = traceback.extract_tb(error.__traceback__)[-1].line or ""
    return results


def wait(child: int) -> int:
    """The status of a child process, which is ended with its own children where it takes too long."""
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        found, status = os.waitpid(child, os.WNOHANG)
        if found:
            return status
        time.sleep(0.02)
    os.killpg(child, signal.SIGKILL)
    return os.waitpid(child, 0)[1]


def main() -> None:
    tests, made, *names = sys.argv[1:]
    sys.path.insert(0, tests)
    OpMaker.with_cuda = False
    for test in names:
        for program in ("returnn", "hvdtrain"):
            folder = Path(f"{made}.{test}.folder") / program
            folder.mkdir(parents=True)
            child = os.fork()
            if child == 0:
                os.setsid()
                os.chdir(folder)
                out = os.open(folder / "out", os.O_CREAT | os.O_WRONLY)
                os.dup2(out, 1)
                os.dup2(out, 2)
                results = run(test, program, folder)
                Path(f"{made}.{test}.{program}").write_bytes(pickle.dumps(results.__dict__))
                sys.stdout.flush()
                os._exit(0)
            begun = time.monotonic()
            status = wait(child)
            print(f"{test}, {program}: {time.monotonic() - begun:.1f} s{f', status {status}' if status else ''}", flush=True)


if __name__ == "__main__":
    main()
