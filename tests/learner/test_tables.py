"""The tables of frameworks and reducers: what a new entry has to have, and that nothing else has to know it."""

import ast
from dataclasses import fields
from pathlib import Path

import pytest
from learners import problems

from hvdtrain.comm.single import SingleCommunicator
from hvdtrain.config.check import describe
from hvdtrain.config.keys import declared_keys
from hvdtrain.learner.frameworks import FRAMEWORKS
from hvdtrain.learner.reducers import REDUCERS, ReduceKeys
from hvdtrain.runtime.timer import Timer
from hvdtrain.settings import all_keys

PACKAGE = Path(__file__).resolve().parents[2] / "hvdtrain"


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_a_framework_is_a_folder_with_these_files_and_functions(name: str) -> None:
    framework = FRAMEWORKS[name]
    folder = PACKAGE.parent / framework.package.replace(".", "/")
    functions = {
        path.stem: {
            name
            for node in ast.parse(path.read_text()).body
            if isinstance(node, ast.FunctionDef | ast.ImportFrom)
            for name in ([node.name] if isinstance(node, ast.FunctionDef) else [alias.name for alias in node.names])
        }
        for path in folder.glob("*.py")
    }
    assert "build_learner" in functions["learner"]
    assert functions["tensors"] >= {"zeros", "size", "wait_for"}
    assert ("prepare" in functions["learner"]) == framework.has_prepare
    assert len({other.suffix for other in FRAMEWORKS.values()}) == len(FRAMEWORKS)


def test_no_module_asks_for_a_framework_by_its_name() -> None:
    found = []
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Compare) and any(
                isinstance(side, ast.Attribute) and side.attr == "backend" for side in [node.left, *node.comparators]
            ):
                values = [side.value for side in [node.left, *node.comparators] if isinstance(side, ast.Constant)]
                found += [f"{path.name}:{node.lineno}" for value in values if value in FRAMEWORKS]
    assert found == []


def test_a_key_of_one_framework_is_refused_with_another_and_says_so_in_the_help(tmp_path: Path) -> None:
    values = {"torch_compile": "True", "sync_batch_norm": "True", "checkpoint_modules": "['first']", "torch_distributed": "{}"}
    values |= {"load_model_post_hooks": "[lambda **_: None]", "change_gradients": "lambda **_: None"}
    values |= {
        "freeze_until_step": "{'first.*': 10}",
        "save_parameters": "'trained'",
        "split_on_oom": "True",
        "count_flops": "True",
        "use_last_best_model": "True",
    }
    values["extra_models"] = "{'teacher': {'get_model': lambda **_: None, 'load': 'teacher.pt'}}"
    needing = {key.name: key for key in all_keys() if key.needs and "tensorflow" not in key.needs}
    assert needing.keys() == {*values, "objective_per_rank"}
    for name, value in values.items():
        assert problems(tmp_path, f"{name} = {value}\n", backend="tensorflow") == [f"{name}: needs-backend"]
    assert describe(needing["torch_compile"]) == "True or False or a dict; backend 'torch' only; default False"


def test_what_no_single_key_asks_for_is_refused_too(tmp_path: Path) -> None:
    assert problems(tmp_path, "ngpu = 2\n", backend="tensorflow") == ["torch_distributed: needs-backend"]
    preload = "preload_from_files = {'a': {'filename': 'a.npz', 'init_for_train': 'always'}}\n"
    assert problems(tmp_path, preload, backend="tensorflow") == ["preload_from_files.a.init_for_train: needs-backend"]


def test_a_choice_from_a_table_names_its_entries(tmp_path: Path) -> None:
    assert problems(tmp_path, "backend = 'jax'\n") == ["backend: unknown-value"]
    assert problems(tmp_path, "horovod_reduce_type = 3\n") == ["horovod_reduce_type: unknown-value"]
    assert problems(tmp_path, "torch_distributed = {'reduce_type': 'grads'}\n") == [
        "torch_distributed.reduce_type: unknown-value"
    ]


@pytest.mark.parametrize("name", REDUCERS)
def test_a_reducer_has_its_keys_and_describes_itself(name: str) -> None:
    reducer = REDUCERS[name]
    own = {field.name for field in fields(reducer.keys)}
    assert own
    assert own <= {key.field for key in declared_keys(ReduceKeys)}
    made = ReduceKeys(reduce_type=name).reducer(SingleCommunicator(), Timer())
    assert made.sync.num_syncs == 0
    assert made.description


def test_what_reducers_say_of_themselves() -> None:
    def said(**keys: object) -> str:
        return ReduceKeys(**keys).reducer(SingleCommunicator(), Timer()).description  # type: ignore[arg-type]

    assert said() == "gradients are summed for every update"
    assert said(average_gradients=True) == "gradients are averaged for every update"
    param = {"reduce_type": "param", "sync_steps": 100}
    assert said(**param) == "parameters are averaged after every 100 updates and at the end of an epoch"
    assert said(**param, sync_seconds=0.5) == "parameters are averaged about every 0.5 s and at the end of an epoch"


def test_no_constructor_of_a_learner_takes_more_than_seven_arguments() -> None:
    for path in (PACKAGE / "learner").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and node.name == "__init__":
                count = len(node.args.args) + len(node.args.kwonlyargs) - 1
                assert count <= 7, f"{path.name}:{node.lineno} takes {count}"
