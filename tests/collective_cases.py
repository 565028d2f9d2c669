"""Every collective against numpy's answer, on whatever wire: `check(comm, operation, ...)` runs on each rank.

All ranks draw all ranks' inputs from one seed, so each knows what has to come out. Integers must be exact, floats
within a few roundings of the float64 answer, and what several ranks receive must be the same bytes on all of them.
"""

from __future__ import annotations

import functools
import hashlib
import math
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from minidist import Communicator
from minidist.collectives import (
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

DTYPES = ("float16", "bfloat16", "float32", "float64", "int32", "int64")
OPS = ("sum", "mean", "max", "min", "prod")
ROUNDING = {"float16": 2**-11, "bfloat16": 2**-8, "float32": 2**-24, "float64": 2**-53}  # of one operation


def available(operation: str, comm: Communicator) -> list[str]:
    """Return the algorithms that an operation has on these ranks."""
    names = [name for name in algorithms(operation) if name != "native" or comm.native is not None]
    if operation != "all_reduce" and comm.size & (comm.size - 1):
        names = [name for name in names if name != "recursive"]
    if len(comm.node) < comm.size:
        names = [name for name in names if name != "shared"]
    return names


def sizes(ranks: int) -> list[int]:
    """Return element counts at which something may go wrong."""
    return sorted({0, 1, ranks - 1, ranks, ranks + 1, 1000})


def reductions(comm: Communicator, algorithm: str, count: int) -> Iterator[tuple[str, str]]:
    """Yield (dtype, op): all dtypes summed, and for one size, all operations on two of them."""
    yield from ((dtype, "sum") for dtype in dtypes(comm, algorithm, count))
    if count == comm.size + 1:
        yield from ((dtype, op) for dtype in ("float32", "int64") for op in OPS[1:] if (dtype, op) != ("int64", "mean"))


def dtypes(comm: Communicator, algorithm: str, count: int) -> list[str]:
    """Return the dtypes to try: for one size all that the algorithm knows, for the others a few."""
    chosen = DTYPES if count == comm.size + 1 else ("float32", "bfloat16", "int64")
    unknown = {"float16", "bfloat16"} if algorithm == "native" else set()
    unknown |= set() if "torch" in sys.modules else {"bfloat16"}  # where torch is not in use, it is not imported either
    return [dtype for dtype in chosen if dtype not in unknown]


def draw(count: int, dtype: str, rank: int, seed: int = 0) -> Any:
    """Return what a rank brings: a flat buffer, different on every rank."""
    return copied(_drawn(count, dtype, rank, seed))


@functools.lru_cache(1 << 10)
def _drawn(count: int, dtype: str, rank: int, seed: int) -> Any:
    numbers = np.random.default_rng([seed, rank, count])
    if dtype.startswith("int"):
        return numbers.integers(-9, 10, count).astype(dtype)
    values = numbers.uniform(0.5, 1.5, count) * numbers.choice([-1.0, 1.0], count)
    return plain(values.astype("float32"), dtype)


def plain(values: np.ndarray[Any, Any], dtype: str) -> Any:
    """Return the values as a buffer of `dtype`: a tensor if numpy has none."""
    if dtype != "bfloat16":
        return values.astype(dtype)
    import torch

    return torch.from_numpy(values.astype("float32")).to(torch.bfloat16)


def copied(buffer: Any) -> Any:
    return buffer.clone() if hasattr(buffer, "clone") else buffer.copy()


def exact(buffer: Any) -> np.ndarray[Any, Any]:
    """Return the values as a numpy array that holds them all: float64, or int64."""
    array = np.asarray(buffer.double() if hasattr(buffer, "double") else buffer)
    return array.astype(np.float64 if array.dtype.kind == "f" else np.int64)


def raw(buffer: Any) -> bytes:
    """Return the bytes."""
    if hasattr(buffer, "numpy"):
        import torch

        buffer = buffer.contiguous().view(torch.uint8).numpy() if buffer.numel() else np.empty(0)
    return bytes(buffer.tobytes())


def digest(buffer: Any) -> str:
    return hashlib.sha256(raw(buffer)).hexdigest()


def reduced(inputs: list[Any], op: str, dtype: str) -> np.ndarray[Any, Any]:
    """Return the answer: integers in their own arithmetic, floats in float64."""
    values = [exact(buffer) for buffer in inputs]
    if dtype == "int32":
        values = [array.astype(np.int32) for array in values]
    function = {"sum": np.add, "mean": np.add, "max": np.maximum, "min": np.minimum, "prod": np.multiply}[op]
    answer: np.ndarray[Any, Any] = functools.reduce(function, values)
    return answer / len(inputs) if op == "mean" else answer


def assert_close(got: Any, answer: np.ndarray[Any, Any], dtype: str, ranks: int, what: str) -> None:
    """Compare; each of the P - 1 operations of a reduction may round once, partial sums are at most 1.5 P large."""
    values = exact(got)
    assert values.shape == answer.shape, f"{what}: shape {values.shape} instead of {answer.shape}"
    if dtype.startswith("int"):
        assert np.array_equal(values, answer), f"{what}: {values} instead of {answer}"
        return
    size = np.maximum(np.abs(answer), 1.5 * ranks)
    worst = np.max(np.abs(values - answer) / size, initial=0.0)
    assert worst <= 2 * ranks * ROUNDING[dtype], f"{what}: off by {worst}"


def check(comm: Communicator, operation: str, lengths: list[int] | None = None, seed: int = 0) -> int:
    """Run one collective in all its variants and return how many there were. Raises on the first that is wrong."""
    checks = 0
    for algorithm in available(operation, comm):
        for count in sizes(comm.size) if lengths is None else lengths:
            checks += CHECKS[operation](comm, algorithm, count, seed)
    return checks


def check_all_reduce(comm: Communicator, algorithm: str, count: int, seed: int) -> int:
    cases = list(reductions(comm, algorithm, count))
    for dtype, op in cases:
        what = f"all_reduce {algorithm} of {count} {dtype}, {op}, rank {comm.rank} of {comm.size}"
        inputs = [draw(count, dtype, rank, seed) for rank in range(comm.size)]
        buffer = copied(inputs[comm.rank])
        all_reduce(buffer, comm, op, algorithm)
        assert_close(buffer, reduced(inputs, op, dtype), dtype, comm.size, what)
        same_on_all(comm, buffer, what)
    return len(cases)


def check_reduce_scatter(comm: Communicator, algorithm: str, count: int, seed: int) -> int:
    cases = list(reductions(comm, algorithm, count))
    for dtype, op in cases:
        what = f"reduce_scatter {algorithm} of {count} x 3 {dtype}, {op}, rank {comm.rank} of {comm.size}"
        inputs = [draw(3 * count, dtype, rank, seed).reshape(count, 3) for rank in range(comm.size)]
        full = copied(inputs[comm.rank])
        shard = reduce_scatter(full, comm, op, algorithm)
        answer = np.array_split(reduced(inputs, op, dtype), comm.size)[comm.rank]
        assert_close(shard, answer, dtype, comm.size, what)
        assert raw(full) == raw(inputs[comm.rank]), f"{what}: the input was changed"
    return len(cases)


def check_all_gather(comm: Communicator, algorithm: str, count: int, seed: int) -> int:
    uneven = [(count * rank) % 7 for rank in range(comm.size)]  # some of them empty
    for dtype in dtypes(comm, algorithm, count):
        what = f"all_gather {algorithm} of {count} {dtype}, rank {comm.rank} of {comm.size}"
        for counts, given in ((_split(count, comm.size), None), (uneven, None), (uneven, uneven)):
            everyones = [draw(2 * rows, dtype, rank, seed).reshape(rows, 2) for rank, rows in enumerate(counts)]
            answer = np.concatenate([exact(shard) for shard in everyones])
            shard = copied(everyones[comm.rank])
            gathered = all_gather(shard, comm, algorithm=algorithm, counts=given)
            assert np.array_equal(exact(gathered), answer), what
            assert raw(shard) == raw(everyones[comm.rank]), f"{what}: the shard was changed"
        out = plain(np.zeros((count, 2)), dtype)
        everyones = [draw(2 * rows, dtype, rank).reshape(rows, 2) for rank, rows in enumerate(_split(count, comm.size))]
        assert all_gather(everyones[comm.rank], comm, out, algorithm) is out
        assert np.array_equal(exact(out), np.concatenate([exact(shard) for shard in everyones])), f"{what}, out="
    return 4 * len(dtypes(comm, algorithm, count))


def check_broadcast(comm: Communicator, algorithm: str, count: int, seed: int) -> int:
    for dtype in dtypes(comm, algorithm, count):
        for root in _roots(comm):
            what = f"broadcast {algorithm} of {count} {dtype} from {root}, rank {comm.rank} of {comm.size}"
            buffer = draw(count, dtype, comm.rank, seed)
            broadcast(buffer, comm, root, algorithm)
            assert raw(buffer) == raw(draw(count, dtype, root, seed)), what
    return len(dtypes(comm, algorithm, count)) * len(_roots(comm))


def check_reduce(comm: Communicator, algorithm: str, count: int, seed: int) -> int:
    cases = [(*case, root) for case in reductions(comm, algorithm, count) for root in _roots(comm)]
    for dtype, op, root in cases:
        what = f"reduce {algorithm} of {count} {dtype}, {op}, to {root}, rank {comm.rank} of {comm.size}"
        inputs = [draw(count, dtype, rank, seed) for rank in range(comm.size)]
        buffer = copied(inputs[comm.rank])
        reduce(buffer, comm, root, op, algorithm)
        if comm.rank == root:
            assert_close(buffer, reduced(inputs, op, dtype), dtype, comm.size, what)
        else:
            assert raw(buffer) == raw(inputs[comm.rank]), f"{what}: a buffer that is not the root's was changed"
    return len(cases)


def check_gather(comm: Communicator, algorithm: str, count: int, seed: int) -> int:
    uneven = [(count * rank) % 7 for rank in range(comm.size)]
    for root in _roots(comm):
        for counts, given in ((_split(count, comm.size), None), (uneven, uneven)):
            what = f"gather {algorithm} of {counts} to {root}, rank {comm.rank} of {comm.size}"
            everyones = [draw(2 * rows, "float32", rank, seed).reshape(rows, 2) for rank, rows in enumerate(counts)]
            gathered = gather(everyones[comm.rank], comm, root, algorithm, given)
            if comm.rank == root:
                assert np.array_equal(gathered, np.concatenate(everyones)), what
            else:
                assert gathered is None, what
    return 2 * len(_roots(comm))


def check_scatter(comm: Communicator, algorithm: str, count: int, seed: int) -> int:
    for root in _roots(comm):
        for dtype in ("float32", "int64"):
            what = f"scatter {algorithm} of {count} x 2 {dtype} from {root}, rank {comm.rank} of {comm.size}"
            full = draw(2 * count, dtype, root, seed).reshape(count, 2)
            before = full.copy()
            shard = scatter(full if comm.rank == root else None, comm, root, algorithm)
            assert np.array_equal(shard, np.array_split(before, comm.size)[comm.rank]), what
            assert shard.dtype == before.dtype and np.array_equal(full, before), what
    return 2 * len(_roots(comm))


def check_all_to_all(comm: Communicator, algorithm: str, count: int, seed: int) -> int:
    ranks = range(comm.size)
    even = [_split(count, comm.size)] * comm.size
    uneven = [[(count + 3 * sender + receiver) % 5 for receiver in ranks] for sender in ranks]
    for table, how_many in ((even, 0), (uneven, 1), (uneven, 2)):  # how many of the two counts are given
        what = f"all_to_all {algorithm} of {table}, rank {comm.rank} of {comm.size}"
        everyones = [draw(2 * sum(row), "float32", rank, seed).reshape(-1, 2) for rank, row in enumerate(table)]
        mine = everyones[comm.rank].copy()
        counts = [table[comm.rank], [row[comm.rank] for row in table]][:how_many]
        arrived = all_to_all(mine, comm, algorithm, *counts)
        pieces = [np.split(everyones[sender], np.cumsum(table[sender])[:-1])[comm.rank] for sender in ranks]
        assert np.array_equal(arrived, np.concatenate(pieces)), what
        assert np.array_equal(mine, everyones[comm.rank]), f"{what}: the input was changed"
    return 3


CHECKS: dict[str, Callable[[Communicator, str, int, int], int]] = {
    "all_reduce": check_all_reduce,
    "reduce_scatter": check_reduce_scatter,
    "all_gather": check_all_gather,
    "broadcast": check_broadcast,
    "reduce": check_reduce,
    "gather": check_gather,
    "scatter": check_scatter,
    "all_to_all": check_all_to_all,
}


def same_on_all(comm: Communicator, buffer: Any, what: str) -> None:
    """Assert that the bytes are the same on all ranks."""
    everyones = comm.roll_call(digest(buffer))
    assert len(set(everyones)) == 1, f"{what}: the ranks' results differ in bits"


def _roots(comm: Communicator) -> list[int]:
    return sorted({0, comm.size // 2, comm.size - 1})


def _split(count: int, ranks: int) -> list[int]:
    return [len(part) for part in np.array_split(np.empty(count), ranks)]


def rounds(ranks: int) -> int:
    """Return ceil(log2 P)."""
    return math.ceil(math.log2(ranks))
