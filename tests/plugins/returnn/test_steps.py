"""Configs that import RETURNN: what they find, and what is said about mistakes."""

import os
import sys
from pathlib import Path

import pytest
import torch
from inside import nothing_changes
from returnn.config import get_global_config
from returnn.tensor import Tensor

from hvdtrain.errors import ConfigError, DataError
from hvdtrain.learner.torch.optimizer import make_optimizer
from hvdtrain.learner.torch.optimizer_state import regroup
from hvdtrain.plugins.forward.task import forward_all
from hvdtrain.plugins.returnn.imports import WatchedImports
from hvdtrain.run import train
from hvdtrain.settings import Settings, read_settings

CONFIG = """
import returnn.frontend as rf
from returnn.tensor import Dim, batch_dim
train = {{"class": "Task12AXDataset", "num_seqs": 6}}
extern_data = {{"data": {{"dim": 9}}, "classes": {{"dim": 2, "sparse": True, "available_for_inference": False}}}}
model, num_epochs, learning_rate, max_seqs, num_threads = {model!r}, 1, 0.1, 3, 1
class Model(rf.Module):
    def __init__(self):
        super().__init__()
        self.norm = rf.LayerNorm(Dim(9, name="in"))
        self.out = rf.Linear(self.norm.in_dim, Dim(2, name="out"))
    def __call__(self, source):
        source, _ = rf.replace_dim(source, in_dim=source.feature_dim, out_dim=self.norm.in_dim)
        return self.out(self.norm(source))
def get_model(**_):
    return Model()
def train_step(*, model, extern_data, **_):
    scores = model(extern_data["data"])
    loss = rf.cross_entropy(target=extern_data["classes"], estimated=scores, estimated_type="logits", axis=model.out.out_dim)
    loss.mark_as_loss("ce")
"""


def read(folder: Path, text: str = "") -> Settings:
    (folder / "my.config").write_text(CONFIG.format(model=str(folder / "model")) + text)
    return read_settings([folder / "my.config"], {})


TRAINS = """
def train_step(*, model, extern_data, **_):
    rf.reduce_mean(model(extern_data["data"]), axis=model.out.out_dim).mark_as_loss("some")
"""


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("extern_data['data'] = {'dim': 8}", r"train: expected frames of shape \(8,\), got \(9,\) in 'data'"),
        (
            "extern_data['data'] = {'dim': 9, 'sparse': True}",
            r"train: expected class indices, got float32 in 'data' \(according to extern_data.data\)",
        ),
        ("extern_data['words'] = {'dim': 9}", r"extern_data.words: expected one of the dataset's data keys \(data, classes\)"),
        ("extern_data['data'] = {'dimm': 9}", "extern_data.data: expected options of RETURNN's Tensor, got {'dimm': 9}: "),
        ("extern_data = [9]", r"extern_data: expected a dict of dicts by data key, got \[9\]"),
        ("model_outputs = {'output': 3}", "model_outputs.output: expected options of RETURNN's Tensor, got 3: "),
        ("behavior_version = 1", "behavior_version: expected one that RETURNN supports with PyTorch, got 1"),
        ("backend = 'tensorflow'", "backend: expected 'torch' in a config that imports returnn, got 'tensorflow'"),
        ("torch_compile = True", "torch_compile: expected a get_model that returns a torch.nn.Module, got an rf.Module"),
        ("rf.Lineer", "my.config, line 21: AttributeError: .*Lineer"),
    ],
)
def test_wrong_values_are_reported(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises((ConfigError, DataError), match=message):
        train(read(tmp_path, text))


def test_a_name_that_looks_like_a_misspelt_key_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """RETURNN ignores it, and so do its users: one of its demos has such a name. On the command line, it is refused."""
    train(read(tmp_path, f"{TRAINS}relative_error_div_by_old, log_verbosity = True, 2\n"))
    told = "relative_error_div_by_old in my.config: neither RETURNN nor hvdtrain reads it (did you mean newbob_relative_error_"
    assert capsys.readouterr().out.count(told) == 1
    with pytest.raises(ConfigError, match="num_epoch: unknown key in the command line .did you mean num_epochs"):
        read_settings([tmp_path / "my.config"], {"num_epoch": "2"})


def test_a_config_that_only_forwards(tmp_path: Path) -> None:
    """As RETURNN's forward jobs write it: no training data, no train_step, no learning rate. And tags as outputs."""
    train(read(tmp_path, TRAINS))
    body = """
forward_data, kept, task, load = train, [], "forward", model + ".001"
del train, train_step, learning_rate, num_epochs
def forward_step(*, model, extern_data, **_):
    rf.get_run_ctx().mark_as_default_output(extern_data["data"].raw_tensor)
    rf.get_run_ctx().mark_as_output(extern_data["seq_tag"], "tag")
class forward_callback:
    def init(self, *, model):
        pass
    def process_seq(self, *, seq_tag, outputs):
        assert outputs["tag"].raw_tensor.item() == seq_tag and outputs["output"].raw_tensor.shape[1] == 9
        kept.append(seq_tag)
    def finish(self):
        assert len(kept) == 6
"""
    forward_all(read(tmp_path, body))


def test_search_writes_hypotheses_in_the_vocabulary_of_the_output(tmp_path: Path) -> None:
    """As RETURNN's search with TensorFlow: a dict from tags to lists of (score, text)."""
    body = """
import torch
from returnn.tensor import Tensor
task, search_data, search_output_file, search_output_file_format = "search", train, {file!r}, "py"
extern_data["classes"] = {{
    "sparse": True,
    "available_for_inference": False,
    "vocab": {{"class": "Vocabulary", "vocab_file": None, "labels": ["no", "yes"], "unknown_label": None}},
}}
def forward_step(*, model, extern_data, **_):
    batch = extern_data["data"].dims[0]
    number = extern_data["data"].raw_tensor.shape[0]
    beam = Dim(2, name="beam")
    sizes = Tensor("sizes", [batch, beam], "int32", raw_tensor=torch.tensor([[3, 2]] * number, dtype=torch.int32))
    hyps = torch.tensor([[[0, 1, 0], [1, 1, 0]]] * number, dtype=torch.int32)
    out = Dim(sizes, name="out")
    context = rf.get_run_ctx()
    hyps = Tensor("hyps", [batch, beam, out], "int32", raw_tensor=hyps, sparse_dim=extern_data["data"].feature_dim)
    context.mark_as_output(hyps, "hyps", dims=[batch, beam, out])
    context.mark_as_output(Tensor("scores", [batch, beam], "float32", raw_tensor=torch.tensor([[-0.5, -1.2]] * number)), "scores")
"""
    train(read(tmp_path, TRAINS))
    forward_all(read(tmp_path, body.format(file=str(tmp_path / "found.py"))))
    found = eval((tmp_path / "found.py").read_text())
    assert found == {f"seq-{number}": [(-0.5, "no yes no"), (-1.2, "yes yes")] for number in range(6)}


def test_hooks_after_the_model_is_loaded(tmp_path: Path) -> None:
    """At every start, and before other tasks, on what was loaded. `where` records what they saw."""
    body = """
import os
where = os.environ.setdefault("CALLED", "")
def begin(*, model, **_):
    assert type(model) is Model and rf.get_default_float_dtype() == "bfloat16"
    os.environ["CALLED"] += f"{model.out.weight.raw_tensor.dtype} {(model.out.weight.raw_tensor == 7).all().item()} "
def change(*, model, **_):
    model.out.weight.raw_tensor.data.fill_(7)
load_model_post_hooks = (begin, change)
default_float_dtype, learning_rate = "bfloat16", 1e-30
def forward_step(*, model, extern_data, **_):
    assert extern_data["data"].dtype == rf.get_default_float_dtype() == "bfloat16"
    rf.get_run_ctx().mark_as_default_output(model(extern_data["data"]), shape=[*extern_data["data"].dims[:2], model.out.out_dim])
forward_data, output_file = train, model + ".hdf"
"""
    with nothing_changes():
        train(read(tmp_path, TRAINS + body))
        train(read_settings([tmp_path / "my.config"], {"num_epochs": "2"}))
        forward_all(read_settings([tmp_path / "my.config"], {"task": "forward"}))
        assert os.environ["CALLED"] == "torch.bfloat16 False " + 2 * "torch.bfloat16 True "
    assert torch.get_default_dtype() == torch.float32
    stored = torch.load(tmp_path / "model.002.pt", weights_only=True)["model"]
    assert {values.dtype for values in stored.values()} == {torch.bfloat16}
    assert (stored["out.weight"] == 7).all()
    assert (tmp_path / "model.hdf").exists()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("load_model_post_hooks = 3", "load_model_post_hooks: expected .*a tuple or None, got 3"),
        ("load_model_post_hooks = [3]", "load_model_post_hooks.0.: expected a function or 'module:name', got 3"),
        (
            "load_model_post_hooks = [lambda *, model, **_: model.out.bias.raw_tensor.requires_grad_(False)]",
            "load_model_post_hooks: expected functions that leave the trained parameters .*, got others: out.bias .the optimizer",
        ),
        ("default_float_dtype = 'float8'", "default_float_dtype: a key of RETURNN that is not supported, .* such as 'bfloat16'"),
        ("torch_batching = print", "torch_batching: .*batches are planned from the lengths"),
    ],
)
def test_what_is_wrong_with_such_keys(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        train(read(tmp_path, TRAINS + text + "\n"))


def test_an_optimizer_by_its_dotted_name(tmp_path: Path) -> None:
    train(read(tmp_path, TRAINS + "optimizer = {'class': 'returnn.torch.optim.lion.Lion', 'weight_decay': 0.1}\n"))
    for name, message in (("returnn.torch.optim.lion.Lio", "that can be imported, got"), ("os.path", "a torch.optim.Optimizer")):
        with pytest.raises(ConfigError, match=f"optimizer.class: expected .*{message}"):
            make_optimizer({"class": name}, torch.nn.Linear(1, 1))


def test_without_extern_data_the_data_determines_it(tmp_path: Path) -> None:
    """And the tags are read when they are used, in the form that they have in RETURNN."""
    body = """
del extern_data
def train_step(*, model, extern_data, **_):
    data, classes, tags = (extern_data[key] for key in ("data", "classes", "seq_tag"))
    assert data.dims[1:] == (data.get_time_dim_tag(), data.feature_dim) and data.feature_dim.dimension == 9
    assert (classes.dtype, tags.dtype, tags.dims) == ("int32", "string", (data.dims[0],))
    assert tags.copy().raw_tensor.tolist() == tags.raw_tensor.tolist() and tags.raw_tensor[0].startswith("seq-")
    rf.reduce_mean(model(data), axis=model.out.out_dim).mark_as_loss("some")
"""
    train(read(tmp_path, body))


def test_a_recipe_that_imports_returnn_is_noticed(tmp_path: Path) -> None:
    """Even if this process has RETURNN already; a config without RETURNN does not get its tensors."""
    (tmp_path / "their_steps.py").write_text("from returnn.tensor import Tensor\nkinds = []\n")
    step = """
def train_step(*, model, extern_data, **_):
    kinds.append(type(extern_data["data"]))
    {mark}(model(extern_data["data"].raw_tensor), "some")
"""
    usual = CONFIG[CONFIG.index("train =") : CONFIG.index("class Model")].format(model=str(tmp_path / "model"))
    usual += "import torch\ndef get_model(**_):\n    return torch.nn.Linear(9, 2)\n"
    with nothing_changes():
        for begin, mark in (
            ("from their_steps import kinds", "__import__('returnn.frontend').frontend.get_run_ctx().mark_as_loss"),
            ("import hvdtrain\nkinds = []", "hvdtrain.get_run_ctx().mark_as_loss"),
        ):
            (tmp_path / "my.config").write_text(f"{begin}\n{usual}{step.format(mark=mark)}")
            settings = read_settings([tmp_path / "my.config"], {})
            train(settings)
            if "their_steps" in begin:
                assert sys.modules["their_steps"].kinds[0] is Tensor
                assert get_global_config().int("max_seqs", 1) == 3
    assert not WatchedImports().has_returnn


def test_options_of_optimizers_see_returnns_modules(tmp_path: Path) -> None:
    """By name or class; and the functions of a config get them."""
    import returnn.frontend as rf

    settings = read(tmp_path)
    model = settings.learner.get_model(epoch=1, step=0, device="cpu")
    assert isinstance(model, torch.nn.Module)

    def undecayed(**options: object) -> set[str]:
        [first, *others] = make_optimizer({"class": "adamw", "weight_decay": 0.1, **options}, model).param_groups
        kept = {id(one) for group in others for one in group["params"]}
        return {name for name, one in model.named_parameters() if id(one) in kept}

    assert undecayed() == {"norm.bias", "out.bias"}
    for blacklist in (["rf.LayerNorm"], [rf.LayerNorm], ["rf.LayerNorm", "rf.LearnedRelativePositionalEncoding"]):
        assert undecayed(weight_decay_modules_blacklist=blacklist) == {"norm.scale", "norm.bias", "out.bias"}
    with pytest.raises(ConfigError, match="weight_decay_modules_blacklist: expected the framework's classes or the model's"):
        undecayed(weight_decay_modules_blacklist=["rf.LayerNorn"])
    assert undecayed(weight_decay_custom_include_check=lambda rf_module, **_: not isinstance(rf_module, rf.Linear)) == {
        "out.weight",
        "out.bias",
    }
    seen = []

    def groups(*, rf_model: object, model: torch.nn.Module, **_: object) -> list[dict[str, object]]:
        seen.append(type(rf_model).__name__)
        return [{"params": list(model.parameters())}]

    make_optimizer({"class": "sgd", "param_groups_custom": groups}, model)
    assert seen == ["Model"]


def test_a_state_in_another_order_is_put_into_ours() -> None:
    """RETURNN sorts names within groups, and has parameters that are not trained, and empty groups."""
    stored = {
        "state": {0: "of a", 1: "of b", 2: "of c", 3: "of d"},
        "param_groups": [{"params": [0, 1, 2], "eps": 1}, {"params": [], "eps": 2}, {"params": [3], "eps": 3}],
    }
    names = ["a", "b", "c", "d"]
    ours, sources = regroup(stored, names, [["c", "a"], ["d"]])
    assert ours == {
        "state": {1: "of a", 0: "of c", 2: "of d"},
        "param_groups": [{"params": [0, 1], "eps": 1}, {"params": [2], "eps": 3}],
    }
    assert sources == [[0, 0], [2]]
    moved, _ = regroup(stored, names, [["d", "c", "a"]])
    assert moved == {"state": {0: "of d", 1: "of c", 2: "of a"}, "param_groups": [{"params": [0, 1, 2], "eps": 3}]}
    with pytest.raises(ValueError, match="expected that of all trained parameters, got none for e"):
        regroup(stored, names, [["c", "a", "b", "e"], ["d"]])


def test_a_batch_dim_of_the_configs_own(tmp_path: Path) -> None:
    """Of another kind than RETURNN's, and not the first axis of an output."""
    body = """
sequences, time, features = Dim(None, name="sequences"), Dim(None, name="time"), Dim(9, name="in")
extern_data = {"data": {"dims": [sequences, time, features], "feature_dim": features, "dtype": "float32"}}
forward_data, kept = train, []
def train_step(*, model, extern_data, **_):
    rf.reduce_mean(model(extern_data["data"]), axis=model.out.out_dim).mark_as_loss("some")
def forward_step(*, model, extern_data, **_):
    extern_data["data"].mark_as_output("output", shape=[time, sequences, features])
class forward_callback:
    def init(self, *, model):
        assert isinstance(model, Model)
    def process_seq(self, *, seq_tag, outputs):
        output = outputs["output"]
        assert output.dims[1] == features and output.raw_tensor.shape == (output.dims[0].get_dim_value(), 9)
        kept.append(len(output.raw_tensor))
    def finish(self):
        assert len(kept) == 6 and len(set(kept)) > 1
"""
    train(read(tmp_path, body))
    forward_all(read_settings([tmp_path / "my.config"], {"task": "forward"}))
