"""What the watchdogs of several ranks tell each other, over real datagrams."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
from launching import ROOT
from thread_ranks import on_ranks

from hvdtrain.runtime import heartbeats
from hvdtrain.runtime.heartbeats import ENDED, FAILED, Heartbeats, Sign, Verdict, judge, meet
from hvdtrain.runtime.processes import Process

PATIENCE = 60.0
FINE = Sign("epoch 1, step 5", 0.1, 6, False, False)
WAITS = Sign("epoch 1, step 5", 20.0, 6, True, True)
JUST_WAITS = Sign("epoch 1, step 5", 4.0, 6, True, False)
HANGS = Sign("epoch 1, step 5", 20.0, 6, False, True)


@pytest.fixture
def ranks() -> Iterator[list[Heartbeats]]:
    """Three ranks, whose watchdogs have met."""
    met = on_ranks(3, lambda comm: meet(comm.rank, ["127.0.0.1"], lambda own: comm.gather(own, name="watchdog")))
    yield met
    for rank in met:
        rank.close()


def until(ranks: list[Heartbeats], signs: list[Sign | None], wanted: dict[int, Verdict | None]) -> None:
    """Let those with a sign tell it, until the ranks conclude what is wanted; rank 0 tells the others."""
    deadline = time.monotonic() + PATIENCE
    found: dict[int, Verdict | None] = {}
    while found != wanted:
        assert time.monotonic() < deadline, found
        for rank, sign in zip(ranks, signs, strict=True):
            if sign is not None:
                rank.tell(sign)
                rank.listen(0.02)
        found = {number: ranks[number].conclude(signs[number] or FINE) for number in wanted}
        if 0 in wanted:
            ranks[0].tell_all(found[0])


def test_rank_0_finds_who_hangs_and_tells_it(ranks: list[Heartbeats]) -> None:
    until(ranks, [FINE, FINE, FINE], {0: None, 1: None, 2: None})
    verdict = Verdict((1,))
    until(ranks, [WAITS, HANGS, WAITS], {0: verdict, 1: verdict, 2: verdict})
    assert not ranks[1].decides
    text = ranks[0].describe(verdict, WAITS)
    assert text is not None
    assert text.startswith(f"rank 1 on {socket.gethostname()} hangs: no progress for 2")
    assert text.endswith("s (watchdog_timeout) in epoch 1, step 5; 2 ranks wait for it")
    assert ranks[1].describe(verdict, HANGS) is None  # rank 0 says it
    until(ranks, [FINE, FINE, FINE], {0: None, 1: None, 2: None})  # it came back


def test_a_rank_of_which_nothing_is_heard_is_named(ranks: list[Heartbeats], monkeypatch: pytest.MonkeyPatch) -> None:
    until(ranks, [FINE, FINE, FINE], {0: None, 1: None, 2: None})
    monkeypatch.setattr(heartbeats, "SILENT", 0.5)
    until(ranks, [WAITS, None, WAITS], {0: Verdict(silent=(1,)), 2: Verdict(silent=(1,))})
    text = ranks[0].describe(Verdict(silent=(1,)), WAITS) or ""
    assert text.startswith(f"rank 1 on {socket.gethostname()} has given no sign of life for ")
    assert f"(last in epoch 1, step 5): its process {os.getpid()} runs" in text
    # The same for rank 0, which the others find out each for itself.
    until(ranks, [None, WAITS, WAITS], {1: Verdict(silent=(0,)), 2: Verdict(silent=(0,))})
    assert "rank 0 on " in (ranks[2].describe(Verdict(silent=(0,)), WAITS) or "")


def test_a_rank_that_has_ended_is_not_missed(ranks: list[Heartbeats], monkeypatch: pytest.MonkeyPatch) -> None:
    until(ranks, [FINE, FINE, FINE], {0: None, 1: None, 2: None})
    ranks[2].tell(ENDED)
    ranks[0].listen(0.2)
    monkeypatch.setattr(heartbeats, "SILENT", 0.5)
    time.sleep(0.6)
    until(ranks, [HANGS, FINE, None], {0: Verdict((0,))})
    ranks[0].tell(ENDED)
    deadline = time.monotonic() + PATIENCE
    while not ranks[1].decides:
        assert time.monotonic() < deadline
        ranks[1].listen(0.1)
    assert ranks[1].conclude(HANGS) == Verdict((1,))


def test_a_rank_that_has_failed_is_not_waited_for(ranks: list[Heartbeats]) -> None:
    until(ranks, [FINE, FINE, FINE], {0: None, 1: None, 2: None})
    ranks[1].tell(FAILED)
    until(ranks, [FINE, None, FINE], {0: None, 2: None})  # nobody waits
    gone = Verdict(gone=(1,), ends=True)
    until(ranks, [FINE, None, JUST_WAITS], {0: gone, 2: gone})
    text = f"rank 1 on {socket.gethostname()} has ended: the other ranks wait for it in vain, and end, too"
    assert ranks[0].describe(gone, FINE) == text
    ranks[0].tell(FAILED)
    deadline = time.monotonic() + PATIENCE
    while not ranks[2].decides:
        assert time.monotonic() < deadline
        ranks[2].listen(0.1)
    assert ranks[2].conclude(FINE) is None
    assert ranks[2].conclude(JUST_WAITS) == Verdict(gone=(0,), ends=True)


def test_a_rank_that_ended_without_a_word_is_not_waited_for(ranks: list[Heartbeats], monkeypatch: pytest.MonkeyPatch) -> None:
    """Its port tells. One that is stopped has it, still."""
    until(ranks, [FINE, FINE, FINE], {0: None, 1: None, 2: None})
    monkeypatch.setattr(heartbeats, "SILENT", 0.5)
    ranks[1].close()
    gone = Verdict(gone=(1,), ends=True)
    until(ranks, [JUST_WAITS, None, FINE], {0: gone, 2: gone})
    ranks[0].together = False
    assert ranks[0].conclude(JUST_WAITS) is None
    ranks[0].close()
    time.sleep(0.6)
    assert ranks[2].conclude(JUST_WAITS) == Verdict(gone=(0,), ends=True)


def test_what_others_send_is_no_concern_of_theirs(ranks: list[Heartbeats]) -> None:
    port = ranks[0].contacts[0].port
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as other:
        for data in (b"", b"\xff", b"[]", b"1", b'["token", 1, "ended"]', f'["{ranks[0].contacts[0].token}", 1, 5]'.encode()):
            other.sendto(data, ("127.0.0.1", port or 0))
    until(ranks, [FINE, FINE, FINE], {0: None, 1: None, 2: None})


def test_who_is_behind_hangs_where_no_rank_is_seen_to_wait() -> None:
    """With NCCL, ranks run ahead of their collectives, and wait for their GPU."""
    assert judge({0: HANGS, 1: Sign("epoch 1, step 4", 20.0, 5, False, True), 2: HANGS}, ()) == Verdict((1,))
    assert judge({0: WAITS, 1: WAITS}, ()) == Verdict((0, 1))  # each of them may
    assert judge({0: WAITS, 1: FINE}, ()) == Verdict((0, 1))  # rank 1 makes progress, just not what rank 0 waits for


def test_states_of_processes() -> None:
    sleeper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], cwd=ROOT)
    own = Process.of(os.getpid())
    process = Process.of(sleeper.pid)
    deadline = time.monotonic() + PATIENCE
    while process.describe() is not None:  # it may be reading its program from a disk
        assert time.monotonic() < deadline
    process.send(signal.SIGSTOP)
    while process.describe() != "is stopped (SIGSTOP)":
        assert time.monotonic() < deadline
    process.send(signal.SIGKILL)
    sleeper.wait()
    assert process.describe() == "has ended"
    assert Process(own.pid, own.place, "1").describe() == "has ended"  # another process with its id
