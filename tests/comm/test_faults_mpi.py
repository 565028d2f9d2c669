"""What goes wrong on MPI ranks ends the job: soon, with a status that is not 0, in words, and with
no process left.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from faults import Ended, Fault, run_to_its_end, send

ABSENT = r"after 8 s not all ranks have come to minidist\.init\(\)"
ALONE = 'if os.environ["PMI_RANK"] == "1": {}'
STARTED = "print('started', flush=True)\n"
CTRL_C = send(signal.SIGINT, "group")
KILL_ONE = send(signal.SIGKILL, "rank", 4)
END_MPIRUN = send(signal.SIGTERM, "mpirun")

# what the ranks do, and what must be said about it
FAULTS: dict[str, Fault] = {
    "receives that never match": Fault(
        """
        comm.recv(one(), other, tag=comm.rank)  # both at once
        """,
        [
            r"rank 0 waits .* receive from rank 1 \(tag 0, 8 bytes\) at program\.py:\d+",
            r"rank 1 waits .* receive from rank 0 \(tag 1, 8 bytes\) at program\.py:\d+",
            r"longer than one operation may \(limit 1 s\)",
        ],
    ),
    "a rank that raises": Fault(
        """
        if comm.rank == 1:
            raise ValueError("bad luck")
        comm.recv(one(), 1)
        """,
        [
            r"\[rank 1\] Traceback",
            r"\[rank 1\] ValueError: bad luck",
            r'\[rank 1\] .*raise ValueError\("bad luck"\)',
        ],
    ),
    "a rank that raises while the other computes": Fault(
        """
        if comm.rank == 1:
            raise ValueError("bad luck")
        time.sleep(600)
        """,
        [r"\[rank 1\] ValueError: bad luck"],
    ),
    "a rank that raises in a program with a group of torch's own": Fault(
        """
        import torch.distributed as dist  # whose hook keeps what is said for later
        dist.init_process_group("gloo", f"file://{sys.argv[0]}.met", rank=comm.rank, world_size=2)
        if comm.rank == 1:
            raise ValueError("bad luck")
        comm.recv(one(), 1)
        """,
        [r"(?s)\[rank 1\] ValueError: bad luck.*Abort\(1\)"],  # in that order: then it ends
        limit=30,
    ),
    "ranks that bring different sizes to shared memory": Fault(
        """
        all_reduce(np.ones(4 + comm.rank), comm)  # no message tells
        """,
        [
            r"\[rank [01]\] .*MismatchError: rank 0 brings 32 bytes to a collective in shared "
            r"memory, rank 1 brings 40: give all ranks the same shape and dtype"
        ],
    ),
    "a message that is read as other numbers, in debug mode": Fault(
        """
        comm.debug = True
        numbers = np.ones(4, np.float32 if comm.rank == 0 else np.int32)
        receiving = comm.rank == 1 and comm.irecv(numbers, 0, tag=5)
        comm.exchange(one(), other, one(), other)
        comm.isend(numbers, 1, tag=5).wait() if comm.rank == 0 else receiving.wait()
        """,
        [
            r"\[rank 1\] .*MismatchError: rank 0 sends float32 to rank 1, which receives int32 "
            r"\(tag 5\): give both the same dtype"
        ],
    ),
    "a stream whose work raises while nobody waits for it": Fault(
        """
        def fails():
            raise KeyError("no such bucket")
        stream = comm.stream()
        if comm.rank == 0:
            stream.launch(fails)
        comm.recv(one(), other)
        """,
        [r"\[rank 0\] KeyError: 'no such bucket'"],
    ),
    "a stream that waits in vain": Fault(
        """
        stream = comm.stream()
        if comm.rank == 0:
            stream.launch(all_reduce, one(), stream.comm, "sum", "ring").wait()
        comm.barrier()
        """,
        [
            r"rank 0 waits .* on a stream: .*receiving from rank 1 \(inside a collective, \d bytes\) in all_reduce"
        ],
    ),
    "a rank that exits": Fault(
        """
        if comm.rank == 1:
            sys.exit(3)
        comm.recv(one(), 1)
        """,
        [r"rank 1 has finished", r"rank 0 waits .* at program\.py:\d+"],
    ),
    "a rank that exits without a word": Fault(
        """
        if comm.rank == 1:
            os._exit(3)
        comm.recv(one(), 1)
        """,
        [],
    ),
    "a rank that is killed": Fault(
        """
        if comm.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        comm.recv(one(), 1)
        """,
        [],
    ),
    "a rank that crashes": Fault(
        """
        if comm.rank == 1:
            ctypes.string_at(0)
        comm.recv(one(), 1)
        """,
        [],
    ),
    "a rank that is stopped": Fault(
        """
        if comm.rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        comm.recv(one(), 1)
        """,
        [r"rank 0 waits .* receive from rank 1", r"rank 1 does not answer"],
    ),
    "a rank that computes for ever": Fault(
        """
        while comm.rank == 1:
            time.sleep(0.1)  # here
        comm.recv(one(), 1)
        """,
        [r"rank 0 waits .* receive from rank 1", r"rank 1 computes at program\.py:\d+"],
    ),
    "a thread that cannot end": Fault(
        """
        if comm.rank == 1:
            threading.Thread(target=time.sleep, args=(600,)).start()
            sys.exit()
        comm.recv(one(), 1)
        """,
        [r"rank 0 waits .* receive from rank 1"],
    ),
    "the first collective on one rank only": Fault(
        """
        if comm.rank == 0:
            all_reduce(one(), comm)
        """,
        [
            r"rank 0 waits .* all ranks to come to .* in all_reduce at program\.py:\d+",
            r"rank 1 has finished",
        ],
    ),
    "a later collective on one rank only": Fault(
        """
        all_reduce(one(), comm)
        if comm.rank == 0:
            all_reduce(one(), comm)
        """,
        [r"rank 0 waits .* meet at a fence with rank 1 .* in all_reduce", r"rank 1 has finished"],
    ),
    "a broadcast that the root does not make": Fault(
        """
        if comm.rank == 1:
            broadcast(one(), comm, algorithm="tree")
        """,
        [
            r"rank 1 waits .* receive from rank 0 \(inside a collective, 8 bytes\) in broadcast at program\.py:\d+"
        ],
    ),
    "a native collective on one rank only": Fault(
        """
        if comm.rank == 0:
            all_reduce(one(), comm, algorithm="native")
        """,
        [
            r"rank 0 waits .* all ranks to come to all_reduce native in all_reduce at program\.py:\d+"
        ],
    ),
    "a split on one rank only": Fault(
        """
        if comm.rank == 0:
            comm.split(0)
        """,
        [r"rank 0 waits .* all ranks to come to split at program\.py:\d+"],
    ),
    "an allocation on one rank only": Fault(
        """
        if comm.rank == 0:
            comm.allocate(10, "f4")
        comm.recv(one(), other)
        """,
        [r"rank 0 waits .* all ranks to come to", r"rank 1 waits .* receive from rank 0"],
    ),
    "registered memory that one rank alone reduces": Fault(
        """
        buffer = comm.allocate(8, "f8")
        while comm.rank == 1:
            time.sleep(0.1)
        all_reduce(buffer, comm)
        """,
        [
            r"rank 0 waits .* all ranks to come to the first fence in all_reduce at program\.py:\d+",
            r"rank 1 computes at program\.py:\d+",
        ],
    ),
    "a rank asleep before its first backward": Fault(
        """
        model = DDP(torch.nn.Linear(300, 300), comm, op="mean")
        while comm.rank == 1:
            time.sleep(0.1)
        model(torch.ones(3, 300)).sum().backward()
        """,
        [
            r"rank 0 waits .* the stream's all_reduce at program\.py:\d+ in <module>; "
            r"waits .* on a stream: all ranks to come to the first fence in all_reduce",
            r"rank 1 computes at program\.py:\d+",
        ],
        # the ranks of a busy machine take seconds for it, and not the same time
        early="import torch; from minidist.full import DDP",
        limit=3,
    ),
    "a message too long": Fault(
        """
        comm.send(np.ones(100_000), 1) if comm.rank == 0 else comm.recv(one(), 0)
        """,
        [r"\[rank 1\] .*MismatchError: a message is larger than the 8 bytes"],
    ),
    "a message too short": Fault(
        """
        comm.send(one(), 1) if comm.rank == 0 else comm.recv(np.ones(100_000), 0)
        """,
        [
            r"\[rank 1\] .*MismatchError: rank 0 sent 8 bytes, but the receive has a buffer of 800000 \(tag 0\)"
        ],
    ),
    "collectives of different sizes": Fault(
        """
        all_reduce(np.ones(10 + comm.rank), comm, algorithm="recursive")
        """,
        [r"MismatchError: .*give all ranks the same shape and dtype"],
    ),
    "collectives in different order, in debug mode": Fault(
        """
        comm.debug = True
        for call in (all_reduce, broadcast)[:: 1 - 2 * comm.rank]:
            call(one(), comm)
        """,
        [
            r"MismatchError: .*rank 0 calls all_reduce\(float64, 1, sum, auto\) at .*"
            r"; rank 1 calls broadcast\(float64, 1"
        ],
    ),
    "large sends against each other": Fault(
        """
        comm.send(np.ones(1_000_000), other)
        comm.recv(np.ones(1_000_000), other)
        """,
        [
            r"rank 0 waits .* send to rank 1 \(tag 0, 8000000 bytes\)",
            r"rank 1 waits .* send to rank 0",
        ],
    ),
    "an answer that never comes, found before the limit": Fault(
        """
        if comm.rank == 1:
            time.sleep(2.5)  # rank 0 asks, is told that this rank computes, and asks again
            sys.exit(3)
        comm.recv(one(), 1)
        """,
        [r"rank 0 waits for rank 1, which has finished \(limit 300 s\)"],
        limit=300,
    ),
    "a roll call that never ends, found before the limit": Fault(
        """
        if comm.rank == 0:
            comm.split(0)
        """,
        [r"rank 0 waits for rank 1, which has finished \(limit 300 s\)"],
        limit=300,
    ),
    "a rank asleep before it starts MPI": Fault("", [ABSENT], ALONE.format("time.sleep(600)")),
    "a rank asleep when MPI has started": Fault(
        "", [ABSENT], ALONE.format("from mpi4py import MPI; time.sleep(600)")
    ),
    "a rank gone before it starts MPI": Fault("", [ABSENT], ALONE.format("sys.exit()")),
    "a rank failing before it starts MPI": Fault(
        "", [ABSENT, "ZeroDivisionError"], ALONE.format("1 / 0")
    ),
    "Ctrl-C while ranks wait inside MPI": Fault(
        STARTED + "comm.recv(one(), other)", [], "", 300, 2, CTRL_C
    ),
    "Ctrl-C while ranks compute": Fault(STARTED + "time.sleep(600)", [], "", 300, 2, CTRL_C),
    "Ctrl-C while ranks reduce": Fault(
        STARTED + "while True: all_reduce(one(), comm)", [], "", 300, 2, CTRL_C
    ),
    "an ended mpirun": Fault(
        STARTED + "comm.barrier()\ntime.sleep(600)", [], "", 300, 2, END_MPIRUN
    ),
    "one of four killed": Fault(
        STARTED + "while True: all_reduce(one(), comm)", [], "", 300, 4, KILL_ONE
    ),
}


Endings = Callable[[str], Ended]


@pytest.fixture(scope="module")
def endings(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Endings]:
    """Run the faults that were asked for, several at a time: most of their time is waiting for a
    limit.
    """
    calls = [item.callspec for item in request.session.items if hasattr(item, "callspec")]
    faults = [call.params["fault"] for call in calls if call.params.get("fault") in FAULTS]
    with ThreadPoolExecutor(3) as pool:
        jobs = {
            name: pool.submit(run_to_its_end, FAULTS[name], tmp_path_factory.mktemp("fault"))
            for name in faults
        }
        yield lambda name: jobs[name].result()


# in the long run: each ends as another of the list does, by the same lines
RARE = (
    *("a rank that crashes", "a rank that exits without a word", "a stream that waits in vain"),
    *("a broadcast that the root does not make", "a later collective on one rank only"),
    *("an allocation on one rank only", "a message too short", "Ctrl-C while ranks compute"),
    *("a rank asleep when MPI has started", "a rank gone before it starts MPI"),
)


@pytest.mark.parametrize(
    "fault",
    [pytest.param(fault, marks=[pytest.mark.soak] * (fault in RARE)) for fault in FAULTS],
)
def test_a_fault_ends_the_job(fault: str, endings: Endings) -> None:
    ended = endings(fault)
    assert ended.status != 0
    for word in FAULTS[fault].words:
        assert re.search(word, ended.error), ended.error


def test_an_exit_status_survives_if_all_ranks_come_to_their_end(tmp_path: Path) -> None:
    ended = run_to_its_end(Fault("comm.barrier()\nsys.exit(3 * comm.rank)"), tmp_path)
    assert ended.status == 3 and ended.error == ""


def test_who_ends_later_has_as_long_as_it_likes(tmp_path: Path) -> None:
    ended = run_to_its_end(
        Fault("comm.barrier()\ntime.sleep(2 * comm.rank)\nprint('done', flush=True)"), tmp_path
    )
    assert ended.status == 0 and ended.out.count("done") == 2 and ended.error == ""
