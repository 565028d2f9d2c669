"""What cannot travel is refused in one clear sentence, before anything is sent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from minidist import Communicator, run
from minidist.full.collectives import (
    all_gather,
    all_reduce,
    all_to_all,
    broadcast,
    explain,
    gather,
    reduce,
    reduce_scatter,
    scatter,
)


def read_only(count: int = 4) -> Any:
    array = np.ones(count)
    array.flags.writeable = False
    return array


def refused(call: Callable[[Communicator], object], error: type[Exception], words: str) -> None:
    """Assert that both ranks get the same kind of sentence, and that nothing was sent before it."""

    def program(comm: Communicator) -> None:
        with pytest.raises(error, match=words) as caught:
            call(comm)
        sentence = str(caught.value)
        assert "\n" not in sentence and len(sentence) < 400, sentence
        assert comm.traffic.messages == 0
        # nothing is left behind
        comm.exchange(np.ones(3), 1 - comm.rank, np.ones(3), 1 - comm.rank)

    run(program, 2)


BUFFERS: dict[str, tuple[Any, type[Exception], str]] = {
    "a column": (
        np.zeros((4, 4))[:, 1],
        ValueError,
        r"shape \(4,\) is not contiguous: .*ascontiguousarray",
    ),
    "every second element": (np.zeros(8)[::2], ValueError, "not contiguous"),
    "reversed": (np.zeros(8)[::-1], ValueError, "not contiguous"),
    "in Fortran's order": (
        np.zeros((3, 4), order="F"),
        ValueError,
        r"shape \(3, 4\) is not contiguous",
    ),
    "a transposed tensor": (
        torch.ones(4, 3).t(),
        ValueError,
        r"shape \(3, 4\) is not contiguous.*\.contiguous\(\)",
    ),
    "an expanded tensor": (torch.ones(1).expand(5), ValueError, "not contiguous"),
    "a view that negates": (
        torch._neg_view(torch.ones(3)),
        ValueError,
        r"shape \(3,\) is not contiguous, .* negated by its view: True\): say x = x\.to_dense\(\)\.resolve_neg",
    ),
    "bfloat16 that a view negates": (
        torch._neg_view(torch.ones(3, dtype=torch.bfloat16)),
        ValueError,
        "resolve_neg",
    ),
    "a sparse tensor": (
        torch.eye(3).to_sparse_csr(),
        ValueError,
        r"shape \(3, 3\) is not contiguous, .* \(torch\.sparse_csr, .*: say x = x\.to_dense\(\)",
    ),
    "complex": (
        np.zeros(3, complex),
        TypeError,
        "complex128 do not travel: convert to one of float16, bfloat16",
    ),
    "a complex tensor": (
        torch.zeros(3, dtype=torch.complex64),
        TypeError,
        r"torch\.complex64 do not travel",
    ),
    "float8": (torch.zeros(3, dtype=torch.float8_e4m3fn), TypeError, "float8_e4m3fn do not travel"),
    "long double": (np.zeros(3, np.longdouble), TypeError, "do not travel"),
    "swapped bytes": (
        np.zeros(3, np.dtype("f4").newbyteorder()),
        TypeError,
        "do not travel: .* native order",
    ),
    "objects": (np.array([object()]), TypeError, "object do not travel"),
    "text": (np.array(["a"]), TypeError, "do not travel"),
    "dates": (np.zeros(3, "M8[s]"), TypeError, "do not travel"),
    "records": (np.zeros(3, [("a", "f4")]), TypeError, "do not travel"),
    "a list": (
        [1.0, 2.0],
        TypeError,
        r"a buffer is a plain numpy array .* or a torch tensor, not list: \[1\.0, 2\.0\]",
    ),
    "a number": (3.5, TypeError, "not float: 3.5"),
    "a numpy scalar": (np.float64(3), TypeError, "not float64"),
    "nothing": (None, TypeError, "not NoneType"),
    "a masked array": (np.ma.masked_array([1.0, 2.0]), TypeError, "not MaskedArray"),
    "bytes": (b"abc", TypeError, "not bytes"),
}


@pytest.mark.parametrize("case", BUFFERS)
def test_what_is_not_a_buffer_is_refused(case: str) -> None:
    buffer, error, words = BUFFERS[case]
    for call in (
        lambda c: c.send(buffer, 1 - c.rank),
        lambda c: c.recv(buffer, 1 - c.rank),
        lambda c: c.isend(buffer, 1 - c.rank),
        lambda c: c.irecv(buffer, 1 - c.rank),
        lambda c: c.exchange(buffer, 1 - c.rank, np.zeros(3), 1 - c.rank),
        lambda c: c.exchange(np.zeros(3), 1 - c.rank, buffer, 1 - c.rank),
        lambda c: all_reduce(buffer, c),
        lambda c: broadcast(buffer, c),
        lambda c: reduce(buffer, c),
        lambda c: reduce_scatter(buffer, c),
        lambda c: all_gather(buffer, c),
        lambda c: all_to_all(buffer, c),
        lambda c: gather(buffer, c),
    ):
        refused(call, error, words)


@pytest.mark.parametrize(
    ("peer", "tag", "words"),
    [
        (2, 0, "=2 is not a rank: there are 2, numbered 0 to 1"),
        (-1, 0, "=-1 is not a rank"),
        (10**9, 0, "is not a rank"),
        (None, 0, "is this rank itself: copy the buffer instead"),
        (1, -1, r"tag=-1 is out of range: use 0 to 1048575"),
        (1, 1 << 20, "tag=1048576 is out of range"),
        (1, 1 << 40, "is out of range"),
    ],
)
def test_ranks_and_tags_out_of_range_are_refused(peer: int | None, tag: int, words: str) -> None:
    def far(comm: Communicator) -> int:
        return comm.rank if peer is None else 1 - comm.rank if peer == 1 else peer

    def near(comm: Communicator) -> int:
        return 1 - comm.rank

    ok = 0 if tag == 0 else tag
    for call in (
        lambda c: c.send(np.ones(1), far(c), tag),
        lambda c: c.recv(np.ones(1), far(c), tag),
        lambda c: c.exchange(np.ones(1), far(c), np.ones(1), near(c), ok),
        lambda c: c.exchange(np.ones(1), near(c), np.ones(1), far(c), ok),
    ):
        refused(call, ValueError, words)


def test_what_would_be_overwritten_is_refused() -> None:
    same = np.ones(4)
    refused(lambda c: c.recv(read_only(), 1 - c.rank), ValueError, "read-only and cannot receive")
    refused(lambda c: all_reduce(read_only(), c), ValueError, "read-only")
    refused(lambda c: all_gather(np.ones(2), c, read_only()), ValueError, "read-only")
    refused(
        lambda c: c.exchange(same, 1 - c.rank, same, 1 - c.rank),
        ValueError,
        "exchange needs two buffers",
    )


def test_read_only_memory_may_be_sent_and_read() -> None:
    def program(comm: Communicator) -> None:
        comm.send(read_only(), 1) if comm.rank == 0 else comm.recv(np.zeros(4), 0)
        broadcast(read_only() if comm.rank == 1 else np.zeros(4), comm, root=1)
        reduce(read_only() if comm.rank == 1 else np.zeros(4), comm, root=0)
        assert (all_gather(read_only(2), comm) == 1).all()
        assert (reduce_scatter(read_only(), comm) == 2).all()

    run(program, 2)


def test_arguments_of_collectives_that_cannot_be_are_refused() -> None:
    ints, four = np.ones(4, np.int32), np.ones(4)
    refused(
        lambda c: all_reduce(four, c, "avg"),
        ValueError,
        "op='avg' is not a reduction: choose one of sum, mean",
    )
    refused(
        lambda c: all_reduce(ints, c, "mean"),
        TypeError,
        "the mean of int32 is not int32: use op='sum'",
    )
    refused(
        lambda c: all_reduce(four, c, algorithm="rings"),
        ValueError,
        "no algorithm 'rings': use one of auto",
    )
    refused(
        lambda c: broadcast(four, c, algorithm="ring"),
        ValueError,
        "broadcast has no algorithm 'ring'",
    )
    refused(
        lambda c: all_reduce(four, c, algorithm="native"),
        ValueError,
        "the threads wire has no native",
    )
    for root in (2, -1):
        refused(
            lambda c, r=root: broadcast(four, c, r),
            ValueError,
            f"root={root} is not a rank: there are 2",
        )
        refused(lambda c, r=root: reduce(four, c, r), ValueError, f"root={root}")
        refused(lambda c, r=root: gather(four, c, r), ValueError, f"root={root}")
        refused(lambda c, r=root: scatter(four, c, r), ValueError, f"root={root}")
    refused(
        lambda c: all_gather(four, c, counts=[4]),
        ValueError,
        r"counts=\[4\] must be 2 numbers of rows",
    )
    refused(
        lambda c: all_gather(four, c, counts=[4, -4]),
        ValueError,
        r"counts=\[4, -4\] must be 2 numbers",
    )
    refused(
        lambda c: all_gather(four, c, counts=[3, 3]),
        ValueError,
        r"shard of 4 rows .* 3 are its own",
    )
    refused(
        lambda c: all_gather(four, c, np.ones(6)),
        ValueError,
        r"shard of 4 rows for .* output of shape \(6,\)",
    )
    refused(
        lambda c: all_gather(four, c, np.ones(8, np.int64)),
        ValueError,
        "float64 shard .* int64 output",
    )
    refused(lambda c: gather(four, c, counts=[3, 3]), ValueError, "shard of 4 rows, but counts=")
    refused(lambda c: gather(four, c, counts=[4]), ValueError, "must be 2 numbers of rows")
    refused(
        lambda c: all_to_all(four, c, "auto", [2, 3], [2, 3]),
        ValueError,
        "must add up to the 4 rows",
    )
    refused(
        lambda c: all_to_all(four, c, "auto", [4], [4]),
        ValueError,
        "send_counts=.* must be 2 numbers",
    )
    refused(
        lambda c: all_to_all(four, c, "auto", [2, 2], [4]),
        ValueError,
        "receive_counts=.* must be 2 numbers",
    )
    refused(
        lambda c: all_to_all(four, c, "auto", [2, 2], [1, 1]),
        ValueError,
        "what rank . keeps must be the same",
    )
    meta = torch.ones(4, device="meta")
    refused(
        lambda c: all_reduce(meta, c, algorithm="shared"),
        ValueError,
        "reads CPU memory, .* on meta: use 'ring'",
    )


def test_recursive_halving_wants_a_power_of_two() -> None:
    def program(comm: Communicator) -> None:
        for call in (reduce_scatter, all_gather):
            with pytest.raises(
                ValueError, match="needs a power of two of ranks, not 3: use 'ring'"
            ):
                call(np.ones(4), comm, algorithm="recursive")  # type: ignore[operator]

    run(program, 3)


def test_shared_memory_wants_one_node() -> None:
    from minidist import Cluster

    def program(comm: Communicator) -> None:
        with pytest.raises(ValueError, match=r"needs ranks that share memory, .* use 'auto'"):
            all_reduce(np.ones(4), comm, algorithm="shared")
        assert explain("all_reduce", 32, comm)[0] != "shared"

    run(program, 2, cluster=Cluster.ethernet(2))


def test_the_root_of_a_scatter_must_bring_something() -> None:
    def program(comm: Communicator) -> None:
        scatter(None, comm)

    with pytest.raises(
        ValueError, match="rank 0 is the root of this scatter: it must bring the full buffer"
    ):
        run(program, 2)
