"""Break the package in more than 40 places, one at a time, and tell whether the tests notice: `python tools/mutations.py`.

Every mutation is a defect that somebody could really introduce, with the cheapest tests that should notice it. The tests run in a
copy of the checkout in a temporary folder, changes that are not committed included; the checkout itself stays as it is. First,
the tests of all selected mutations run in the copy as it is, and have to pass.

  python tools/mutations.py                  all of them: about 20 minutes on two cores
  python tools/mutations.py 3 17 watchdog    some, by number or a part of the name
"""

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.util import cache_from_source
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

ENOUGH = 36
"""How many of all mutations have to be found."""

TOGETHER = "tests/ranks/test_update_together.py::test_ranks_agree_and_a_stop_changes_nothing[torch-horovod-2]"
"""Two ranks with Horovod: accumulation, loss scale, noise, clipping, averages of parameters and over time; stopped and not."""


@dataclass(frozen=True)
class Mutation:
    """A defect.

    Attributes:
        name: what is wrong with it.
        file: relative to hvdtrain/.
        before: the right code, which occurs once in the file.
        after: the wrong code.
        tests: files of tests, or tests in them; at least one test has to fail.
    """

    name: str
    file: str
    before: str
    after: str
    tests: tuple[str, ...]


MUTATIONS = [
    # The plan of an epoch, and its data
    Mutation(
        "a resumed epoch repeats the last batch",
        "data/plan/epoch.py",
        "range(start + rank, self.num_batches, size)",
        "range(max(0, start - 1) + rank, self.num_batches, size)",
        ("tests/data/plan/test_plan.py",),
    ),
    Mutation(
        "the seed of the order does not depend on the epoch",
        "data/plan/order_keys.py",
        "return (full_epoch(keys, epoch) - 1) // method_of(keys, epoch).keep + 1 + keys.random_seed_offset",
        "return 1 + keys.random_seed_offset",
        ("tests/data/plan/test_order.py",),
    ),
    Mutation(
        "the parts of partition_epoch begin with the second one",
        "data/plan/order_keys.py",
        "return (epoch - 1) % keys.partition_epoch",
        "return epoch % keys.partition_epoch",
        ("tests/data/plan/test_order.py",),
    ),
    Mutation(
        "laplace sorts all bins in ascending order",
        "data/plan/order.py",
        "bin_lengths if i % 2 == 0 else ~bin_lengths",
        "bin_lengths",
        ("tests/data/plan/test_order.py",),
    ),
    Mutation(
        "a batch has one sequence more than its limits allow",
        "data/plan/bounds.py",
        "            if i >= close:",
        "            if i > close:",
        ("tests/data/plan/test_plan.py",),
    ),
    Mutation(
        "padding is filled with ones",
        "data/padding.py",
        "else numpy.zeros(shape, dtype)\n",
        "else numpy.ones(shape, dtype)\n",
        ("tests/data/test_batches.py",),
    ),
    Mutation(
        "a sequence of an HDF file lacks its last frame",
        "data/hdf/dataset.py",
        "return array[start:stop]",
        "return array[start : stop - 1]",
        ("tests/data/hdf/test_hdf.py",),
    ),
    Mutation(
        "answers of workers from before an error are taken for later ones",
        "data/combine/workers.py",
        "for number in range(received, asked):",
        "for number in range(asked, asked):",
        ("tests/plugins/combine/test_composite.py",),
    ),
    Mutation(
        "local copies that another process uses are removed",
        "plugins/copies/folder.py",
        "elif path.name not in used:",
        "else:",
        ("tests/plugins/copies/test_copies.py",),
    ),
    # The config
    Mutation(
        "the config takes precedence over the command line",
        "config/source.py",
        "values[name] = top[name]",
        "values[name] = values.get(name, top[name])",
        ("tests/config/test_config.py",),
    ),
    Mutation(
        "an unknown option is a mistake only if it resembles a known one",
        "config/check.py",
        "        if option not in option_names:",
        "        if option not in option_names and closest(str(option), option_names):",
        ("tests/config/test_config.py", "tests/config/test_messages.py"),
    ),
    Mutation(
        "RETURNN's decay of the learning rate is taken for its growth",
        "plugins/returnn/names.py",
        '"learning_rate_decay": "newbob_learning_rate_decay"',
        '"learning_rate_decay": "newbob_learning_rate_growth"',
        ("tests/config/test_config.py", "tests/plugins/returnn/test_keys.py"),
    ),
    # The ranks
    Mutation(
        "Horovod's averages are sums",
        "plugins/horovod/communicator.py",
        'self._hvd.Average if op == "average" and divisor is None else self._hvd.Sum',
        "self._hvd.Sum",
        ("tests/ranks/test_contract.py", "tests/ranks/test_collectives.py"),
    ),
    Mutation(
        "averages of torch.distributed are sums",
        "comm/torch_dist.py",
        "wide /= self.size",
        "wide /= 1",
        ("tests/ranks/test_torch_dist.py", "tests/ranks/test_collectives.py"),
    ),
    Mutation(
        "a stop that only one rank requests is lost",
        "training/vote.py",
        '"sum", name="requests"',
        '"average", name="requests"',
        (TOGETHER,),
    ),
    Mutation(
        "each rank keeps the weights that it made",
        "checkpoint/loader.py",
        'partial(comm.broadcast, name=f"initial_{role}")',
        "list",
        (TOGETHER,),
    ),
    Mutation(
        "a training stops between the batches of an update",
        "engine.py",
        "self._end_step(epoch, batch)",
        "self._end_step(epoch, batch), self._check(current)",
        (TOGETHER,),
    ),
    Mutation(
        "a stop forgets that an evaluation within the epoch is due",
        "engine.py",
        "current.is_evaluation_due = decision.evaluate",
        "current.is_evaluation_due = decision.evaluate and decision.stop is None",
        ("tests/ranks/test_phases.py",),
    ),
    Mutation(
        "parameters are not averaged at the end of an epoch",
        "engine.py",
        "        sync.end_of_epoch(self._learner.state)\n",
        "",
        (TOGETHER,),
    ),
    Mutation(
        "BatchNorm's statistics are not averaged",
        "learner/buffers.py",
        'partial(average, comm, counts=counts, name="statistics")',
        "list",
        ("tests/learner/test_param_average.py",),
    ),
    Mutation(
        "buffers that all ranks have alike are averaged, too",
        "learner/buffers.py",
        "if next(differ)}",
        "if next(differ) or True}",
        ("tests/learner/test_roles.py",),
    ),
    Mutation(
        "0 times the -inf of a rank without a batch",
        "learner/averaging.py",
        "tensor * weight if weight else tensor**0 - 1",
        "tensor * weight",
        ("tests/learner/test_roles.py",),
    ),
    Mutation(
        "averages of weights in bfloat16 are in bfloat16",
        "learner/torch/state.py",
        "torch.float32 if weight.dtype in HALVES else weight.dtype",
        "weight.dtype",
        ("tests/learner/test_roles.py",),
    ),
    Mutation(
        "the velocity of an outer optimizer has the wrong sign",
        "plugins/param_average/outer.py",
        "velocity = self.momentum * moments[0] + gradient",
        "velocity = self.momentum * moments[0] - gradient",
        ("tests/plugins/tensorflow/test_outer.py",),
    ),
    Mutation(
        "changes that were multiplied before sending are not divided afterwards",
        "learner/compression.py",
        "return reduced if gain == 1.0 else [tensor / gain for tensor in reduced]",
        "return reduced",
        ("tests/learner/test_compression.py",),
    ),
    # Updates
    Mutation(
        "the batches of an update before its last one do not count in a mean",
        "learner/torch/gradients.py",
        "if losses is not None:\n            self._count(",
        "if losses is not None and completes_update:\n            self._count(",
        ("tests/learner/test_losses.py",),
    ),
    Mutation(
        "with a sharded optimizer, a rank clips by the norm of its own gradients",
        "learner/torch/update.py",
        "return self._optimizer.norms(list(self._trained.values()), order)",
        "pass",
        ("tests/learner/test_compression.py",),
    ),
    Mutation(
        "TensorFlow forgets the batches of an update before its last one",
        "plugins/tensorflow/graph.py",
        "accumulated = collected if before is None else self._accumulated.add(before, collected, self.exchange)",
        "accumulated = collected",
        (
            "tests/ranks/test_accumulation.py::test_several_batches_are_one_larger_batch_on_any_number_of_ranks"
            "[tensorflow-horovod-2]",
        ),
    ),
    Mutation(
        "the moving average keeps what it should replace",
        "learner/weight_average.py",
        "self._approach(1 - retained_share(self._decay, self.updates, updates))",
        "self._approach(retained_share(self._decay, self.updates, updates))",
        ("tests/learner/test_average.py::test_it_follows_the_weights_and_evaluation_uses_it",),
    ),
    Mutation(
        "an average of models is too large",
        "plugins/average/means.py",
        "total / len(files)",
        "total / (len(files) - 1)",
        ("tests/plugins/average/test_average.py",),
    ),
    # Learning rates, and which epoch is best
    Mutation(
        "the warm-up begins with a learning rate of 0",
        "plugins/schedules/steps.py",
        'warm = step + 1.0 if self.warmup.unit == "steps" else epoch_continuous',
        'warm = float(step) if self.warmup.unit == "steps" else epoch_continuous',
        ("tests/plugins/schedules/test_steps.py",),
    ),
    Mutation(
        "the worst epoch is the best",
        "schedule/measure.py",
        "error < lowest - min_difference",
        "error > lowest - min_difference",
        ("tests/checkpoint/test_best.py",),
    ),
    Mutation(
        "early stopping waits for one epoch too many",
        "schedule/early_stopping.py",
        "history[0] if best is None else best) < patience",
        "history[0] if best is None else best) <= patience",
        ("tests/checkpoint/test_best.py",),
    ),
    # Checkpoints
    Mutation(
        "a checkpoint has its model before its optimizer",
        "checkpoint/folder.py",
        "os.replace(optimizer, target.optimizer_file)\n                os.replace(model, target.model_file)",
        "os.replace(model, target.model_file)\n                os.replace(optimizer, target.optimizer_file)",
        ("tests/checkpoint/test_checkpoint.py",),
    ),
    Mutation(
        "the first models are kept instead of the last ones",
        "plugins/cleanup/rule.py",
        "existing[-self.keep_last_n :]",
        "existing[: self.keep_last_n]",
        ("tests/plugins/cleanup/test_rule.py",),
    ),
    Mutation(
        "the checksum of a model is not compared",
        "learner/integrity.py",
        "return None if _checksum(view, stored[0]) == stored[1] else OTHER_BYTES",
        "return None",
        ("tests/checkpoint/test_damaged.py",),
    ),
    Mutation(
        "an optimizer begins anew after a stop",
        "learner/state_base.py",
        "lines = self._set_optimizer(entries)",
        "lines: list[str] = []",
        ("tests/learner/test_optimizer_state.py",),
    ),
    Mutation(
        "two jobs can hold the lock of a model",
        "checkpoint/lock.py",
        "fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)\n            if",
        "fcntl.lockf(file, fcntl.LOCK_SH | fcntl.LOCK_NB)\n            if",
        ("tests/checkpoint/test_lock.py",),
    ),
    # How a job ends, and what it reports
    Mutation(
        "the watchdog ignores the timeout of the config",
        "plugins/watchdog/watchdog.py",
        "        if self.fixed is not None:\n            return self.fixed\n",
        "",
        ("hvdtrain/plugins/watchdog/watchdog.py",),
    ),
    Mutation(
        "a mistake of the user has the exit status of a crash",
        "errors.py",
        "    outcome = Outcome(2)\n",
        "    outcome = Outcome(1)\n",
        ("tests/config/test_config.py::test_files_that_are_no_config",),
    ),
    Mutation(
        "the computing time includes the time for saving",
        "training/epoch.py",
        'synced = self._timer.seconds.get("parameter sync", 0.0)',
        'synced = sum(self._timer.seconds.get(name, 0.0) for name in ("parameter sync", "saving"))',
        ("tests/training/test_control.py",),
    ),
    Mutation(
        "a text of a config can end the script of a page",
        "plugins/report/page.py",
        '.replace("<", "\\\\u003c")',
        "",
        ("tests/plugins/report/test_report.py::test_what_a_config_says_stays_text",),
    ),
    Mutation(
        "the folder of a submitted job is not quoted",
        "plugins/submit/job.py",
        "cd {shlex.join([job.folder])} || exit",
        "cd {job.folder} || exit",
        ("tests/plugins/submit/test_nasty_values.py",),
    ),
    Mutation(
        "the doctor does not see that two hosts differ",
        "plugins/doctor/findings.py",
        "        if len(hosts) > 1:\n",
        "        if len(hosts) > 2:\n",
        ("hvdtrain/plugins/doctor/findings.py",),
    ),
    Mutation(
        "hvdtrain dump leaves out the last sequence that was asked for",
        "plugins/hdf_tools/dump.py",
        "stop = None if selection.end is None else selection.end + 1",
        "stop = selection.end",
        ("tests/plugins/hdf_tools/test_hdf_dump.py",),
    ),
]


class Copy:
    """A copy of the checkout, in which mutations are made and tests run.

    Args:
        folder: which is empty.
        slow: whether the tests marked slow run as well.
    """

    def __init__(self, folder: Path, slow: bool) -> None:
        self._root = folder / "checkout"
        self._pytest = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-n", "2", "--dist", "loadscope"]
        self._pytest += ["-m", "not cluster" if slow else "not slow and not cluster", "--basetemp", str(folder / "tests")]
        # Programs that tests start would find the installed package otherwise, which is that of the checkout.
        self._environment = {**os.environ, "PYTHONPATH": str(self._root), "PYTHONDONTWRITEBYTECODE": ""}
        self._environment |= {"OMP_NUM_THREADS": "1", "HVDTRAIN_FUZZ_SEED": "1"}

    def make(self) -> None:
        """Copy all files but those that git ignores."""
        listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        for name in subprocess.run(listed, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split("\0"):
            if name and (ROOT / name).is_file():
                (self._root / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, self._root / name)
        for name in ("data", ".venv"):
            (self._root / name).symlink_to(ROOT / name)
        command = [sys.executable, "-c", "import hvdtrain; print(hvdtrain.__file__)"]
        found = subprocess.run(command, cwd="/", env=self._environment, check=True, capture_output=True, text=True).stdout
        if not Path(found).is_relative_to(self._root):
            sys.exit(f"expected programs to import {self._root}/hvdtrain, got {found}")

    @contextmanager
    def mutated(self, mutation: Mutation) -> Iterator[None]:
        """Inside the `with` block, the copy has the defect."""
        path = self._root / "hvdtrain" / mutation.file
        text = path.read_text(encoding="utf-8")
        self._write(path, text.replace(mutation.before, mutation.after))
        try:
            yield
        finally:
            self._write(path, text)

    def test(self, tests: Sequence[str], seconds: float | None) -> tuple[str | None, str]:
        """Run some tests, for at most so many seconds. Returns the first that failed, and why there is no result; None and '' if
        all of them passed."""
        with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as out:  # a pipe would wait for what tests leave
            process = subprocess.Popen(
                [*self._pytest, *tests], cwd=self._root, env=self._environment, stdout=out, stderr=out, start_new_session=True
            )
            try:
                status = process.wait(seconds)
            except subprocess.TimeoutExpired:
                return None, f"the tests did not end within {seconds:g} s"
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGTERM)  # also what the tests have started
                process.wait()
            out.seek(0)
            text = out.read()
        # With -x, several workers end with the status 2 of an interrupt as soon as a test fails.
        failed = re.search(r"^(?:FAILED|ERROR) (\S+::.*?)(?: - .*)?$", text, flags=re.MULTILINE)
        if failed is not None or status in (0, 5):  # 5: all of them are slow
            return (failed[1] if failed else None), ""
        return None, f"pytest ended with status {status}:\n{text[-2000:]}"

    def _write(self, path: Path, text: str) -> None:
        """Replace a file's text. Python recognizes a change only if it was made in another second, or changes the size."""
        path.write_text(text, encoding="utf-8")
        Path(cache_from_source(str(path))).unlink(missing_ok=True)


def select(words: Sequence[str]) -> list[Mutation]:
    """The mutations with these numbers or parts of their names; all, if there are none. Ends the program if one is unknown."""
    selected: list[Mutation] = []
    for word in words:
        found = [
            one for number, one in enumerate(MUTATIONS, 1) if word == str(number) or (word in one.name and not word.isdigit())
        ]
        if not found:
            sys.exit(f"expected the number of a mutation or a part of its name (--list), got {word!r}")
        selected += [one for one in found if one not in selected]
    return selected or MUTATIONS


def check(mutations: Sequence[Mutation]) -> None:
    """End the program if the code of a mutation is not in its file, or there more than once."""
    counts = {one: (ROOT / "hvdtrain" / one.file).read_text(encoding="utf-8").count(one.before) for one in mutations}
    wrong = [f"{one.name}: expected its code once in {one.file}, got it {n} times" for one, n in counts.items() if n != 1]
    if wrong:
        sys.exit("\n".join(wrong))


def run(copy: Copy, mutations: Sequence[Mutation], seconds: float) -> list[str]:
    """Make the mutations one by one, and print which test found each. Returns the names of those that none found."""
    missed = []
    for mutation in mutations:
        print(f"{MUTATIONS.index(mutation) + 1}. {mutation.name}: ", end="", flush=True)
        began = time.monotonic()
        with copy.mutated(mutation):
            failed, problem = copy.test(mutation.tests, seconds)
        missed += [mutation.name] if failed is None else []
        result = f"found by {failed}" if failed else f"ERROR, {problem}" if problem else "NOT FOUND"
        print(f"{result} ({time.monotonic() - began:.0f} s)", flush=True)
    return missed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("mutations", nargs="*", metavar="MUTATION", help="numbers, or parts of names; default: all")
    add("--list", action="store_true", help="print the mutations and run nothing")
    add("--slow", action="store_true", help="also run the tests marked slow")
    add("--unchecked", action="store_true", help="do not run the tests without a mutation first")
    add("--timeout", type=float, default=600.0, metavar="SECONDS", help="for the tests of a mutation (default 600)")
    options = parser.parse_args()
    mutations = select(options.mutations)
    if options.list:
        for number, mutation in enumerate(MUTATIONS, 1):
            print(f"{number}. {mutation.name} (hvdtrain/{mutation.file}: {' '.join(mutation.tests)})")
        return 0
    check(mutations)
    with tempfile.TemporaryDirectory(prefix="hvdtrain-mutations-") as folder:
        copy = Copy(Path(folder), options.slow)
        copy.make()
        if not options.unchecked:
            print("without a mutation: ", end="", flush=True)
            failed, problem = copy.test(list(dict.fromkeys(test for one in mutations for test in one.tests)), None)
            if failed or problem:
                sys.exit(f"expected all tests to pass, got {failed or problem}")
            print("all tests pass", flush=True)
        missed = run(copy, mutations, options.timeout)
    print(f"{len(mutations) - len(missed)} of {len(mutations)} found", *missed, sep="\n  not found: ")
    enough = ENOUGH if len(mutations) == len(MUTATIONS) else len(mutations)
    return 0 if len(mutations) - len(missed) >= enough else 1


if __name__ == "__main__":
    sys.exit(main())
