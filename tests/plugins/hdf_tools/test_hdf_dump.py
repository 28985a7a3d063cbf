"""tools/hdf_dump.py: any dataset becomes an HDF file."""

import contextlib
import subprocess
import sys
from pathlib import Path

import numpy
import pytest
from launching import ROOT

from hvdtrain.cli import main as hvdtrain
from hvdtrain.config.source import load
from hvdtrain.data.config_datasets import parse
from hvdtrain.data.hdf.dataset import open_hdf
from hvdtrain.data.opening import open_dataset
from hvdtrain.data.plan.order import order
from hvdtrain.plugins.hdf_tools.dump import main
from hvdtrain.plugins.hdf_tools.writer import HDFWriter

SEQUENCES = 12

CONFIG = """
from pathlib import Path
import hvdtrain
folder = Path(__file__).parent
task = "train"
ordering = config.value("ordering", "default")
train = {"class": "HDFDataset", "files": str(folder / "train.hdf"), "seq_ordering": ordering}
dev = lambda: {"class": "HDFDataset", "files": [str(folder / "dev.hdf")]}
eval_datasets = {"other": {"class": "HDFDataset", "files": [str(folder / "train.hdf"), str(folder / "dev.hdf")]}}
"""

CORPUS = """
import numpy

def sequences():
    for number in range(3):
        yield f"wört-{number}", {"data": numpy.arange(number + 1), "classes": numpy.full((2, 2), number, "float32")}

class Corpus:
    labels = {"data": ["a", "b", "ç"]}
    dims = {"classes": 7}

    def __init__(self, part, size=2):
        self.part, self.size = part, size

    def __len__(self):
        return self.size

    def __iter__(self):
        for number in range(self.size):
            yield f"{self.part}-{number}", {"data": numpy.array([number, 2]), "classes": numpy.array([number])}

def nonsense():
    yield "tag and nothing else"

number = 3
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with train.hdf (12 sequences), dev.hdf (3), a config and Python of a user's own."""
    made = tmp_path_factory.mktemp("dump")
    generator = numpy.random.default_rng(0)
    for name, size in (("train", SEQUENCES), ("dev", 3)):
        with HDFWriter(made / f"{name}.hdf", labels={"classes": list("abcde")}) as writer:
            for number in range(size):
                length = int(generator.integers(1, 9))
                frames = generator.normal(size=(length, 2)).astype(numpy.float32)
                writer.add(f"{name}-é{number}", {"data": frames, "classes": generator.integers(0, 5, length, numpy.int32)})
    (made / "config.py").write_text(CONFIG, encoding="utf-8")
    (made / "corpus.py").write_text(CORPUS, encoding="utf-8")
    (made / "items.py").write_text(TRAINABLE, encoding="utf-8")
    return made


def dumped(folder: Path, out: Path, source: str, *options: str) -> list[tuple[str, dict[str, list]]]:
    """The result of the tool for a source, in this process."""
    with contextlib.chdir(folder):
        assert main([source, str(out), *options]) == 0
    return contents(out)


def contents(*paths: Path) -> list[tuple[str, dict[str, list]]]:
    dataset = open_hdf(paths)
    tags = dataset.tags(range(dataset.num_sequences))
    return [(tag, {key: values.tolist() for key, values in dataset.sequence(i).items()}) for i, tag in enumerate(tags)]


def test_train_of_a_config(folder: Path, tmp_path: Path) -> None:
    command = [sys.executable, ROOT / "tools" / "hdf_dump.py", "config.py", tmp_path / "out.hdf"]
    finished = subprocess.run(command, cwd=folder, capture_output=True, encoding="utf-8", timeout=60)
    assert (finished.returncode, finished.stderr) == (0, "")
    assert finished.stdout.startswith(f"{tmp_path / 'out.hdf'}: 12 sequences, ")
    assert contents(tmp_path / "out.hdf") == contents(folder / "train.hdf")
    made, source = open_hdf([tmp_path / "out.hdf"]), open_hdf([folder / "train.hdf"])
    assert made.streams == source.streams  # dtypes, dimensions and labels, too
    assert made.how_read() == "classes, data memory-mapped"


def test_other_datasets_of_a_config(folder: Path, tmp_path: Path) -> None:
    assert dumped(folder, tmp_path / "dev.hdf", "config.py", "--dataset", "dev") == contents(folder / "dev.hdf")
    both = contents(folder / "train.hdf", folder / "dev.hdf")
    assert dumped(folder, tmp_path / "other.hdf", str(folder / "config.py"), "--dataset", "other") == both


def test_overrides_reach_the_config(folder: Path, tmp_path: Path) -> None:
    backwards = contents(folder / "train.hdf")[::-1]
    assert dumped(folder, tmp_path / "seen.hdf", "config.py", "++ordering", "reverse", "--dataset", "train") == backwards
    by_key = ["++train", str(folder / "train.hdf"), "++batching", "reverse"]
    assert dumped(folder, tmp_path / "by_key.hdf", "config.py", *by_key) == backwards
    nested = ["++train.seq_ordering", "reverse", "++train.files", str(folder / "dev.hdf")]
    assert dumped(folder, tmp_path / "nested.hdf", "config.py", *nested) == contents(folder / "dev.hdf")[::-1]


def test_dataset_dict(folder: Path, tmp_path: Path) -> None:
    source = '{"class": "HDFDataset", "files": ["dev.hdf", "train.hdf"], "seq_ordering": "sorted"}'
    made = dumped(folder, tmp_path / "out.hdf", source)
    everything = contents(folder / "dev.hdf", folder / "train.hdf")
    assert made == sorted(everything, key=lambda item: len(item[1]["data"]))


def test_hdf_files(folder: Path, tmp_path: Path) -> None:
    assert dumped(folder, tmp_path / "one.hdf", "dev.hdf") == contents(folder / "dev.hdf")
    both = contents(folder / "dev.hdf", folder / "train.hdf")
    assert dumped(folder, tmp_path / "both.hdf", "dev.hdf,train.hdf") == both


def test_a_dimension_that_is_not_known_stays_so(tmp_path: Path) -> None:
    """Of parts of a corpus with other largest classes; classes beyond a dimension that is known are refused."""
    for name, largest in (("train", 7), ("dev", 4)):
        with HDFWriter(tmp_path / f"{name}.hdf", dims={"data": 1}) as writer:
            writer.add("a", {"data": numpy.array([0, largest], numpy.int32)})
        made = dumped(tmp_path, tmp_path / f"{name}.out.hdf", str(tmp_path / f"{name}.hdf"))
        assert made == [("a", {"data": [0, largest]})]
        assert open_hdf([tmp_path / f"{name}.out.hdf"]).streams["data"].dim == 1


def test_function_of_the_users_own(folder: Path, tmp_path: Path) -> None:
    assert dumped(folder, tmp_path / "out.hdf", "corpus.py:sequences") == [
        ("wört-0", {"data": [0], "classes": [[0, 0], [0, 0]]}),
        ("wört-1", {"data": [0, 1], "classes": [[1, 1], [1, 1]]}),
        ("wört-2", {"data": [0, 1, 2], "classes": [[2, 2], [2, 2]]}),
    ]
    assert open_hdf([tmp_path / "out.hdf"]).streams["data"].dim == 3  # the largest class and one


def test_class_of_the_users_own(folder: Path, tmp_path: Path) -> None:
    made = dumped(folder, tmp_path / "out.hdf", '{"class": "corpus.py:Corpus", "part": "test", "size": 3}')
    assert made == [(f"test-{number}", {"data": [number, 2], "classes": [number]}) for number in range(3)]
    streams = open_hdf([tmp_path / "out.hdf"]).streams
    assert streams["data"].labels == ("a", "b", "ç")
    assert streams["classes"].dim == 7


TRAINABLE = """
import itertools, numpy, torch

train = [(numpy.full((length, 2), length, "float32"), length % 3) for length in range(5, 9)]

def lines(start):
    for length in range(start, 6):
        yield {"data": numpy.arange(length), "classes": length % 3}

def growing(epoch=1):
    return (torch.arange(5) for _ in range(epoch))

class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return lines(3)

class Items(torch.utils.data.Dataset):
    def __len__(self):
        return 3
    def __getitem__(self, index):
        return {"data": torch.full((index + 1,), index), "seq_tag": f"item {index}"}

eval_datasets = {
    "plain": [numpy.arange(length) for length in range(1, 5)],
    "list": {"class": lambda: train, "seq_ordering": "reverse"},
    "generator": {"class": lines, "start": 3, "seq_ordering": "default"},
    "function": growing,
    "stream": Stream(),
    "endless": {"class": "IterableDataset", "iterable": lambda: map(numpy.arange, itertools.count(1)), "epoch_size": 4},
    "items": {"class": Items, "seq_ordering": "sorted_reverse"},
    "array": numpy.zeros((4, 3, 2), "float32"),
    "ordered": {"class": lines, "start": 3, "seq_ordering": "random"},
    "part": {"class": lines, "start": 3, "partition_epoch": 2},
    "batches": torch.utils.data.DataLoader(Items()),
}
"""


@pytest.mark.parametrize("name", "train plain list generator function stream endless items array".split())
def test_what_a_config_trains_on_can_be_dumped(folder: Path, tmp_path: Path, name: str) -> None:
    values = load([folder / "items.py"], {}, {}).values
    spec, _ = parse(name, {**values["eval_datasets"], "train": values["train"]}[name], {})
    assert spec is not None
    trained_on = open_dataset(spec)
    lengths = trained_on.lengths["data"]
    wanted = order(lengths, spec.order, 1)
    made = dumped(folder, tmp_path / "out.hdf", "items.py", "--dataset", name)
    assert made == [
        (tag, {key: values.tolist() for key, values in trained_on.sequence(index).items()})
        for tag, index in zip(trained_on.tags(wanted.tolist()), wanted.tolist(), strict=True)
    ]
    trained_on.close()


def test_an_iterable_is_dumped_as_it_comes_in_any_of_its_epochs(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = dumped(folder, tmp_path / "out.hdf", "items.py", "--dataset", "ordered")
    assert [len(arrays["data"]) for _, arrays in made] == [3, 4, 5]
    assert capsys.readouterr().err == "ordered: written in the order in which generator yields it, without seq_ordering\n"
    assert len(dumped(folder, tmp_path / "2.hdf", "items.py", "--dataset", "function", "--epoch", "2")) == 2


def test_first_and_last_sequence_are_both_included(folder: Path, tmp_path: Path) -> None:
    everything = contents(folder / "train.hdf")
    assert dumped(folder, tmp_path / "some.hdf", "train.hdf", "--start_seq", "2", "--end_seq", "4") == everything[2:5]
    assert dumped(folder, tmp_path / "rest.hdf", "train.hdf", "--start_seq", "9", "--end_seq", "99") == everything[9:]
    assert len(dumped(folder, tmp_path / "own.hdf", "corpus.py:sequences", "--start_seq", "1", "--end_seq", "1")) == 1


def test_epochs_are_the_parts_of_the_data(folder: Path, tmp_path: Path) -> None:
    source = '{"class": "HDFDataset", "files": "train.hdf", "seq_ordering": "random", "partition_epoch": 3}'
    parts = [dumped(folder, tmp_path / f"{epoch}.hdf", source, "--epoch", str(epoch)) for epoch in (1, 2)]
    everything = contents(folder / "train.hdf")
    assert parts == [[everything[i] for i in (2, 3, 4, 10)], [everything[i] for i in (1, 6, 0, 7)]]


def test_help_is_about_sources(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        hvdtrain(["dump", "--help"])
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    assert "SOURCE is one of" in shown
    assert "--end_seq" in shown


def test_existing_files_are_kept_unless_asked(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.hdf"
    first = dumped(folder, out, "dev.hdf")
    capsys.readouterr()
    assert main([str(folder / "train.hdf"), str(out)]) == 2
    message = f"{out}: expected a file that does not exist yet, got an existing one (--overwrite replaces it)\n"
    assert capsys.readouterr() == ("", message)
    assert contents(out) == first
    assert dumped(folder, out, "train.hdf", "--overwrite") == contents(folder / "train.hdf")


MISTAKES = [
    (["none.hdf"], "none.hdf: expected an HDF file, got: no such file"),
    (["corpus.hdf.txt"], "corpus.hdf.txt: expected an HDF file, got: no such file"),
    (["none.py"], "none.py: expected a config file, got: No such file or directory"),
    (["config.py", "--dataset", "test"], "--dataset: expected a dataset of config.py, got 'test'; it has train, dev, other"),
    (["corpus.py"], "got 'train'; it has no datasets (a class or function in it: corpus.py:NAME)"),
    (["config.py", "--dataset", "othr"], "it has train, dev, other (did you mean other?)"),
    (["config.py", "++train.files.x", "1"], "++train.files.x: expected 'files' to be a dict inside 'train', got str"),
    (["config.py", "++ordring", "reverse"], "ordring: unknown key in the command line (did you mean ordering?)"),
    (["dev.hdf", "++ordering", "reverse"], "++ordering: expected a config as SOURCE, which has keys, got dev.hdf"),
    (["config.py", "++train"], "command line: expected a value after ++train, got nothing"),
    (["{'class': 'HDFDataset'"], "dataset dict: expected a Python dict, got \"{'class': 'HDFDataset'\""),
    (["{'class': 'HDFDataset'}"], "train.files: expected a string or a list of strings"),
    (
        ["{'class': 'HDFDataset', 'files': 'dev.hdf', 'fils': 1}"],
        "train.fils: unknown key of HDFDataset (did you mean files?)",
    ),
    (["{'class': 'HDFDataset', 'files': 'dev.hdf', 'seq_ordering': 'x'}"], "train.seq_ordering: expected one of default, "),
    (["{'class': 'SprintDataset'}"], "train.class: expected one of HDFDataset, FilesDataset, "),
    (["{'class': 'corpus.py:Corpus'}"], "missing 1 required positional argument: 'part' (the dict's entries are passed to"),
    (["corpus.py:missing"], "corpus.py:missing: expected a name 'missing' in corpus.py, got none"),
    (["absent.py:sequences"], "no such file absent.py"),
    (["corpus.py:nonsense"], "train, item 0, 'data': expected numbers, got str 'tag and nothing else' (for text, give class"),
    (["items.py", "--dataset", "part"], "part: expected no partition_epoch for generator, which is read from beginning to end"),
    (["items.py", "--dataset", "batches"], "batches: expected arrays to write, got items for a collate function"),
    (["items.py", "--epoch", "2"], "--epoch: expected 1 for list, which has no epochs, got 2"),
    (["dev.hdf", "--start_seq", "3"], "out.hdf: expected at least one sequence to write, got none"),
    (["dev.hdf", "--start_seq", "-1"], "--start_seq: expected 0 or more, got -1"),
    (["dev.hdf", "--start_seq", "2", "--end_seq", "1"], "--end_seq: expected 2 or more, got 1"),
    (["dev.hdf", "--epoch", "0"], "--epoch: expected 1 or more, got 0"),
]


@pytest.mark.parametrize(("arguments", "message"), MISTAKES)
def test_mistakes_end_with_a_message_and_status_2(
    folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    source, *options = arguments
    with contextlib.chdir(folder):
        assert main([source, str(tmp_path / "out.hdf"), *options]) == 2
    shown = capsys.readouterr()
    assert message in shown.err
    assert shown.out == ""
    assert list(tmp_path.iterdir()) == []


def test_several_files_are_joined_by_commas(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with contextlib.chdir(folder), pytest.raises(SystemExit):
        main(["dev.hdf", "train.hdf", "out.hdf"])
    assert capsys.readouterr().err.endswith("unrecognized arguments: out.hdf (several files are written dev.hdf,train.hdf)\n")
    with contextlib.chdir(folder), pytest.raises(SystemExit):
        main(["dev.hdf", "out.hdf", "--dataste", "x"])
    assert capsys.readouterr().err.endswith("unrecognized arguments: --dataste x (did you mean --dataset?)\n")
    with pytest.raises(SystemExit):
        main(["dev.hdf", "out.hdf", "--epoch", "one"])
    assert capsys.readouterr().err.endswith("argument --epoch: invalid int value: 'one'\n")


def test_an_exception_of_the_users_own_is_raised(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("def sequences():\n    yield 1 / 0\n")
    with pytest.raises(ZeroDivisionError) as raised:
        main([f"{tmp_path}/broken.py:sequences", str(tmp_path / "out.hdf")])
    assert str(raised.traceback[-1].path) == f"{tmp_path}/broken.py"
    assert not (tmp_path / "out.hdf").exists()
