"""What the tests cost: processor seconds of each, with those of the programs that it started, and the budget of each folder.

The table in CONTRIBUTING.md has the budgets. `make test-times` runs all tests and writes what they took into it.
"""

import json
import re
import resource
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

import pytest

PAGE = Path(__file__).resolve().parent.parent / "CONTRIBUTING.md"
HEADER = (
    "| folder of tests/ | tests | CPU s in `make test` | CPU s in `make test-all` | budget of these |\n|---|---|---|---|---|\n"
)
ROW = re.compile(r"^\| (\w+) \| \d+ \| \d+ \| \d+ \| (\d+) \|\n", re.MULTILINE)

CPU = "cpu"
"""The property of a test's last report that has its processor seconds."""


def used() -> float:
    """Processor seconds of this process, and of the processes that it has waited for."""
    both = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(one.ru_utime + one.ru_stime for one in both)


def folder_of(nodeid: str) -> str:
    """The folder of tests/ that a test is in; doctests of the package, and the files of tests/ itself, count as folders.

    >>> [folder_of(name) for name in ("tests/data/plan/test_order.py::test_a[1]", "tests/test_a.py::test_a", "hvdtrain/a.py::a")]
    ['data', 'tests', 'doctests']
    """
    parts = PurePath(nodeid.split("::")[0]).parts
    return "doctests" if parts[0] != "tests" else parts[1] if len(parts) > 2 else "tests"


@dataclass(frozen=True)
class Cost:
    """Of a test, or of several: seconds, processor seconds, and of these those of tests that are not slow."""

    tests: int
    seconds: float
    cpu: float
    fast_cpu: float


def by_folder(costs: Mapping[str, Cost]) -> dict[str, Cost]:
    """The costs of each folder, the most expensive first."""
    found: dict[str, list[Cost]] = defaultdict(list)
    for nodeid, cost in costs.items():
        found[folder_of(nodeid)].append(cost)
    sums = {
        name: Cost(
            sum(one.tests for one in several),
            sum(one.seconds for one in several),
            sum(one.cpu for one in several),
            sum(one.fast_cpu for one in several),
        )
        for name, several in found.items()
    }
    return dict(sorted(sums.items(), key=lambda item: -item[1].cpu))


def budgets(page: str) -> dict[str, int]:
    """The processor seconds that each folder may take in `make test-all`, from the table in CONTRIBUTING.md."""
    return {name: int(most) for name, most in ROW.findall(page)}


def with_table(page: str, costs: Mapping[str, Cost]) -> str:
    """CONTRIBUTING.md with other costs in its table; a folder without a budget gets what it takes.

    >>> changed = with_table(f"{HEADER}| comm | 1 | 2 | 3 | 5 |\\nb\\n", {"tests/comm/test_a.py::a": Cost(1, 2.0, 4.4, 1.2)})
    >>> changed.removeprefix(HEADER)
    '| comm | 1 | 1 | 4 | 5 |\\nb\\n'
    """
    most = budgets(page)
    rows = [
        f"| {name} | {cost.tests} | {cost.fast_cpu:.0f} | {cost.cpu:.0f} | {most.get(name, round(cost.cpu) + 1)} |\n"
        for name, cost in by_folder(costs).items()
    ]
    before, _, after = page.partition(HEADER)
    return before + HEADER + "".join(rows) + ROW.sub("", after)


class Times:
    """A plug-in of pytest: measures in the processes that run tests, and collects in the main process."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = defaultdict(float)
        self._cpu: dict[str, float] = {}
        self._slow: set[str] = set()
        self._apart: dict[str, float] = {}

    @contextmanager
    def counted_for(self, name: str) -> Iterator[None]:
        """What is used inside counts for this name, such as tests/cluster/conftest.py::hosts, and not for a test."""
        before = used()
        yield
        self._apart[name] = used() - before

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        item.stash[STARTED] = used()
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
        report: Any = yield
        if call.when == "teardown":
            report.user_properties.append((CPU, used() - item.stash[STARTED] - sum(self._apart.values())))
            report.user_properties += [(f"{CPU} of {name}", cpu) for name, cpu in self._apart.items()]
            self._apart.clear()
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds[report.nodeid] += report.duration
        properties = dict(report.user_properties)  # the last report has them
        self._cpu[report.nodeid] = properties.pop(CPU, 0.0)
        for name, cpu in properties.items():
            if name.startswith(f"{CPU} of "):
                apart = name.removeprefix(f"{CPU} of ")
                self._seconds[apart], self._cpu[apart] = 0.0, self._cpu.get(apart, 0.0) + cpu
                self._slow.add(apart)
        if "slow" in report.keywords:
            self._slow.add(report.nodeid)

    def costs(self) -> dict[str, Cost]:
        """By test."""
        found = {}
        for nodeid, seconds in self._seconds.items():
            cpu = self._cpu.get(nodeid, 0.0)
            found[nodeid] = Cost(1, seconds, cpu, 0.0 if nodeid in self._slow else cpu)
        return found

    def lines(self) -> list[str]:
        """What each folder took, with its budget."""
        most = budgets(PAGE.read_text())
        lines = [f"{'folder':16}{'tests':>6}{'seconds':>9}{'CPU s':>8}{'budget':>8}"]
        for name, cost in by_folder(self.costs()).items():
            over = "  over budget" if cost.cpu > most.get(name, float("inf")) else ""
            lines.append(f"{name:16}{cost.tests:6}{cost.seconds:9.0f}{cost.cpu:8.0f}{most.get(name, ''):>8}{over}")
        total = sum(cost.cpu for cost in self.costs().values())
        return [*lines, f"{'all':16}{len(self._seconds):6}{'':9}{total:8.0f}{sum(most.values()):8}"]

    def write(self, path: Path) -> None:
        """Every test's costs, as `read` reads them."""
        path.write_text(json.dumps({nodeid: vars(cost) for nodeid, cost in self.costs().items()}))


STARTED = pytest.StashKey[float]()


def main() -> None:
    """`times.py FILE...`: put what these runs took into the table in CONTRIBUTING.md."""
    costs: dict[str, Cost] = {}
    for path in sys.argv[1:]:
        costs |= {nodeid: Cost(**cost) for nodeid, cost in json.loads(Path(path).read_text()).items()}
    PAGE.write_text(with_table(PAGE.read_text(), costs))


if __name__ == "__main__":
    main()
