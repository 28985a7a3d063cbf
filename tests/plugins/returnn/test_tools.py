"""The tools that a job manager (i6_core) starts in RETURNN's root, each with the arguments that it passes."""

import ast
import gzip
import importlib.util
import shutil
import sys
import zipfile
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy
import pytest
import torch
from inside import run_inside
from launching import ROOT, clean_environment, finish

from hvdtrain.plugins.hdf_tools.writer import HDFWriter

TOOLS = ROOT / "tools" / "returnn_root" / "tools"


def tool(name: str) -> Any:
    """A tool's module, whose `main(arguments)` returns the exit status."""
    spec = importlib.util.spec_from_file_location(name.replace("-", "_"), TOOLS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module: ModuleType = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look there
    spec.loader.exec_module(module)
    return module


def save(path: Path, step: int, seed: int, **more: object) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    model = {
        "weight": torch.randn(3, 4, generator=generator),
        "half": torch.randn(5, generator=generator).bfloat16(),
        "norm.num_batches_tracked": torch.tensor(step),
    }
    torch.save({"model": model, "epoch": step // 10, "step": step, **more}, path)
    return model


def test_the_average_of_torch_checkpoints(tmp_path: Path) -> None:
    models = [save(tmp_path / f"epoch.{number:03d}.pt", 10 * number, number, progress="own") for number in (2, 3, 1)]
    main = tool("torch_avg_checkpoints").main
    paths = [str(tmp_path / f"epoch.{number:03d}.pt") for number in (2, 3, 1)]
    assert main(["--checkpoints", *paths, "--output_path", str(tmp_path / "average.pt")]) == 0
    average = torch.load(tmp_path / "average.pt", weights_only=True)
    expected = numpy.mean([model["weight"].double().numpy() for model in models], axis=0)
    assert numpy.array_equal(average["model"]["weight"].numpy(), expected.astype("float32"))
    assert average["model"]["half"].dtype == torch.bfloat16
    assert average["model"]["norm.num_batches_tracked"] == 30
    assert {name: value for name, value in average.items() if name != "model"} == {
        "epoch": 3,
        "step": 30,
        "merged_epochs": [2, 3, 1],
        "merged_steps": [20, 30, 10],
    }
    short = ["--checkpoints", "001,002", "--prefix", str(tmp_path / "epoch."), "--postfix", ".pt"]
    assert main([*short, "--output_path", str(tmp_path / "two.pt")]) == 0
    two = torch.load(tmp_path / "two.pt", weights_only=True)["model"]["weight"]
    assert torch.equal(two, ((models[0]["weight"].double() + models[2]["weight"].double()) / 2).float())


def test_checkpoints_that_cannot_be_averaged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(tmp_path / "a.pt", 1, 1)
    torch.save({"model": {"other": torch.zeros(1)}, "epoch": 1, "step": 1}, tmp_path / "b.pt")
    torch.save([1], tmp_path / "c.pt")
    main = tool("torch_avg_checkpoints").main
    for name in ("b.pt", "c.pt", "d.pt"):
        paths = [str(tmp_path / "a.pt"), str(tmp_path / name)]
        assert main(["--checkpoints", *paths, "--output_path", str(tmp_path / "average.pt")]) == 2
        assert name in capsys.readouterr().err
    assert not (tmp_path / "average.pt").exists()


def test_word_error_rate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As Job ReturnnComputeWERJob calls it; n-best lists, and files that are gzipped."""
    (tmp_path / "refs.py").write_text("{'a': 'the cat sat', 'b': 'on the mat'}")
    hypotheses = "{'b': [(-inf, 'on mat'), (nan, 'on the mat')], 'a': [(-1.5, 'the cat sat down')]}"
    with gzip.open(tmp_path / "hyps.py.gz", "wt") as file:
        file.write(hypotheses)
    main = tool("calculate-word-error-rate").main
    given = ["--expect_full", "--refs", str(tmp_path / "refs.py"), "--out", str(tmp_path / "wer")]
    assert main([*given, "--hyps", str(tmp_path / "hyps.py.gz")]) == 0
    assert (tmp_path / "wer").read_text() == "33.33\n"  # one insertion and one deletion in six words
    for text, problem in [
        ("{'a': 'the'}", "'b'"),
        (hypotheses[:-1] + ", 'c': 'x'}", "'c'"),
        ("__import__('os')", "dict"),
        ("{", "dict"),
    ]:
        (tmp_path / "bad.py").write_text(text)
        assert main([*given, "--hyps", str(tmp_path / "bad.py")]) == 2
        assert problem in capsys.readouterr().err


def test_statistics_of_a_dataset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    rng = numpy.random.default_rng(1)
    sequences = [(1000 + rng.normal(size=(rng.integers(1, 9), 3))).astype("float32") for _ in range(30)]
    with HDFWriter(tmp_path / "data.hdf") as writer:
        for number, frames in enumerate(sequences):
            writer.add(f"seq-{number}", {"data": frames})
    Path("returnn.config").write_text("#!returnn/rnn.py\ntrain = {'class': 'HDFDataset', 'files': ['data.hdf']}\n")
    main = tool("dump-dataset").main
    given = "returnn.config --endseq -1 --type null --stats --dump_stats stats --key data".split()
    assert main(given) == 0
    frames = numpy.concatenate(sequences).astype("float64")
    assert numpy.allclose([float(line) for line in Path("stats.mean.txt").read_text().split()], frames.mean(axis=0), rtol=1e-12)
    assert numpy.allclose([float(line) for line in Path("stats.std_dev.txt").read_text().split()], frames.std(axis=0), rtol=1e-9)
    capsys.readouterr()
    assert main(["returnn.config", "--type", "print_tag"]) == 0
    assert capsys.readouterr().out.splitlines() == [f"seq {number} tag: seq-{number}" for number in range(11)]
    assert main(["returnn.config", "--type", "dump_seq_len", "--endseq", "-1", "--dump_prefix", "dump."]) == 0
    lengths = ast.literal_eval(Path("dump.seq-lens.txt").read_text())
    assert lengths == {f"seq-{number}": len(frames) for number, frames in enumerate(sequences)}
    assert main(["returnn.config", "--get_num_seqs"]) == 0
    assert "num_seqs: 30" in capsys.readouterr().out
    assert main(["returnn.config", "--key", "classes", "--type", "null"]) == 2
    assert "expected one of data, got 'classes'" in capsys.readouterr().err
    assert main(["returnn.config", "--dataset", "dev"]) == 2


CORPUS = """<?xml version="1.0" encoding="utf-8"?>
<corpus name="spoken">
  <recording name="one" audio="{folder}/one.wav">
    <segment name="1" start="0.0" end="0.5"><orth> two  words </orth><speaker name="ann"/></segment>
    <segment start="0.5" end="1.25"><orth>three</orth></segment>
  </recording>
  <recording name="two" audio="{folder}/more/two.flac"><segment name="1" start="0" end="1"><orth></orth></segment></recording>
</corpus>
"""


@pytest.fixture
def corpus_file(tmp_path: Path) -> Path:
    soundfile = pytest.importorskip("soundfile")
    (tmp_path / "more").mkdir()
    for name, cycles in (("one.wav", 50), ("more/two.flac", 70)):
        wave = numpy.sin(numpy.arange(16000) / 8000 * cycles * 2 * numpy.pi) * 0.5
        soundfile.write(tmp_path / name, wave, 8000)
    with gzip.open(tmp_path / "corpus.xml.gz", "wt") as file:
        file.write(CORPUS.format(folder=tmp_path))
    return tmp_path / "corpus.xml.gz"


def test_a_zip_file_of_a_corpus(corpus_file: Path, tmp_path: Path) -> None:
    """RETURNN's own OggZipDataset reads it."""
    datasets = pytest.importorskip("returnn.datasets.basic")
    main = tool("bliss-to-ogg-zip").main
    out = tmp_path / "out.ogg.zip"
    assert main([str(corpus_file), "--output", str(out)]) == 0
    with zipfile.ZipFile(out) as archive:
        entries = ast.literal_eval(archive.read("out.ogg.txt").decode())
    assert entries == [
        {"text": "two words", "speaker_name": "ann", "file": "one/0.0_0.5.ogg", "seq_name": "spoken/one/1", "duration": 0.5},
        {"text": "three", "speaker_name": None, "file": "one/0.5_1.25.ogg", "seq_name": "spoken/one/2", "duration": 0.75},
        {"text": "", "speaker_name": None, "file": "more/two/0_1.ogg", "seq_name": "spoken/two/1", "duration": 1},
    ]
    audio_options = {"features": "raw", "sample_rate": 8000, "peak_normalization": False}
    dataset = datasets.init_dataset({"class": "OggZipDataset", "path": str(out), "audio": audio_options, "targets": None})
    dataset.init_seq_order(epoch=1)
    dataset.load_seqs(0, 3)
    assert [dataset.get_tag(number) for number in range(3)] == [entry["seq_name"] for entry in entries]
    audio = [dataset.get_data(number, "data").ravel() for number in range(3)]
    assert [len(one) for one in audio] == [4000, 6000, 8000]
    wave = numpy.sin(numpy.arange(4000, 10000) / 8000 * 50 * 2 * numpy.pi) * 0.5
    assert numpy.abs(audio[1] - wave)[500:-500].max() < 0.05  # Vorbis loses a little

    (tmp_path / "segments").write_text("spoken/two/1\n")
    assert main([str(corpus_file), "--output", str(out), "--subset_segment_file", str(tmp_path / "segments"), "--no_ogg"]) == 0
    with zipfile.ZipFile(out) as archive:
        assert archive.namelist() == ["out.ogg.txt"]


def test_a_corpus_that_is_not_sound(corpus_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main = tool("bliss-to-ogg-zip").main
    out = tmp_path / "out.zip"
    text = gzip.decompress(corpus_file.read_bytes()).decode()
    for name, changed in {
        "cut": text[:-50],
        "times": text.replace('end="0.5"', 'end="0.0"'),
        "beyond": text.replace('start="0.5" end="1.25"', 'start="50" end="51"'),
        "no file": text.replace("one.wav", "none.wav"),
    }.items():
        broken = tmp_path / f"{name}.xml"
        broken.write_text(changed)
        assert main([str(broken), "--output", str(out)]) == 2, name
        assert "expected" in capsys.readouterr().err
    assert main([str(corpus_file), "--output", str(out), "--no_conversion"]) == 2
    assert [path.name for path in tmp_path.iterdir() if "out" in path.name] == []


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """RETURNN's demo, trained for an epoch."""
    folder = tmp_path_factory.mktemp("demo")
    pytest.importorskip("returnn")
    shutil.copy(ROOT / "data" / "returnn" / "demo-rf.config", folder / "demo.config")
    trained = run_inside([folder / "demo.config", "++num_epochs", 1, "++num_threads", 1, "++model", folder / "model"])
    assert trained.status == 0, trained.err
    return folder


@pytest.mark.slow
def test_onnx(demo: Path) -> None:
    """What the exported model computes for other sizes than those it was traced with."""
    reference = pytest.importorskip("onnx.reference")
    names = ["--input_names", "data:size1,data", "--output_names", "output,output:size1"]
    given = [str(demo / "demo.config"), str(demo / "model.001.pt")]
    wrong = [*given, str(demo / "other.onnx"), "--input_names", "audio"]  # names that the model does not have
    right = [*given, str(demo / "model.onnx"), "--device", "cpu", "--verbosity", "5", *names]
    code = f"from torch_export_to_onnx import main; assert main({wrong!r}) == 2; raise SystemExit(main({right!r}))"
    exported = finish([sys.executable, "-c", code], 120, clean_environment() | {"PYTHONPATH": str(TOOLS)})
    assert exported.status == 0, exported.err
    assert "--input_names: expected data,data:size1 in any order, got audio" in exported.err
    assert not (demo / "other.onnx").exists()
    session = reference.ReferenceEvaluator(str(demo / "model.onnx"))
    assert session.input_names == ["data:size1", "data"]
    assert session.output_names == ["output", "output:size1"]
    rng = numpy.random.default_rng(1)
    data, sizes = rng.normal(size=(3, 17, 9)).astype("float32"), numpy.array([17, 9, 12], "int32")
    output, output_sizes = session.run(None, {"data": data, "data:size1": sizes})
    assert output.shape == (3, 17, 2)
    assert output_sizes.tolist() == sizes.tolist()
    convolutions = torch.load(demo / "model.001.pt", weights_only=True)["model"]
    values = torch.from_numpy(data).transpose(1, 2)
    layers = sorted({name.rsplit(".", 1)[0] for name in convolutions})
    for number, layer in enumerate(layers):
        values = torch.relu(values) if number else values
        weight, bias = (convolutions[f"{layer}.{name}"] for name in ("filter", "bias"))
        values = torch.nn.functional.conv1d(values, weight, bias, padding=2)
    assert numpy.allclose(values.transpose(1, 2).numpy(), output, rtol=1e-5, atol=1e-5)


AVERAGED = """
import numpy, sys
sys.path.insert(0, TOOLS)
from tf_avg_checkpoints import main, tf, write
for number in (1, 2):
    values = {"layer/W": numpy.full((2, 3), number, "float32"), "global_step": numpy.array(10 * number)}
    write(values, f"{FOLDER}/epoch.{number:03d}")
prefix = ["--prefix", f"{FOLDER}/epoch."]
assert main(["--checkpoints", "001,002", *prefix, "--output_path", f"{FOLDER}/out/epoch.002"]) == 0
reader = tf.train.load_checkpoint(f"{FOLDER}/out/epoch.002")
assert reader.get_tensor("layer/W").tolist() == [[1.5] * 3] * 2
assert reader.get_tensor("global_step") == 20
assert main(["--checkpoints", "001,004", *prefix, "--output_path", f"{FOLDER}/none"]) == 2
"""


@pytest.mark.slow
def test_the_average_of_tensorflow_checkpoints(tmp_path: Path) -> None:
    """In a process with no environment but what AverageTFCheckpointsJob gives it; it finds all three files afterwards."""
    (tmp_path / "out").mkdir()
    code = AVERAGED.replace("TOOLS", repr(str(TOOLS))).replace("{FOLDER}", str(tmp_path))
    averaged = finish([sys.executable, "-c", code], 120, {"CUDA_VISIBLE_DEVICES": ""})
    assert averaged.status == 0, averaged.err
    assert "expected TensorFlow checkpoints" in averaged.err
    assert f"{tmp_path}/epoch.004" in averaged.err
    written = {path.name for path in (tmp_path / "out").iterdir()}
    assert written >= {"epoch.002.index", "epoch.002.meta", "epoch.002.data-00000-of-00001"}


@pytest.mark.again  # compiling against TensorFlow's headers takes minutes
def test_a_native_operation(tmp_path: Path) -> None:
    """As CompileNativeOpJob calls it: the file lists the libraries that the job moves."""
    command = [str(TOOLS / "compile_native_op.py"), "--native_op", "NativeLstm2", "--output_file", str(tmp_path / "compile.out")]
    compiled = finish([sys.executable, *command], 300, clean_environment() | {"CUDA_VISIBLE_DEVICES": ""})
    assert compiled.status == 0, compiled.err
    libraries = (tmp_path / "compile.out").read_text().splitlines()
    assert libraries
    assert all(Path(library).is_file() for library in libraries)
