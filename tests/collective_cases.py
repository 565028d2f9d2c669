"""Every collective against numpy's answer, on whatever wire: `check(comm, cells())` runs on each
rank.

A cell is an operation, an algorithm, a dtype and a reduction. The package's own table says which
there are; each gives the right answer at every size, or is refused in a sentence before a message
is sent. All ranks draw all ranks' inputs from one seed, so each knows what has to come out.
Integers must be exact, floats within a few roundings of the float64 answer, and what several ranks
receive must be the same bytes on all of them.
"""

from __future__ import annotations

import functools
import hashlib
import math
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from minidist import Communicator
from minidist.full.collectives import (
    COLLECTIVES,
    DTYPES,
    REDUCTIONS,
    algorithms,
    all_gather,
    all_reduce,
    all_to_all,
    broadcast,
    gather,
    reduce,
    reduce_scatter,
    scatter,
)
from minidist.full.collectives.reduction import BITWISE

# dtypes that stand for all, where many ranks or sizes are tried
FEW = ("float32", "bfloat16", "int64")
REDUCING = ("all_reduce", "reduce_scatter", "reduce")
# of one operation
ROUNDING = {"float16": 2**-11, "bfloat16": 2**-8, "float32": 2**-24, "float64": 2**-53}
# by the engine
UNREDUCED = {
    "mpi": ("float16", "bfloat16", "bool"),
    "torch": ("int16", "uint16", "uint32", "uint64"),
}
UNKNOWN_ON_GPUS = ("uint16", "uint32", "uint64")  # to torch's arithmetic


@dataclass(frozen=True)
class Cell:
    """One way to call a collective. `op` is empty where nothing is reduced."""

    operation: str
    algorithm: str
    dtype: str
    op: str = ""


def cells(
    operations: Iterable[str] = COLLECTIVES,
    dtypes: Iterable[str] = DTYPES,
    ops: Iterable[str] = REDUCTIONS,
) -> list[Cell]:
    """Return what the package's table offers of these."""
    return [
        Cell(operation, algorithm, dtype, op)
        for operation in operations
        for algorithm in algorithms(operation)
        for dtype in dtypes
        # where torch is not in use, it is not imported either
        if dtype != "bfloat16" or "torch" in sys.modules
        for op in (ops if operation in REDUCING else ("",))
    ]


def refusal(cell: Cell, comm: Communicator) -> str | None:
    """Return words of the sentence that refuses the cell on these ranks, or None if it must
    work.
    """
    native = cell.algorithm == "native" or (cell.algorithm == "auto" and device(comm) == "cuda")
    if cell.op == "mean" and cell.dtype not in ROUNDING:
        return f"the mean of {cell.dtype} is not {cell.dtype}: use op='sum'"
    if cell.op in BITWISE and cell.dtype in ROUNDING:
        return f"op='{cell.op}' joins bits, and those of {cell.dtype} are no numbers"
    if cell.op and device(comm) == "cuda" and cell.dtype in UNKNOWN_ON_GPUS:
        return f"torch cannot compute with {cell.dtype} on a GPU: convert to"
    if cell.algorithm == "native" and comm.native is None:
        return "the threads wire has no native collectives: use algorithm='auto'"
    if native and cell.op and comm.size > 1 and cell.dtype in UNREDUCED[comm.wire.kind]:
        return f"cannot reduce {cell.dtype}: choose another algorithm than 'native'"
    unknown = device(comm) == "cuda" or cell.dtype == "bool"  # to torch's engines, bit by bit
    if native and unknown and cell.op in BITWISE and comm.size > 1 and comm.wire.kind == "torch":
        return f"bit by bit, cannot reduce {cell.dtype}: choose another algorithm than 'native'"
    if (
        cell.algorithm == "recursive"
        and cell.operation != "all_reduce"
        and comm.size & (comm.size - 1)
    ):
        return (
            f"recursive {cell.operation} needs a power of two of ranks, not {comm.size}: use 'ring'"
        )
    if cell.algorithm == "shared" and (len(comm.node) < comm.size or comm.wire.kind == "torch"):
        return "algorithm='shared' needs ranks that share memory"
    if cell.algorithm == "shared" and device(comm) == "cuda":
        return "algorithm='shared' reads CPU memory"
    return None


def device(comm: Communicator) -> str:
    """Return `cuda` if collectives are to be tried on tensors of a GPU."""
    return "cuda" if comm.wire.carries_cuda else "cpu"


def available(operation: str, comm: Communicator) -> list[str]:
    """Return the algorithms that an operation has on these ranks."""
    return [
        name
        for name in algorithms(operation)
        if refusal(Cell(operation, name, "float32"), comm) is None
    ]


def sizes(ranks: int) -> list[int]:
    """Return element counts at which something may go wrong."""
    return sorted({0, 1, ranks - 1, ranks, ranks + 1, 1000})


def check(
    comm: Communicator, table: list[Cell], lengths: Iterable[int] = (0, 1, 11), seed: int = 0
) -> tuple[int, int]:
    """Try all cells at all lengths; return how many work and how many are refused. Raises on the
    first that is wrong.

    What must be the same on all ranks is compared in the end, at once.
    """
    worked, digests = 0, []
    for cell in table:
        words = refusal(cell, comm)
        if words is not None:
            assert_refused(comm, cell, words)
            continue
        worked += 1
        for count in lengths:
            digests.append((cell, count, CHECKS[cell.operation](comm, cell, count, seed)))
    everyones = comm.all_gather_object(digest(np.array([text for *_, text in digests])))
    if len(set(everyones)) > 1:
        lists = comm.all_gather_object([text for *_, text in digests])
        differing = [
            case for case, *texts in zip(digests, *lists, strict=True) if len(set(texts)) > 1
        ]
        raise AssertionError(f"the ranks' results differ in bits: {differing[:3]}")
    return worked, len(table) - worked


def assert_refused(comm: Communicator, cell: Cell, words: str) -> None:
    """Assert that a sentence with these words refuses the cell, and nothing is sent."""
    before = comm.traffic.messages
    try:
        call(comm, cell)
    except (ValueError, TypeError) as error:
        assert words in str(error) and "\n" not in str(error), f"{cell}: {error}"
    else:
        raise AssertionError(f"{cell} was not refused, with {words!r}")
    assert comm.traffic.messages == before, f"{cell}: something was sent"


def assert_unknown_operations_refused(comm: Communicator) -> None:
    """Assert that no algorithm of any collective takes a reduction that is not in the table."""
    for operation in REDUCING:
        for algorithm in algorithms(operation):
            assert_refused(
                comm,
                Cell(operation, algorithm, "float32", "average"),
                "op='average' is not a reduction",
            )


def call(comm: Communicator, cell: Cell) -> None:
    """Call a collective, for its refusal."""
    buffer = placed(draw(comm.size, cell.dtype, comm.rank), comm)
    reduced_by = {"op": cell.op} if cell.op else {}
    counts = (
        {"counts": [comm.size] * comm.size} if cell.operation in ("all_gather", "gather") else {}
    )
    OPERATIONS[cell.operation](buffer, comm, algorithm=cell.algorithm, **reduced_by, **counts)


def draw(count: int, dtype: str, rank: int, seed: int = 0) -> Any:
    """Return what a rank brings: a flat buffer, different on every rank."""
    return copied(_drawn(count, dtype, rank, seed))


@functools.lru_cache(1 << 10)
def _drawn(count: int, dtype: str, rank: int, seed: int) -> Any:
    numbers = np.random.default_rng([seed, rank, count])
    if dtype not in ROUNDING:
        low, high = (0, 2) if dtype == "bool" else (0, 10) if dtype.startswith("u") else (-9, 10)
        return numbers.integers(low, high, count).astype(dtype)
    values = numbers.uniform(0.5, 1.5, count) * numbers.choice([-1.0, 1.0], count)
    return plain(values.astype("float32"), dtype)


def plain(values: np.ndarray[Any, Any], dtype: str) -> Any:
    """Return the values as a buffer of `dtype`: a tensor if numpy has none."""
    if dtype != "bfloat16":
        return values.astype(dtype)
    import torch

    return torch.from_numpy(values.astype("float32")).to(torch.bfloat16)


def placed(buffer: Any, comm: Communicator) -> Any:
    """Return a copy of the buffer where these ranks' buffers lie: on the GPU, if they have one."""
    if device(comm) == "cpu":
        return copied(buffer)
    import torch

    return torch.as_tensor(buffer).cuda()


def copied(buffer: Any) -> Any:
    return buffer.clone() if hasattr(buffer, "clone") else buffer.copy()


def exact(buffer: Any) -> np.ndarray[Any, Any]:
    """Return the values as a numpy array that holds them all: floats in float64, others in their
    own dtype.
    """
    if hasattr(buffer, "cpu"):
        buffer = (buffer.double() if buffer.is_floating_point() else buffer).cpu().numpy()
    array = np.asarray(buffer)
    return array.astype(np.float64) if array.dtype.kind == "f" else array


def raw(buffer: Any) -> bytes:
    """Return the bytes."""
    if hasattr(buffer, "cpu"):
        import torch

        buffer = (
            buffer.contiguous().view(torch.uint8).cpu().numpy() if buffer.numel() else np.empty(0)
        )
    return bytes(buffer.tobytes())


def digest(buffer: Any) -> str:
    return hashlib.sha256(raw(buffer)).hexdigest()


def reduced(inputs: list[Any], op: str) -> np.ndarray[Any, Any]:
    """Return the answer: integers in their own arithmetic, floats in float64."""
    function = {
        "sum": np.add,
        "mean": np.add,
        "max": np.maximum,
        "min": np.minimum,
        "prod": np.multiply,
        "and": np.bitwise_and,
        "or": np.bitwise_or,
        "xor": np.bitwise_xor,
    }[op]
    answer: np.ndarray[Any, Any] = functools.reduce(function, [exact(buffer) for buffer in inputs])
    return answer / len(inputs) if op == "mean" else answer


def assert_close(got: Any, answer: np.ndarray[Any, Any], dtype: str, ranks: int, what: str) -> None:
    """Compare; each of the P - 1 operations of a reduction may round once, partial sums are at most
    1.5 P large.
    """
    values = exact(got)
    assert values.shape == answer.shape, f"{what}: shape {values.shape} instead of {answer.shape}"
    if dtype not in ROUNDING:
        assert np.array_equal(values, answer), f"{what}: {values} instead of {answer}"
        return
    size = np.maximum(np.abs(answer), 1.5 * ranks)
    worst = np.max(np.abs(values - answer) / size, initial=0.0)
    assert worst <= 2 * ranks * ROUNDING[dtype], f"{what}: off by {worst}"


# Each check makes the calls of one cell at one size, and returns a digest of what must be the same
# on all ranks.


def check_all_reduce(comm: Communicator, cell: Cell, count: int, seed: int) -> str:
    inputs = [draw(count, cell.dtype, rank, seed) for rank in range(comm.size)]
    buffer = placed(inputs[comm.rank], comm)
    all_reduce(buffer, comm, cell.op, cell.algorithm)
    assert_close(buffer, reduced(inputs, cell.op), cell.dtype, comm.size, _what(comm, cell, count))
    return digest(buffer)


def check_reduce_scatter(comm: Communicator, cell: Cell, count: int, seed: int) -> str:
    uneven = [(count * (rank + 1)) % 7 for rank in range(comm.size)]  # some of them empty
    one_has_all = [count * (rank == comm.size - 1) for rank in range(comm.size)]
    for counts in (None, uneven, one_has_all):
        rows = count if counts is None else sum(counts)
        inputs = [
            draw(3 * rows, cell.dtype, rank, seed).reshape(rows, 3) for rank in range(comm.size)
        ]
        full, what = placed(inputs[comm.rank], comm), f"{_what(comm, cell, count)}, {counts}"
        shard = reduce_scatter(full, comm, cell.op, cell.algorithm, counts)
        ends = np.cumsum(counts or _split(rows, comm.size))
        answer = np.split(reduced(inputs, cell.op), ends[:-1])[comm.rank]
        assert_close(shard, answer, cell.dtype, comm.size, what)
        room = placed(plain(np.zeros(shard.shape), cell.dtype), comm)
        given = reduce_scatter(full, comm, cell.op, cell.algorithm, counts, out=room)
        assert given is room and raw(room) == raw(shard), f"{what}, out="
        assert raw(full) == raw(inputs[comm.rank]), f"{what}: the input was changed"
    return ""


def check_all_gather(comm: Communicator, cell: Cell, count: int, seed: int) -> str:
    what, even = _what(comm, cell, count), _split(count, comm.size)
    uneven = [(count * rank) % 7 for rank in range(comm.size)]  # some of them empty
    for counts, given in ((even, None), (uneven, None), (uneven, uneven)):
        everyones = [
            draw(2 * rows, cell.dtype, rank, seed).reshape(rows, 2)
            for rank, rows in enumerate(counts)
        ]
        shard = placed(everyones[comm.rank], comm)
        gathered = all_gather(shard, comm, algorithm=cell.algorithm, counts=given)
        assert np.array_equal(
            exact(gathered), np.concatenate([exact(shard) for shard in everyones])
        ), what
        assert raw(shard) == raw(everyones[comm.rank]), f"{what}: the shard was changed"
    out = placed(plain(np.zeros((count, 2)), cell.dtype), comm)
    everyones = [
        draw(2 * rows, cell.dtype, rank).reshape(rows, 2) for rank, rows in enumerate(even)
    ]
    assert all_gather(placed(everyones[comm.rank], comm), comm, out, cell.algorithm) is out
    assert np.array_equal(exact(out), np.concatenate([exact(shard) for shard in everyones])), (
        f"{what}, out="
    )
    own = slice(sum(even[: comm.rank]), sum(even[: comm.rank + 1]))
    out[: own.start] = out[own.stop :] = 0
    all_gather(out[own], comm, out, cell.algorithm)
    assert np.array_equal(exact(out), np.concatenate([exact(shard) for shard in everyones])), (
        f"{what}, in place"
    )
    return ""


def check_broadcast(comm: Communicator, cell: Cell, count: int, seed: int) -> str:
    buffer, root = placed(draw(count, cell.dtype, comm.rank, seed), comm), _root(comm, count)
    broadcast(buffer, comm, root, cell.algorithm)
    assert raw(buffer) == raw(draw(count, cell.dtype, root, seed)), _what(comm, cell, count)
    return digest(buffer)


def check_reduce(comm: Communicator, cell: Cell, count: int, seed: int) -> str:
    inputs = [draw(count, cell.dtype, rank, seed) for rank in range(comm.size)]
    buffer, what, root = (
        placed(inputs[comm.rank], comm),
        _what(comm, cell, count),
        _root(comm, count),
    )
    reduce(buffer, comm, root, cell.op, cell.algorithm)
    if comm.rank == root:
        assert_close(buffer, reduced(inputs, cell.op), cell.dtype, comm.size, what)
    else:
        assert raw(buffer) == raw(inputs[comm.rank]), (
            f"{what}: a buffer that is not the root's was changed"
        )
    return ""


def check_gather(comm: Communicator, cell: Cell, count: int, seed: int) -> str:
    uneven, root = [(count * rank) % 7 for rank in range(comm.size)], _root(comm, count)
    for counts, given in ((_split(count, comm.size), None), (uneven, uneven)):
        what = f"{_what(comm, cell, count)}, {counts}"
        everyones = [
            draw(2 * rows, cell.dtype, rank, seed).reshape(rows, 2)
            for rank, rows in enumerate(counts)
        ]
        gathered = gather(placed(everyones[comm.rank], comm), comm, root, cell.algorithm, given)
        if comm.rank == root:
            assert np.array_equal(
                exact(gathered), np.concatenate([exact(shard) for shard in everyones])
            ), what
        else:
            assert gathered is None, what
    return ""


def check_scatter(comm: Communicator, cell: Cell, count: int, seed: int) -> str:
    root, what = _root(comm, count), _what(comm, cell, count)
    before = draw(2 * count, cell.dtype, root, seed).reshape(count, 2)
    full = placed(before, comm)
    shard = scatter(full if comm.rank == root else None, comm, root, cell.algorithm)
    assert np.array_equal(exact(shard), np.array_split(exact(before), comm.size)[comm.rank]), what
    assert shard.dtype == full.dtype and raw(full) == raw(before), what
    return ""


def check_all_to_all(comm: Communicator, cell: Cell, count: int, seed: int) -> str:
    ranks = range(comm.size)
    even = [_split(count, comm.size)] * comm.size
    uneven = [[(count + 3 * sender + receiver) % 5 for receiver in ranks] for sender in ranks]
    # how many of the two counts are given
    for table, how_many in ((even, 0), (uneven, 1), (uneven, 2)):
        what = f"{_what(comm, cell, count)}, {table}"
        everyones = [
            draw(2 * sum(row), cell.dtype, rank, seed).reshape(-1, 2)
            for rank, row in enumerate(table)
        ]
        mine = placed(everyones[comm.rank], comm)
        counts = [table[comm.rank], [row[comm.rank] for row in table]][:how_many]
        arrived = all_to_all(mine, comm, cell.algorithm, *counts)
        pieces = [
            np.split(exact(everyones[sender]), np.cumsum(table[sender])[:-1])[comm.rank]
            for sender in ranks
        ]
        assert np.array_equal(exact(arrived), np.concatenate(pieces)), what
        assert raw(mine) == raw(everyones[comm.rank]), f"{what}: the input was changed"
    return ""


OPERATIONS: dict[str, Callable[..., Any]] = {
    function.__name__: function
    for function in (
        all_reduce,
        reduce_scatter,
        all_gather,
        broadcast,
        reduce,
        gather,
        scatter,
        all_to_all,
    )
}
CHECKS: dict[str, Callable[[Communicator, Cell, int, int], str]] = {
    "all_reduce": check_all_reduce,
    "reduce_scatter": check_reduce_scatter,
    "all_gather": check_all_gather,
    "broadcast": check_broadcast,
    "reduce": check_reduce,
    "gather": check_gather,
    "scatter": check_scatter,
    "all_to_all": check_all_to_all,
}


def _what(comm: Communicator, cell: Cell, count: int) -> str:
    return f"{cell} of {count}, rank {comm.rank} of {comm.size}"


def _root(comm: Communicator, count: int) -> int:
    """Return another root for each size."""
    return count % comm.size


def _split(count: int, ranks: int) -> list[int]:
    return [len(part) for part in np.array_split(np.empty(count), ranks)]


def rounds(ranks: int) -> int:
    """Return ceil(log2 P)."""
    return math.ceil(math.log2(ranks))
