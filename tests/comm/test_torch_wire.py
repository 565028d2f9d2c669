"""The torch wire: real processes over gloo, started by torchrun, and by a launcher that helps as
little as srun.
"""

from __future__ import annotations

import json
import socket
import textwrap
from typing import NamedTuple

import pytest
from ranks import clean_environment, torchrun, warm_python

from minidist.full.launch.jobs import run_job

WORKS = """
    import os
    import numpy as np, torch, torch.distributed as dist
    import minidist
    from minidist.full.comm.errors import CommunicationError

    comm = minidist.init(limit=60)
    assert dist.is_initialized() and comm.wire.kind == "torch", "torchrun's variables are enough"
    rank, size = comm.rank, comm.size
    right, left = (rank + 1) % size, (rank - 1) % size
    assert comm.node == comm.members == tuple(range(size))


    def check_ring(comm, dtype, shape, tag=0):
        right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
        mine, theirs = dtype(shape, comm.rank), dtype(shape, -1)
        if comm.size > 1:
            comm.exchange(mine, right, theirs, left, tag)
            assert (theirs == dtype(shape, left)).all()


    kinds = [
        lambda shape, value: np.full(shape, value, np.float32),
        lambda shape, value: np.full(shape, value % 2, np.bool_),
        lambda shape, value: torch.full(shape, value, dtype=torch.bfloat16),
        lambda shape, value: torch.full(shape, value, dtype=torch.float64),
    ]
    for kind in kinds:
        for shape in [(0,), (1,), (2, 3), (300_000,)]:
            check_ring(comm, kind, shape)

    # Point to point, in order, on two tags at once, received in the other order.
    numbers = [np.full(4, k) for k in range(4)]
    if rank == 0:
        for request in [comm.isend(n, 1, tag=k % 2) for k, n in enumerate(numbers)]:
            request.wait()
    elif rank == 1:
        got = {k: np.empty(4, int) for k in (1, 3, 0, 2)}
        for k, buffer in got.items():
            comm.recv(buffer, 0, tag=k % 2)
        assert all((got[k] == k).all() for k in got)

    # A request can be asked whether it is through.
    incoming = np.empty(3)
    receive, send = comm.irecv(incoming, left, tag=9), None
    assert not receive.test()
    comm.barrier()
    send = comm.isend(np.full(3, float(rank)), right, tag=9)
    while not receive.test():
        pass
    send.wait()
    assert (incoming == left).all()

    # What must not be sent is refused, in a sentence.
    wrong = [(torch.empty(3, device="meta"), "meta tensors hold no data"), (np.zeros(4)[::2], "not contiguous")]
    for buffer, words in wrong:
        try:
            comm.isend(buffer, right)
            raise SystemExit("it was sent")
        except ValueError as error:
            assert words in str(error), error
    frozen = np.zeros(3)
    frozen.flags.writeable = False
    try:
        comm.irecv(frozen, left)
        raise SystemExit("it was received into")
    except ValueError as error:
        assert "read-only" in str(error), error

    # Groups: every color at once, in the order of the key; a fork on a thread of its own.
    sent = comm.traffic.messages
    half = comm.split(rank % 2, key=-rank)
    assert half.members == tuple(reversed(range(rank % 2, size, 2))), half.members
    check_ring(half, kinds[0], (5,))
    deeper = half.split(0)
    check_ring(deeper, kinds[0], (5,))
    alone = comm.split(rank)
    assert (alone.size, alone.members) == (1, (rank,))
    alone.barrier()
    assert comm.traffic.messages == sent + 2 * (half.size > 1), "splitting itself sends no counted messages"

    stream = comm.stream()
    def beside(tag):
        check_ring(stream.comm, kinds[1], (1000,), tag)
        return tag
    handles = [stream.launch(beside, tag) for tag in range(5)]
    for k in range(5):
        check_ring(comm, kinds[0], (1000,), k)
    assert [handle.wait() for handle in handles] == list(range(5))
    assert comm.all_gather_object({"rank": rank}) == [{"rank": r} for r in range(size)]
    assert half.all_gather_object(rank) == list(half.members)

    registered = comm.allocate((2, 3), torch.bfloat16)
    assert registered.dtype == torch.bfloat16 and registered.shape == (2, 3) and not registered.any()
    assert comm.peers(comm.allocate(4, np.float32)) is None

    # Collectives: all algorithms, and each with all dtypes and reductions that is the engine's own, or sends by itself.
    from collective_cases import FEW, assert_unknown_operations_refused, cells, check
    if size == 3:
        check(comm, [cell for cell in cells() if EVERY_CELL or cell.algorithm in ("native", "ring")])
        check(comm, cells(dtypes=FEW, ops=("sum", "mean")))
        assert_unknown_operations_refused(comm)
    natives = [cell for cell in cells(dtypes=FEW) if cell.algorithm == "native"]
    check(comm.split(0, key=-rank), natives)

    # In debug mode each message is announced; nothing else changes.
    comm.debug = True
    for kind in kinds:
        check_ring(comm, kind, (7,), 3)
    comm.debug = False

    # A group that exists already, also one of some ranks only, twice.
    pair = dist.new_group([0, size - 1])
    if rank in (0, size - 1):
        for _ in range(2):
            wrapped = minidist.init(pair, limit=60)
            assert (wrapped.size, wrapped.members) == (2, (0, 1))
            check_ring(wrapped, kinds[0], (5,))
            wrapped.split(0).barrier()

    # Groups after others that only one rank has made, and knows of.
    if rank == 0:
        for _ in range(2):
            dist.new_group([0], use_local_synchronization=True)
    kept = [comm.split(0, key=-rank) for _ in range(4)]  # more than there are to be used again
    check_ring(kept[-1], kinds[0], (5,))
    comm.barrier()
    os.write(1, f"rank {rank} is through\\n".encode())
"""


@pytest.mark.parametrize(
    ("ranks", "every_cell"), [(2, False), pytest.param(3, True, marks=pytest.mark.soak)]
)
def test_everything_works_under_torchrun(ranks: int, every_cell: bool) -> None:
    job = torchrun(ranks, WORKS.replace("EVERY_CELL", str(every_cell)), timeout=110)
    assert job.returncode == 0, job.stderr
    assert sorted(job.stdout.splitlines()) == [f"rank {rank} is through" for rank in range(ranks)]
    assert not job.stderr, "a normal end makes no noise"


@pytest.mark.parametrize(
    "end", ["raise ValueError('boom')", "os.kill(os.getpid(), signal.SIGKILL)"]
)
def test_a_rank_that_fails_ends_the_job(end: str) -> None:
    program = f"""
        import os, signal
        import numpy as np
        import minidist
        comm = minidist.init(limit=60)
        if comm.rank == 1:
            {end}
        comm.recv(np.empty(3), 1)
    """
    job = torchrun(2, program, timeout=100)
    assert job.returncode == 1
    if "boom" in end:
        assert "[rank 1] ValueError: boom" in job.stderr


class Rank(NamedTuple):
    """How a rank ended."""

    status: int
    output: str
    errors: str


Failures = dict[str, tuple[Rank, ...]]


# Ranks that are forked by a launcher which ends nobody: each has to find out by itself that the job
# has failed.
FAILURES = """
    import json, os, signal, socket, sys, tempfile, time
    import numpy as np, torch.distributed
    import minidist


    def raises(comm):
        if comm.rank == 1:
            raise ValueError("boom")
        comm.recv(np.empty(3), 1)

    def computes_while_another_raises(comm):
        if comm.rank == 1:
            raise ValueError("boom")
        time.sleep(30)

    def finishes_early(comm):
        if comm.rank == 0:
            comm.recv(np.empty(3), 1)

    def exits_at_once(comm):
        if comm.rank == 1:
            os._exit(0)
        comm.recv(np.empty(3), 1)

    def is_killed(comm):
        if comm.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        comm.recv(np.empty(3), 1)

    def both_receive(comm):
        comm.recv(np.empty(3), 1 - comm.rank, tag=comm.rank)

    def sizes_differ(comm):
        if comm.rank == 0:
            comm.recv(np.empty(4), 1)
        else:
            comm.send(np.empty(3), 0)

    def sizes_differ_in_debug_mode(comm):
        comm.debug = True
        sizes_differ(comm)

    def dtypes_differ_in_debug_mode(comm):
        comm.debug = True
        numbers = np.ones(4, np.int32 if comm.rank == 0 else np.float32)
        comm.recv(numbers, 1) if comm.rank == 0 else comm.send(numbers, 0)

    def calls_other_units(comm):
        from minidist.full import FSDP
        model = FSDP(torch.nn.ModuleList([torch.nn.Linear(4, 5), torch.nn.Linear(4, 6)]), comm, op="sum", unused=True)
        model.module.forward = lambda x: model.module[comm.rank](x)
        model(torch.ones(1, 4))
        time.sleep(30)

    def a_stream_raises(comm):
        stream = comm.stream()
        if comm.rank == 1:
            stream.launch(lambda: 1 / 0)
        time.sleep(30)

    def has_a_status(comm):
        if comm.rank == 1:
            sys.exit(3)

    def first_goes_first(comm):
        if comm.rank == 1:
            time.sleep(1)

    def destroys_the_group(comm):
        comm.barrier()
        torch.distributed.destroy_process_group()
        if comm.rank == 1:
            time.sleep(1)

    def needs_srun_only(comm):
        assert (comm.wire.kind, comm.size) == ("torch", 2)

    def start(scenario, rank, port, limit):
        files = [tempfile.TemporaryFile("w+") for _ in range(2)]
        pid = os.fork()
        if pid:
            return pid, files
        os.dup2(files[0].fileno(), 1)
        os.dup2(files[1].fileno(), 2)
        os.environ |= {
            "SLURM_PROCID": str(rank), "SLURM_NTASKS": "2", "SLURM_LOCALID": str(rank),
            "SLURM_TASKS_PER_NODE": "2(x1)", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        }
        return None

    def main():
        started = {}
        for name, scenario in list(globals().items()):
            if getattr(scenario, "__code__", None) is None or scenario.__code__.co_varnames[:1] != ("comm",):
                continue
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                port = probe.getsockname()[1]
            limit = 1.0 if name in ("both_receive", "sizes_differ") else 25.0
            started[name] = []
            for rank in range(2):
                child = start(scenario, rank, port, limit)
                if child is None:
                    return lambda: scenario(minidist.init(limit=limit))
                started[name].append(child)
        results = {}
        for name, children in started.items():
            results[name] = []
            for pid, files in children:
                _, status = os.waitpid(pid, 0)
                texts = [file.seek(0) or file.read() for file in files]
                results[name].append((os.waitstatus_to_exitcode(status), *texts))
        print(json.dumps(results))

    if (work := main()) is not None:
        work()
"""


@pytest.fixture(scope="module")
def failures(tmp_path_factory: pytest.TempPathFactory) -> Failures:
    """How the two ranks of each scenario ended. All run at once: importing torch is what takes
    time.
    """
    program = tmp_path_factory.mktemp("failures") / "failures.py"
    program.write_text(textwrap.dedent(FAILURES))
    job = run_job(
        [*warm_python(), str(program)], env=clean_environment(), timeout=110, capture=True
    )
    assert job.returncode == 0, job.stderr
    return {
        name: tuple(Rank(*rank) for rank in ranks) for name, ranks in json.loads(job.stdout).items()
    }


def test_an_error_is_printed_once_and_ends_all(failures: Failures) -> None:
    for name in ("raises", "computes_while_another_raises"):
        other, culprit = failures[name]
        assert (other.status, culprit.status) == (1, 1)
        assert culprit.errors.endswith("[rank 1] ValueError: boom\n")
        assert all(line.startswith("[rank 1] ") for line in culprit.errors.splitlines())
        assert other.errors == "[rank 0] stops, because rank 1 failed\n"


def test_an_error_on_a_stream_that_nobody_waits_for_ends_all(failures: Failures) -> None:
    other, culprit = failures["a_stream_raises"]
    assert (other.status, culprit.status) == (1, 1)
    assert "ZeroDivisionError" in culprit.errors


def test_waiting_for_a_rank_that_has_finished_is_reported(failures: Failures) -> None:
    waiting, finished = failures["finishes_early"]
    assert (waiting.status, finished.status) == (1, 1)
    assert "rank 0 waits for rank 1, which has finished" in waiting.errors
    assert "receive from rank 1 (tag 0, 24 bytes) at failures.py" in waiting.errors


@pytest.mark.parametrize(("name", "status"), [("exits_at_once", 0), ("is_killed", -9)])
def test_a_rank_that_is_gone_is_named(failures: Failures, name: str, status: int) -> None:
    waiting, gone = failures[name]
    assert (waiting.status, gone.status) == (1, status)
    assert "RankFailed: rank 1 is gone" in waiting.errors


def test_waiting_in_vain_ends_in_a_joint_report(failures: Failures) -> None:
    ranks = failures["both_receive"]
    assert [rank.status for rank in ranks] == [1, 1]
    (report,) = [rank.errors for rank in ranks if "Who waits for whom" in rank.errors]
    assert "receive from rank 1 (tag 0, 24 bytes)" in report
    assert "receive from rank 0 (tag 1, 24 bytes)" in report


def test_unequal_sizes_never_meet(failures: Failures) -> None:
    ranks = failures["sizes_differ"]
    assert [rank.status for rank in ranks] == [1, 1]
    (report,) = [rank.errors for rank in ranks if "Who waits for whom" in rank.errors]
    assert "receive from rank 1 (tag 0, 32 bytes)" in report
    assert "send to rank 0 (tag 0, 24 bytes)" in report


def test_unequal_sizes_are_an_error_at_once_in_debug_mode(failures: Failures) -> None:
    receiver, sender = failures["sizes_differ_in_debug_mode"]
    assert (receiver.status, sender.status) == (1, 1)
    assert (
        "MismatchError: rank 1 sent 24 bytes, but the receive has a buffer of 32" in receiver.errors
    )


def test_a_message_that_is_read_as_other_numbers_is_an_error_in_debug_mode(
    failures: Failures,
) -> None:
    receiver, _ = failures["dtypes_differ_in_debug_mode"]
    assert (
        "MismatchError: rank 1 sent float32, but the receive has a buffer of int32"
        in receiver.errors
    )


def test_sharded_units_of_unequal_size_never_meet(failures: Failures) -> None:
    ranks = failures["calls_other_units"]
    assert [rank.status for rank in ranks] == [1, 1]
    assert any(
        "MismatchError: the ranks do not call the same units" in rank.errors for rank in ranks
    )
    assert any("(rank 0: gather 0; rank 1: gather 1)" in rank.errors for rank in ranks)


def test_an_exit_status_is_kept(failures: Failures) -> None:
    assert [rank.status for rank in failures["has_a_status"]] == [0, 3]


@pytest.mark.parametrize("name", ["first_goes_first", "destroys_the_group", "needs_srun_only"])
def test_a_normal_end_is_silent(failures: Failures, name: str) -> None:
    assert failures[name] == (Rank(0, "", ""), Rank(0, "", ""))


def test_a_port_that_is_taken_is_told_in_one_sentence() -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(taken.getsockname()[1])}
        alone = {"SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SLURM_LOCALID": "0"}
        program = "import minidist; minidist.init(limit=5)"
        environment = clean_environment() | place | alone
        job = run_job([*warm_python(), "-c", program], env=environment, timeout=60, capture=True)
    assert job.returncode == 1
    said = job.stderr.splitlines()[-1]
    assert f"rank 0 of 1 did not meet the others at 127.0.0.1:{place['MASTER_PORT']}" in said
    assert said.endswith("another program listens there: set MASTER_PORT to a port that is free")
