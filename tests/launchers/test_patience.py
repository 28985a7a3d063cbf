"""Ranks that wait for another one's long work, on two ranks of a real Horovod."""

from launching import ROOT, Finished, launch


def patient(*how: str) -> Finished:
    return launch([str(ROOT / "tests" / "patient.py"), *how], ranks=2)


def test_nobody_is_taken_for_hung_while_another_rank_works_and_its_error_is_raised_on_all() -> None:
    finished = patient("progress", "error")
    assert finished.status == 0, finished.err
    assert sorted(finished.out.splitlines()) == [
        "0 error rank 1: planted by the test True",
        "0 progress (10, [10, 11])",
        "1 error rank 1: planted by the test True",
        "1 progress (11, [10, 11])",
    ]
    assert finished.seconds > 4


def test_work_without_progress_ends_the_job() -> None:
    finished = patient("silence")
    assert finished.status != 0
    assert "no progress for 1 s (watchdog_timeout) in working" in finished.err
    assert finished.seconds < 30
