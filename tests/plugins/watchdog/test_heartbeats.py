"""The watchdogs of several ranks exchange heartbeats over real datagrams."""

import os
import random
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
from fuzzing import SEED, cases
from launching import ROOT
from strangers import hostile
from thread_ranks import on_ranks

from hvdtrain.plugins.watchdog import heartbeats, peers, relays
from hvdtrain.plugins.watchdog.diagnosis import Diagnosis, Heartbeat, diagnose
from hvdtrain.plugins.watchdog.hanging import describe
from hvdtrain.plugins.watchdog.heartbeats import ENDED, FAILED, Contact, Heartbeats
from hvdtrain.plugins.watchdog.open import exchange_contacts
from hvdtrain.plugins.watchdog.peers import LOOPBACK, Datagrams, RankProcess
from hvdtrain.plugins.watchdog.relays import Layout, ranges_text, ranks_in

PATIENCE = 60.0
FINE = Heartbeat("epoch 1, step 5", 0.1, 6, False, False)
WAITS = Heartbeat("epoch 1, step 5", 20.0, 6, True, True)
JUST_WAITS = Heartbeat("epoch 1, step 5", 4.0, 6, True, False)
HANGS = Heartbeat("epoch 1, step 5", 20.0, 6, False, True)


@pytest.fixture
def ranks() -> Iterator[list[Heartbeats]]:
    """Three ranks, whose watchdogs have met."""
    met = on_ranks(3, lambda comm: exchange_contacts(comm.rank, ["127.0.0.1"], lambda own: comm.gather(own, name="watchdog")))
    yield met
    for rank in met:
        rank.close()


def until(ranks: list[Heartbeats], beats: list[Heartbeat | None], wanted: dict[int, Diagnosis | None]) -> None:
    """Let the ranks send these heartbeats until they reach the wanted diagnoses; rank 0 broadcasts its own."""
    deadline = time.monotonic() + PATIENCE
    found: dict[int, Diagnosis | None] = {}
    while found != wanted:
        assert time.monotonic() < deadline, found
        for rank, beat in zip(ranks, beats, strict=True):
            if beat is not None:
                rank.send(beat)
                rank.listen(0.02)
        found = {number: ranks[number].conclude(beats[number] or FINE) for number in wanted}
        if 0 in wanted:
            ranks[0].broadcast(found[0])


def wait_until(is_so: Callable[[], object], do: Callable[[], object] = lambda: None) -> None:
    """Do something again and again until something is so."""
    deadline = time.monotonic() + PATIENCE
    while not is_so():
        assert time.monotonic() < deadline
        do()


def for_two_seconds(ranks: list[Heartbeats], beats: list[Heartbeat | None], wanted: dict[int, Diagnosis | None]) -> None:
    """As `until`, again and again."""
    end = time.monotonic() + 2
    wait_until(lambda: time.monotonic() > end, lambda: until(ranks, beats, wanted))


def until_they_meet(ranks: list[Heartbeats]) -> None:
    """Until rank 0 has answered all others."""
    while any(rank.decides for rank in ranks[1:]):
        until(ranks, [FINE] * len(ranks), {rank.rank: None for rank in ranks})


def test_rank_0_finds_who_hangs_and_tells_it(ranks: list[Heartbeats]) -> None:
    until(ranks, [FINE, FINE, FINE], {0: None, 1: None, 2: None})
    diagnosis = Diagnosis((1,))
    until(ranks, [WAITS, HANGS, WAITS], {0: diagnosis, 1: diagnosis, 2: diagnosis})
    assert not ranks[1].decides
    text = describe(ranks[0], diagnosis, WAITS)
    assert text is not None
    assert text.startswith(f"rank 1 on {socket.gethostname()} hangs: no progress for 2")
    assert text.endswith("s (watchdog_timeout) in epoch 1, step 5; 2 ranks wait for it")
    assert describe(ranks[1], diagnosis, HANGS) is None  # rank 0 says it
    until(ranks, [FINE, FINE, FINE], {0: None, 1: None, 2: None})  # it came back


def test_a_rank_of_which_nothing_is_heard_is_named(ranks: list[Heartbeats], monkeypatch: pytest.MonkeyPatch) -> None:
    until(ranks, [FINE, FINE, FINE], {0: None, 1: None, 2: None})
    monkeypatch.setattr(heartbeats, "SILENT", 0.5)
    until(ranks, [WAITS, None, WAITS], {0: Diagnosis(silent=(1,)), 2: Diagnosis(silent=(1,))})
    text = describe(ranks[0], Diagnosis(silent=(1,)), WAITS) or ""
    assert text.startswith(f"rank 1 on {socket.gethostname()} has sent no heartbeat for ")
    assert f"(last in epoch 1, step 5): its process {os.getpid()} is running" in text
    # The same for rank 0, which the others find out each for itself.
    until(ranks, [None, WAITS, WAITS], {1: Diagnosis(silent=(0,)), 2: Diagnosis(silent=(0,))})
    assert "rank 0 on " in (describe(ranks[2], Diagnosis(silent=(0,)), WAITS) or "")


def test_a_rank_that_has_ended_is_not_missed(ranks: list[Heartbeats], monkeypatch: pytest.MonkeyPatch) -> None:
    until(ranks, [FINE, FINE, FINE], {0: None, 1: None, 2: None})
    ranks[2].send(ENDED)
    ranks[0].listen(0.2)
    monkeypatch.setattr(heartbeats, "SILENT", 0.5)
    time.sleep(0.6)
    until(ranks, [HANGS, FINE, None], {0: Diagnosis((0,))})
    ranks[0].send(ENDED)
    wait_until(lambda: ranks[1].decides, lambda: ranks[1].listen(0.1))
    assert ranks[1].conclude(HANGS) == Diagnosis((1,))


def test_a_rank_that_has_failed_is_not_waited_for(ranks: list[Heartbeats]) -> None:
    until(ranks, [FINE, FINE, FINE], {0: None, 1: None, 2: None})
    ranks[1].send(FAILED)
    until(ranks, [FINE, None, FINE], {0: None, 2: None})  # nobody waits
    gone = Diagnosis(gone=(1,), ends=True)
    until(ranks, [FINE, None, JUST_WAITS], {0: gone, 2: gone})
    text = f"rank 1 on {socket.gethostname()} has ended: the remaining ranks are blocked on it and will exit"
    assert describe(ranks[0], gone, FINE) == text
    ranks[0].send(FAILED)
    wait_until(lambda: ranks[2].decides, lambda: ranks[2].listen(0.1))
    assert ranks[2].conclude(FINE) is None
    assert ranks[2].conclude(JUST_WAITS) == Diagnosis(gone=(0,), ends=True)


def test_who_is_slow_to_disconnect_does_not_take_the_others_for_gone(ranks: list[Heartbeats]) -> None:
    until(ranks, [FINE, FINE, FINE], {0: None, 1: None, 2: None})
    ranks[1].send(FAILED)
    until(ranks, [JUST_WAITS, None, FINE], {0: Diagnosis(gone=(1,), ends=True)})
    ranks[2].send(ENDED)  # as all ranks are about to
    until(ranks, [JUST_WAITS, None, None], {0: None})


def test_a_rank_that_ended_without_a_word_is_not_waited_for(ranks: list[Heartbeats], monkeypatch: pytest.MonkeyPatch) -> None:
    """Its port tells. One that is stopped has it, still."""
    until(ranks, [FINE, FINE, FINE], {0: None, 1: None, 2: None})
    monkeypatch.setattr(heartbeats, "SILENT", 0.5)
    ranks[1].close()
    gone = Diagnosis(gone=(1,), ends=True)
    until(ranks, [JUST_WAITS, None, FINE], {0: gone, 2: gone})
    ranks[0].together = False
    assert ranks[0].conclude(JUST_WAITS) is None
    ranks[0].close()
    until(ranks, [None, None, JUST_WAITS], {2: Diagnosis(gone=(0,), ends=True)})


def test_who_has_ended_waits_for_nobody() -> None:
    assert diagnose({0: FINE, 1: JUST_WAITS}, {1}, {1}) is None
    assert diagnose({0: JUST_WAITS, 1: JUST_WAITS}, {1}, {1}) == Diagnosis(gone=(1,), ends=True)


def test_a_rank_of_the_same_host_that_has_ended_is_seen_without_datagrams() -> None:
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], cwd=ROOT)
    processes = [RankProcess.of_pid(os.getpid()), RankProcess.of_pid(os.getpid()), RankProcess.of_pid(other.pid)]
    contacts = [Contact(socket.gethostname(), process, (), None, "token") for process in processes]
    for rank in (0, 1):
        assert Heartbeats(rank, contacts).conclude(JUST_WAITS) is None
    other.kill()
    os.waitid(os.P_PID, other.pid, os.WEXITED | os.WNOWAIT)  # its launcher does not know it yet
    for rank in (0, 1):
        assert Heartbeats(rank, contacts).conclude(JUST_WAITS) == Diagnosis(gone=(2,), ends=True)
    other.wait()
    assert Heartbeats(0, contacts).conclude(JUST_WAITS) == Diagnosis(gone=(2,), ends=True)
    elsewhere = [*contacts[:2], replace(contacts[2], host="another host")]
    assert Heartbeats(0, elsewhere).conclude(JUST_WAITS) is None


def elsewhere(own: Contact | str, rank: int) -> Contact | str:
    """What a rank says of itself, or of its network first, as if it was on a host of its own."""
    return replace(own, host=f"host{rank}") if isinstance(own, Contact) else f"network {rank}"


def test_names_are_looked_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a name server, each time would take many seconds."""

    ranks = on_ranks(
        2,
        lambda comm: exchange_contacts(
            comm.rank, ["localhost"], lambda own: comm.gather(elsewhere(own, comm.rank), name="watchdog")
        ),
    )

    def refuse(name: str) -> str:
        raise AssertionError(name)

    monkeypatch.setattr(socket, "gethostbyname", refuse)
    monkeypatch.setattr(heartbeats, "SILENT", 0.5)
    until_they_meet(ranks)
    until(ranks, [None, WAITS], {1: Diagnosis(silent=(0,))})
    until_they_meet(ranks)
    for rank in ranks:
        rank.close()


class Lost:
    """Ranks on hosts of their own, which are addresses of the loopback network. A host is lost by listening on the port on which
    others ask it: its kernel then answers nothing.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, number: int = 3, layout: Layout | None = None) -> None:
        for name, seconds in (("ASK_EVERY", 0.05), ("SECONDS_TO_ANSWER", 0.5)):
            monkeypatch.setattr(peers, name, seconds)
        monkeypatch.setattr(heartbeats, "SILENT", 0.5)
        self.addresses = [f"127.0.0.{rank + 2}" for rank in range(number)]
        self._sockets = [self._bound(rank) for rank in range(number)]
        self._monkeypatch = monkeypatch
        datagrams = [Datagrams(udp) for udp in self._sockets]
        contacts = [
            Contact(f"host{rank}", RankProcess.of_pid(os.getpid()), (), datagrams[rank].port, "token") for rank in range(number)
        ]
        first = [(self.addresses[0], datagrams[0].port), ("127.0.0.99", 1)]  # one of its names leads nowhere
        self.ranks = [Heartbeats(rank, contacts, datagrams[rank], first, restarts=True, layout=layout) for rank in range(number)]
        for rank in self.ranks:
            rank.hub_addresses = [(self.addresses[rank.hub], datagrams[rank.hub].port)]

    def _bound(self, rank: int) -> socket.socket:
        udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        udp.bind((self.addresses[rank], 0))
        return udp

    def lose(self, rank: int) -> socket.socket:
        """What gets the questions."""
        self._sockets.append(self._bound(rank))
        self._sockets[-1].setblocking(False)
        self._monkeypatch.setattr(peers, "CLOSED_PORT", self._sockets[-1].getsockname()[1])
        return self._sockets[-1]

    def close(self) -> None:
        for udp in self._sockets:
            udp.close()


@pytest.fixture
def lost(monkeypatch: pytest.MonkeyPatch) -> Iterator[Lost]:
    """Three ranks on three hosts, whose watchdogs have met."""
    made = Lost(monkeypatch)
    hosts = [(rank, host) for rank in made.ranks for host in made.addresses if (rank.rank == 0) != (host == made.addresses[0])]
    wait_until(
        lambda: all(rank.datagrams and rank.datagrams.hosts[host].answers for rank, host in hosts),
        lambda: until(made.ranks, [FINE, FINE, FINE], {0: None, 1: None, 2: None}),
    )
    yield made
    made.close()


@pytest.fixture
def many(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Heartbeats]]:
    """Nine ranks, whose watchdogs have met. 3 and 6 are relays for the two ranks after them, and 0 is for 1 and 2."""
    monkeypatch.setattr(relays, "DIRECT", 4)
    monkeypatch.setattr(relays, "RANKS_OF_HOST", 1)
    met = on_ranks(9, lambda comm: exchange_contacts(comm.rank, ["127.0.0.1"], lambda own: comm.gather(own, name="watchdog")))
    until_they_meet(met)
    until(met, [FINE] * 9, {0: None})
    yield met
    for rank in met:
        rank.close()


def of_nine(special: dict[int, Heartbeat | None], others: Heartbeat = WAITS) -> list[Heartbeat | None]:
    return [special.get(rank, others) for rank in range(9)]


def test_in_a_large_job_rank_0_hears_from_relays(many: list[Heartbeats]) -> None:
    assert [sorted(rank.last) for rank in many] == [[1, 2, 3, 6], [0], [0], [0, 4, 5], [3], [3], [0, 7, 8], [6], [6]]
    assert [many[0]._groups[relay].members for relay in (3, 6)] == [None, None]  # all is well
    diagnosis = Diagnosis((5,))
    until(many, of_nine({5: HANGS}), dict.fromkeys((0, 4, 5, 6, 8), diagnosis))
    assert sorted(many[0].last) == list(range(1, 9))
    assert (describe(many[0], diagnosis, WAITS) or "").endswith(" in epoch 1, step 5; 8 ranks wait for it")
    until(many, of_nine({}, FINE), dict.fromkeys(range(9)))  # it came back


def test_without_news_of_all_ranks_no_rank_is_blamed(many: list[Heartbeats], monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 hears from its own group first that all of it waits, and from a relay only then which rank the others wait for."""
    for rank in (1, 2):
        many[rank].send(WAITS)
    many[0].listen(0.1)
    assert many[0].conclude(WAITS) is None
    until(many, of_nine({7: HANGS}), {0: Diagnosis((7,))})


def test_ranks_behind_a_relay_that_is_stopped_go_to_rank_0(many: list[Heartbeats], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeats, "SILENT", 0.5)
    until(many, of_nine({3: None}), dict.fromkeys((0, 1, 4, 5, 8), Diagnosis(silent=(3,))))
    assert (describe(many[0], Diagnosis(silent=(3,)), WAITS) or "").startswith("rank 3 on ")
    monkeypatch.setattr(heartbeats, "SILENT", 5.0)
    monkeypatch.setattr(heartbeats, "SECONDS_OF_DETAILS", 0.1)

    def go_on() -> None:
        until(many, of_nine({}, FINE), dict.fromkeys(range(9)))
        monkeypatch.setattr(heartbeats, "SILENT", 1.0)
        many[0]._details_until = 0.0

    wait_until(lambda: [sorted(many[rank].last) for rank in (0, 4, 5)] == [[1, 2, 3, 6], [3], [3]], go_on)  # all is as before


def test_a_relay_tells_who_has_failed_or_ended_without_a_word(many: list[Heartbeats], monkeypatch: pytest.MonkeyPatch) -> None:
    many[8].send(FAILED)
    until(many, of_nine({8: None}, FINE), {0: None})  # nobody waits
    until(many, of_nine({8: None}, JUST_WAITS), dict.fromkeys((0, 1, 3, 5, 7), Diagnosis(gone=(8,), ends=True)))
    monkeypatch.setattr(heartbeats, "SILENT", 0.5)
    many[4].close()
    until(many, of_nine({4: None, 8: None}, JUST_WAITS), dict.fromkeys((0, 3, 5, 7), Diagnosis(gone=(4, 8), ends=True)))


def test_when_rank_0_fails_relays_tell_their_ranks(many: list[Heartbeats]) -> None:
    many[0].send(FAILED)
    gone = Diagnosis(gone=(0,), ends=True)

    def go_on() -> None:
        for rank in many[1:]:
            rank.send(JUST_WAITS)
            rank.listen(0.02)
            if rank.decides:
                rank.broadcast(rank.conclude(JUST_WAITS))

    wait_until(lambda: all(rank.conclude(JUST_WAITS) == gone for rank in many[1:]), go_on)


def test_a_relay_finds_a_host_that_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    four = Lost(monkeypatch, 4, Layout(4, 2))
    wait_until(
        lambda: four.ranks[2].datagrams and four.ranks[2].datagrams.hosts[four.addresses[3]].answers,
        lambda: until(four.ranks, [FINE] * 4, dict.fromkeys(range(4))),
    )
    four.lose(3)
    gone = Diagnosis(gone=(3,), ends=True)
    until(four.ranks, [JUST_WAITS, JUST_WAITS, JUST_WAITS, None], dict.fromkeys(range(3), gone))
    assert (describe(four.ranks[0], gone, JUST_WAITS) or "").startswith("host3 with rank 3 has not answered for ")
    four.close()


@pytest.mark.parametrize("size", [1, 2, 200, 201, 256, 1000, 16384, 16385])
def test_every_rank_has_one_hub_and_none_hears_from_many(size: int) -> None:
    layout = Layout.of(size)
    senders = {hub: layout.senders(hub) for hub in range(size) if layout.is_hub(hub)}
    assert sorted(rank for below in senders.values() for rank in below) == list(range(1, size))
    assert {rank for hub, below in senders.items() for rank in below if layout.hub_of(rank) != hub} == set()
    assert max(map(len, senders.values())) == layout.most_senders == len(senders[0])
    assert layout.most_senders <= max(200, 2.2 * size**0.5)


def test_ranks_as_text_fit_into_a_datagram() -> None:
    for ranks in ((), (3,), tuple(range(20000)), tuple(range(0, 20000, 2)), (0, 1, 5, 6, 7, 9)):
        text = ranges_text(ranks)
        assert ranks_in(text) == ranks
        assert len(text) < 60000


def number_of_questions(asked: socket.socket) -> int:
    number = 0
    while True:
        try:
            asked.recv(100)
            number += 1
        except BlockingIOError:
            return number


def test_a_host_that_does_not_answer_is_lost(lost: Lost) -> None:
    lost.lose(1)
    gone = Diagnosis(gone=(1,), ends=True)
    until(lost.ranks, [JUST_WAITS, None, JUST_WAITS], {0: gone, 2: gone})
    text = describe(lost.ranks[0], gone, JUST_WAITS) or ""
    assert text.startswith("host1 with rank 1 has not answered for ")
    assert text.endswith(
        " s, so it has lost power or its network connection: the remaining ranks are blocked on it and will exit"
    )
    for_two_seconds(lost.ranks, [JUST_WAITS, None, None], {0: gone})  # rank 2 is silent, too, but its host answers
    lost.ranks[0].restarts = False
    assert lost.ranks[0].conclude(JUST_WAITS) is None
    lost.ranks[0].restarts = True
    until(lost.ranks, [JUST_WAITS, FINE, FINE], {0: None, 2: None})  # it was a short outage


def test_the_host_of_rank_0_is_lost(lost: Lost) -> None:
    lost.lose(0)
    gone = Diagnosis(gone=(0,), ends=True)
    until(lost.ranks, [None, JUST_WAITS, JUST_WAITS], {1: gone, 2: gone})
    assert (describe(lost.ranks[2], gone, JUST_WAITS) or "").startswith("host0 with rank 0 has not answered for ")


def test_the_host_of_rank_0_answers_that_it_has_ended(lost: Lost) -> None:
    lost.ranks[0].close()
    gone = Diagnosis(gone=(0,), ends=True)
    until(lost.ranks, [None, JUST_WAITS, JUST_WAITS], {1: gone, 2: gone})
    assert (describe(lost.ranks[2], gone, JUST_WAITS) or "").startswith("rank 0 on host0 has ended: ")


def test_a_host_is_asked_before_it_is_lost(lost: Lost, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where signs of life come so seldom that silence alone takes longer than an answer may."""
    monkeypatch.setattr(heartbeats, "MANY", 1)
    asked = lost.lose(1)
    began = time.monotonic()
    wait_until(lambda: lost.ranks[0].conclude(JUST_WAITS) is not None, lambda: lost.ranks[0].listen(0.02))
    assert number_of_questions(asked) > 10
    assert time.monotonic() - began > 3 * 0.5 + 0.5  # silent after three times as long; then half a second to answer
    lost.ranks[0].reset_silence()  # it was suspended, so it cannot tell
    assert lost.ranks[0].conclude(JUST_WAITS) is None


def test_a_host_behind_a_firewall_that_never_answers_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    behind = Lost(monkeypatch)
    asked = behind.lose(1)
    until_they_meet(behind.ranks)
    for_two_seconds(behind.ranks, [JUST_WAITS, FINE, FINE], {0: None})
    for_two_seconds(behind.ranks, [JUST_WAITS, None, FINE], {0: None})
    assert number_of_questions(asked) == 10  # and is left alone
    behind.close()


def send_to_all(ranks: list[Heartbeats], datagrams: list[bytes]) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stranger:
        for datagram in datagrams:
            for contact in ranks[0].contacts:
                stranger.sendto(datagram, (LOOPBACK, contact.port or 0))


@pytest.mark.fuzz
@pytest.mark.parametrize("case", range(cases(3)))
def test_what_strangers_send_is_not_even_parsed(ranks: list[Heartbeats], monkeypatch: pytest.MonkeyPatch, case: int) -> None:
    """Valid signs of life count still, and a rank that gives none is found, though those that it gave are sent again."""
    generator = random.Random(SEED + case)
    recorded: list[bytes] = []
    send = Datagrams.send
    monkeypatch.setattr(Datagrams, "send", lambda self, data, address: (recorded.append(data), send(self, data, address)))
    until_they_meet(ranks)
    monkeypatch.setattr(Datagrams, "send", send)
    known = [datagram for datagram in recorded if datagram]
    nested = [b"[" * 2000, known[0][:32] + b"[" * 2000]
    send_to_all(ranks, nested + [hostile(generator, known) for _ in range(30)])
    until(ranks, [WAITS, HANGS, WAITS], dict.fromkeys(range(3), Diagnosis((1,))))
    until(ranks, [FINE, FINE, FINE], dict.fromkeys(range(3)))
    monkeypatch.setattr(heartbeats, "SILENT", 0.5)

    def replay() -> None:
        send_to_all(ranks, known)
        ranks[2].send(WAITS)
        for rank in (ranks[0], ranks[2]):
            rank.listen(0.02)

    wait_until(lambda: ranks[0].conclude(WAITS) == Diagnosis(silent=(1,)), replay)


def test_ranks_of_one_host_listen_where_no_other_host_reaches_them(ranks: list[Heartbeats]) -> None:
    assert {rank.datagrams and rank.datagrams.host for rank in ranks} == {LOOPBACK}
    apart = on_ranks(
        2, lambda comm: exchange_contacts(comm.rank, [LOOPBACK], lambda own: comm.gather(elsewhere(own, comm.rank), name="meet"))
    )
    assert {rank.datagrams and rank.datagrams.host for rank in apart} == {"0.0.0.0"}
    for rank in apart:
        rank.close()


def test_who_is_behind_hangs_where_no_rank_is_seen_to_wait() -> None:
    """With NCCL, ranks run ahead of their collectives, and wait for their GPU."""
    assert diagnose({0: HANGS, 1: Heartbeat("epoch 1, step 4", 20.0, 5, False, True), 2: HANGS}, ()) == Diagnosis((1,))
    assert diagnose({0: WAITS, 1: WAITS}, ()) == Diagnosis((0, 1))  # each of them may
    assert diagnose({0: WAITS, 1: FINE}, ()) == Diagnosis((0, 1))  # rank 1 makes progress, just not what rank 0 waits for


def test_states_of_processes() -> None:
    sleeper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], cwd=ROOT)
    own = RankProcess.of_pid(os.getpid())
    process = RankProcess.of_pid(sleeper.pid)
    wait_until(lambda: process.describe() is None)  # it may be reading its program from a disk
    process.send(signal.SIGSTOP)
    wait_until(lambda: process.describe() == "is stopped (SIGSTOP)")
    process.send(signal.SIGKILL)
    sleeper.wait()
    assert process.describe() == "has ended"
    assert RankProcess(own.pid, own.place, "1").describe() == "has ended"  # another process with its id
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
        assert not own.has_ended()  # though /proc cannot be read
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
