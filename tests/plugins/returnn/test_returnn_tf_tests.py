"""RETURNN's own tests of its TensorFlow engine and of its updater, unmodified, with hvdtrain in their place: equal results, and
what cannot be equal. docs/returnn.md has the table.
"""

import ast
import pickle
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy
import pytest
from launching import ROOT, TOY, clean_environment

THEIRS = ROOT / "data" / "returnn" / "tests"
ENGINE, UPDATER = THEIRS / "test_TFEngine.py", THEIRS / "test_TFUpdater.py"

pytestmark = pytest.mark.skipif(not (ENGINE.exists() and UPDATER.exists()), reason="make test fetches them")

EQUAL = (
    "test_engine_train",
    "test_engine_train_newbob",
    "test_engine_train_optimizer_class",
    "test_engine_train_uneven_batches",
    "test_engine_train_subnet_loss",
    "test_engine_train_rec_subnet_loss_optimized",
    "test_engine_train_rec_subnet_loss_non_optimized",
    "test_engine_train_ctc_edit_dist_as_is_error_custom_inv_norm_factor",
    "test_attention_train_then_search",
    "test_mlp_attention_no_location_feedback_train_and_search",
    "test_attention_no_encoder_dependency",
    "test_attention_convolutional_feedback_variant1",
    "test_attention_convolutional_feedback_variant2",
    "test_attention_convolutional_feedback_variant3",
    "test_attention_search_in_train_then_search",
    "test_ctc_bn_train_eval",
    "test_custom_rec_unit",
    "test_non_available_data_construction",
    "test_engine_forward_single",
    "test_engine_search",
    "test_engine_search_no_optim",
    "test_engine_search_attention",
    "test_engine_search_attention_no_optim",
    "test_rec_optim_all_out",
    "test_engine_train_MultiProcDataset",
    "test_attention_two_targets",
    "test_attention_two_dependent_targets",
    "test_deterministic_train_linear",
    "test_deterministic_train_rec_nativelstm2",
)
"""Their own assertions hold, and all scores, outputs and hypotheses are those of RETURNN's engine."""

NEW_WEIGHTS = ("test_regression_choice", "test_rec_subnet_eval_init_out_apply0")
"""Equal as well if hvdtrain searches and forwards with RETURNN's weights. Those are new ones: RETURNN builds the network again
after the training, and with `start_epoch = 1` it does not load a checkpoint then. hvdtrain alone would load the last one."""

BUT = {
    "test_engine_forward_to_hdf": "seqLengths",
}
"""Outputs are equal, while the assertion with these words does not hold."""

REMAINDERS = ("test_engine_train_accum_grad_multiple_step", "test_engine_train_accum_grad_multiple_step_sparse")
"""RETURNN adds the batches that remain at the end of an epoch to the next one's first update, so that the scores are equal
only of the training in epoch 1."""

OTHER_BATCHES = ("test_engine_train_new_dataset_pipeline",)
"""RETURNN's key `dataset_pipeline` makes batches in another way."""

ONLY_HERE = (
    "test_engine_train_nadam_optimizer",
    "test_engine_train_grad_noise_sparse",
    "test_engine_train_simple_attention_lstmp",
    "test_engine_train_simple_attention_nativelstm2",
    "test_engine_train_simple_attention_basiclstm",
    "test_attention_subnetwork_base_dependency",
    "test_attention_subnetwork_from_dependency",
    "test_rec_subnet_train_t3b",
    "test_rec_subnet_train_t3d",
    "test_rec_subnet_train_t3d_simple",
    "test_rec_subnet_auto_optimize",
)
"""RETURNN's optimizer `nadam` fails with TensorFlow 2.21."""

REFUSED = {
    "test_engine_train_keras_optimizer": "'Nadam' object has no attribute '_name'",  # fails with RETURNN, too
    "test_engine_train_dummy_distributed": "AssertionError",  # asks for TensorFlow's server, before the training
    "test_engine_forward_EvalLayer_tf_function": "must feed",  # of what `extern_data` does not make available for inference
    "test_engine_forward_shape_deps": r"expected frames of shape \(4,\), got \(9,\)",  # of data that the network does not use
    "test_engine_rec_subnet_count": "expected an output for each sequence",
    "test_engine_search_output_file": "search_labels",  # labels that a dataset gets when it is open
    "test_init_network_from_config_preload_from_files_eval": "train: expected a value",
    "test_TikhonovRegularizationLayer": "a layer with a meta loss",
    "test_preinit_reset_train_dataset": "expected every tag once",  # it dumps the sequences of train and dev into one file
    "test_engine_end_layer": "expected the parameters of this config's model",  # RETURNN forwards without the layer with the loss
    "test_search_multi_choice_hdf_dump": "unique_seq_tags",  # of files that have the sequences of dev several times
    "test_preload_from_files": "no loss defined",
    "test_preload_from_files_with_reuse": "no loss defined",
    "test_preload_from_files_ignore_missing": "no loss defined",
}
"""What hvdtrain says about the others."""

FIRST_EPOCHS = {"test_search_multi_choice_hdf_dump": 3}
"""Equal in this many epochs, before one is refused."""

VARYING = ("score_search_loss", "score_search_score")
"""Scores of searches in these epochs, with which nothing is trained: RETURNN's, too, differ by up to 6e-5 between two runs."""

UPDATES = (
    "test_Updater_GradientDescent",
    "test_Updater_CustomUpdate",
    "test_Updater_add_check_numerics_ops",
    "test_Updater_simple_batch",
    "test_Updater_decouple_constraints",
    "test_Updater_decouple_constraints_simple_graph",
    "test_Updater_decouple_constraints_simple_graph_grad_accum",
    "test_Updater_multiple_optimizers",
    "test_Updater_multiple_optimizers_and_opts",
    "test_add_check_numerics_ops",
    "test_grad_add_check_numerics_ops",
)
"""Of the updater: after the updates, all variables are equal."""

FEW = ("test_engine_train", "test_Updater_decouple_constraints", "test_Updater_CustomUpdate")
"""Those of `make test-all`."""


def some(tests: Any) -> list[Any]:
    """Parameters: the others prove again what few prove."""
    return [pytest.param(test, marks=pytest.mark.slow if test in FEW else pytest.mark.again) for test in tests]


Results = Mapping[tuple[str, str], dict[str, Any]]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Results:
    """By test and program, what it computed."""
    made = tmp_path_factory.mktemp("their_tests") / "results"
    tests: list[str] = [*EQUAL, *NEW_WEIGHTS, *BUT, *REMAINDERS, *OTHER_BATCHES, *ONLY_HERE, *REFUSED, *UPDATES]
    tests = tests if request.config.getoption("--soak") else list(FEW)
    program = str(TOY.with_name("returnn_tf_engine.py"))
    environment = clean_environment() | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, program, str(THEIRS), str(made), *tests]
    ended = subprocess.run(command, capture_output=True, encoding="utf-8", timeout=5000, env=environment)
    assert ended.returncode == 0, ended.stdout[-5000:] + ended.stderr[-5000:]
    found = {(test, program): Path(f"{made}.{test}.{program}") for test in tests for program in ("hvdtrain", "returnn")}
    return {key: pickle.loads(path.read_bytes()) for key, path in found.items() if path.exists()}


def both(results: Results, test: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """hvdtrain's results and RETURNN's."""
    return results[test, "hvdtrain"], results[test, "returnn"]


def assert_equal(own: Mapping[str, Any], theirs: Mapping[str, Any]) -> None:
    """Scores, outputs and hypotheses."""
    for scores, expected in zip(own["scores"], theirs["scores"], strict=True):  # ours may include a total
        assert {name: scores[name] for name in expected} == pytest.approx(expected, rel=3e-6, abs=1e-7)
    assert len(own["outputs"]) == len(theirs["outputs"])
    for outputs, expected in zip(own["outputs"], theirs["outputs"], strict=True):
        for tag in expected:  # of one sequence, where RETURNN's test forwards one
            numpy.testing.assert_allclose(outputs[tag].ravel(), expected[tag].ravel(), rtol=1e-5, atol=1e-6)
    assert len(own["hypotheses"]) == len(theirs["hypotheses"])
    for layers, expected in zip(own["hypotheses"], theirs["hypotheses"], strict=True):
        assert layers.keys() == expected.keys()
        for tag in expected:
            assert layers[tag].keys() == expected[tag].keys()
            for name, hypotheses in expected[tag].items():
                for (values, score), (wanted, wanted_score) in zip(layers[tag][name], hypotheses, strict=True):
                    numpy.testing.assert_allclose(values, wanted, rtol=1e-5, atol=1e-6)
                    assert score == (None if wanted_score is None else pytest.approx(wanted_score, rel=1e-5))


@pytest.mark.parametrize("test", some((*EQUAL, *NEW_WEIGHTS)))
def test_as_with_returnns_engine(results: Results, test: str) -> None:
    own, theirs = both(results, test)
    assert (own["error"], theirs["error"]) == (None, None)
    assert own["scores"] or own["outputs"] or own["hypotheses"]
    assert_equal(own, theirs)


@pytest.mark.parametrize("test", some(BUT))
def test_but_for_an_assertion(results: Results, test: str) -> None:
    own, theirs = both(results, test)
    assert own["error"].startswith("AssertionError")
    assert BUT[test] in own["line"]
    assert theirs["error"] is None
    assert_equal(own, theirs)


@pytest.mark.parametrize("test", some(REMAINDERS))
def test_but_for_the_batches_that_remain(results: Results, test: str) -> None:
    own, theirs = both(results, test)
    assert (own["error"], theirs["error"]) == (None, None)
    for name in ("train_loss_score", "train_loss_error"):
        assert own["scores"][0][name] == pytest.approx(theirs["scores"][0][name], rel=3e-6)
    assert len(own["scores"]) == 2


@pytest.mark.parametrize("test", some(OTHER_BATCHES))
def test_but_for_the_batches(results: Results, test: str) -> None:
    own, theirs = both(results, test)
    assert (own["error"], theirs["error"]) == (None, None)
    assert [scores.keys() for scores in own["scores"]] == [scores.keys() for scores in theirs["scores"]]


@pytest.mark.parametrize("test", some(ONLY_HERE))
def test_trains_what_returnn_cannot(results: Results, test: str) -> None:
    own, theirs = both(results, test)
    assert theirs["error"] is not None
    assert theirs["scores"] == []
    assert own["error"] is None
    assert len(own["scores"]) == (6 if test == "test_rec_subnet_auto_optimize" else 2)  # three trainings
    assert all(numpy.isfinite(list(scores.values())).all() for scores in own["scores"])


@pytest.mark.parametrize("test", some(REFUSED))
def test_is_refused(results: Results, test: str) -> None:
    assert re.search(REFUSED[test], results[test, "hvdtrain"]["error"])


@pytest.mark.parametrize("test", some(FIRST_EPOCHS))
def test_is_equal_until_it_is_refused(results: Results, test: str) -> None:
    own, theirs = both(results, test)
    assert theirs["error"] is None
    assert len(own["scores"]) == FIRST_EPOCHS[test] < len(theirs["scores"])
    for scores, expected in zip(own["scores"], theirs["scores"], strict=False):
        assert scores.keys() - expected.keys() == {"train_loss_total", "dev_loss_total"}
        same = {name: score for name, score in expected.items() if not name.endswith(VARYING)}
        assert len(same) == 8
        assert {name: scores[name] for name in same} == pytest.approx(same, rel=3e-6, abs=1e-7)


@pytest.mark.parametrize("test", some(UPDATES))
def test_the_updater_updates_as_returnns(results: Results, test: str) -> None:
    own, theirs = both(results, test)
    assert (own["error"], theirs["error"]) == (None, None)
    for name, value in theirs["variables"].items():
        if "var_accum_grad" not in name:  # named after the operations that compute gradients
            numpy.testing.assert_array_equal(own["variables"][name], value)


def test_no_test_is_left_out() -> None:
    """Those of the engine that train, and all of the updater."""
    functions = {one.name: one for one in ast.parse(ENGINE.read_text()).body if isinstance(one, ast.FunctionDef)}
    equal, work = {*EQUAL, *NEW_WEIGHTS, *BUT}, {*REMAINDERS, *OTHER_BATCHES, *ONLY_HERE}
    tried = {*equal, *work, *REFUSED}

    def trains(name: str, seen: tuple[str, ...] = ()) -> bool:
        calls = [one.func for one in ast.walk(functions[name]) if isinstance(one, ast.Call)]
        called = {one.id for one in calls if isinstance(one, ast.Name)} & functions.keys() - {*seen, name}
        itself = any(isinstance(one, ast.Attribute) and one.attr == "train" for one in calls)
        return itself or any(trains(one, (*seen, name)) for one in called)

    assert tried <= functions.keys()
    training = {name for name in functions if name.startswith("test_") and trains(name)}
    assert training <= tried
    assert len(training) == 44
    assert [len(training & tests) for tests in (equal, work, {*REFUSED})] == [25, 14, 5]
    updater = {one.name for one in ast.parse(UPDATER.read_text()).body if isinstance(one, ast.FunctionDef)}
    assert sorted(name for name in updater if name.startswith("test_")) == sorted(UPDATES)
