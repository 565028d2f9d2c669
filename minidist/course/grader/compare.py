"""What came out, held against what should have: a rejection says which misconception gives just
this.

    expect_close(rank, "the gradient", found, mean, instead={"each rank divides by its own count": own})

    rank 1: the gradient[0] is 2.5, expected 2: this is what comes out if each rank divides by its own count

All known mistakes in `instead` that fit are told, and `grading.py` keeps the likeliest of them. Where
none fits, the rejection says what any array can show: nothing was written, it is another rank's, so
many times too large, transposed, in another order. "Is 2.5, expected 2" alone is the last resort.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from functools import partial
from itertools import combinations
from typing import Any, TypeAlias

import numpy as np

Array: TypeAlias = np.ndarray[Any, Any]
Arrays: TypeAlias = Mapping[str, Array]
# by a clause behind "this is what comes out if": an array, or what returns one
Instead: TypeAlias = Mapping[str, Any]

# of the largest value on any rank: where a rank should have zeros, rounding is measured against
# this
NOTHING = 1e-6
ROUNDED = 1e-6  # of the largest value: what float32 leaves of a float64, after a few operations
MANY_PARTS = 8  # ranks: of more, only sums of one part, or of all but one, are tried
LARGEST_FACTOR = 64  # of ranks or microbatches, by which an answer may be wrong throughout
SEEN = object()  # stands for what was found: a clause that says what is seen, and gives no reason
COMES_OUT, OR_IF = ": this is what comes out if ", ", or if "
# Mistakes that an answer has not made: they would have given something else where it is right.
REFUTED: ContextVar[Set[str]] = ContextVar("refuted", default=frozenset())


class Wrong(Exception):
    """An answer is wrong. The text is one sentence for the student: where, what was found, what was
    expected.
    """


def expect_equal(rank: int, name: str, found: Array, expected: Array, **hints: Any) -> None:
    """Raise `Wrong` unless both have the same shape and values; the first difference is named.
    Hints: `expect_close`.

    >>> expect_equal(0, "x", found, expected, instead={"ranks are counted from 1": one_more}, others=everyones)
    """
    expect_close(rank, name, found, expected, 0.0, **hints)


def expect_close(
    rank: int,
    name: str,
    found: Array,
    expected: Array,
    tolerance: float = 1e-9,
    instead: Instead | None = None,
    others: Sequence[Array] = (),
    before: Array | None = None,
    least: float = 0.0,
    parts: Sequence[Array] = (),
) -> None:
    """Raise `Wrong` unless both have the same shape and differ by at most `tolerance` times the
    largest expected value.

    The tolerance allows for float64 that was added up in another order. What is not a number differs from everything.

    Parameters
    ----------
    instead : mapping of str to array, or to a function that returns one
        What known mistakes give, by a clause: "each rank divides by its own count". A function is
        called only if the task has a wrong answer.
    others : sequence of arrays
        What each rank should have, by rank: an answer may have another's.
    before : array
        What was given, if the answer was to change it: it may still be there.
    least : float
        What the largest expected value counts as, if it is smaller: an expected 0 may come out as a
        rounding error.
    parts : sequence of arrays
        What each rank adds to the sum, if it is one: an answer may have left some out.
    """
    if is_close(found, expected, tolerance, least):
        refute(instead or {}, lambda value: is_close(np.asarray(value), expected, tolerance, least))
        return
    # A mistake may give small values, whose rounding is that of the large ones before it.
    largest = np.abs(expected).max(initial=0.0) if np.isfinite(expected).all() else 0.0
    hint = known(
        instead or {}, lambda value: is_close(found, np.asarray(value), tolerance, largest)
    )
    hint = (
        hint
        or some_parts(found, parts, tolerance)
        or likeness(rank, found, expected, tolerance, others, before)
    )
    if found.shape != expected.shape:
        raise Wrong(f"rank {rank}: {name} has shape {found.shape}, expected {expected.shape}{hint}")
    off = np.abs(found - 1.0 * expected)  # the farthest is named, of exact ones the first
    at = (
        np.nanargmax(np.where(off == off, off, np.inf))
        if tolerance
        else np.argmax(found != expected)
    )
    where = tuple(int(i) for i in np.unravel_index(at, found.shape))
    index = f"[{', '.join(map(str, where))}]" if where else ""
    is_it, should = (
        f"{each[where]:.9g}" if tolerance else str(each[where]) for each in (found, expected)
    )
    raise Wrong(f"rank {rank}: {name}{index} is {is_it}, expected {should}{hint}")


def expect_ranks(
    name: str,
    found: Sequence[Array],
    expected: Sequence[Array],
    tolerance: float = 1e-9,
    **hints: Any,
) -> None:
    """Hold what every rank has against what it should have, by rank, as `expect_close`; with
    tolerance 0 exactly.

    `before`, and each value of `instead` or what its function returns, are of all ranks here, by
    rank.
    """
    instead, before = hints.get("instead", {}), hints.get("before", [None] * len(found))

    def everywhere(values: Any) -> bool:
        every = values() if callable(values) else values
        return all(
            is_close(mine, np.asarray(one), tolerance)
            for mine, one in zip(found, every, strict=True)
        )

    least = NOTHING * max(
        (float(np.abs(each).max()) for each in expected if each.size), default=0.0
    )
    for rank, mine in enumerate(found):
        # what fits on all ranks is more likely than on one
        if not is_close(mine, expected[rank], tolerance, least):
            instead = {
                story: values for story, values in instead.items() if everywhere(values)
            } or instead
        mistakes = {story: partial(_of_rank, values, rank) for story, values in instead.items()}
        expect_close(
            rank, name, mine, expected[rank], tolerance, mistakes, expected, before[rank], least
        )


def _of_rank(values: Any, rank: int) -> Any:
    return (values() if callable(values) else values)[rank]


def is_close(found: Array, expected: Array, tolerance: float, least: float = 0.0) -> bool:
    """Tell whether both have the same shape and differ by at most `tolerance` times the largest
    expected value.

    The largest expected value counts as `least`, if it is smaller.
    """
    if not tolerance or not found.size or found.shape != expected.shape:
        return np.array_equal(found, expected)
    largest = max(np.abs(expected).max(), least, 1e-300)
    if not np.isfinite(largest):
        return np.array_equal(found, expected)  # what is infinite is close to itself only
    return bool(np.abs(found - 1.0 * expected).max() <= tolerance * largest)


def known(instead: Instead, same: Callable[[Any], bool]) -> str:
    """Return which mistakes in `instead` give the `same`, in words that go behind the rejection, or
    nothing.

    All that fit are told, since a small case cannot tell them apart and another one may; those that
    `refuting` has refuted are not. Clauses whose value is `SEEN` are told where no mistake fits. It
    also serves for what is no array: `known({"ranks are counted from 1": 5}, lambda value: value ==
    found)`.
    """
    refuted = REFUTED.get()
    fits = [
        story
        for story, value in instead.items()
        if story not in refuted and value is not SEEN and _gives(value, same)
    ]
    fits = fits or [story for story, value in instead.items() if value is SEEN]
    return COMES_OUT + OR_IF.join(fits) if fits else ""


def expect(right: bool, says: str, instead: Instead, same: Callable[[Any], bool]) -> None:
    """Raise `Wrong` with what an answer `says`, and the mistakes that give the `same`, unless it is
    right.
    """
    if not right:
        raise Wrong(says + known(instead, same))
    refute(instead, same)


@contextmanager
def refuting(refuted: Set[str]) -> Iterator[None]:
    """Let `known` tell none of these mistakes while judges run; to a set that is not frozen, add
    those that right values refute.
    """
    token = REFUTED.set(refuted)
    try:
        yield
    finally:
        REFUTED.reset(token)


def refute(instead: Instead, same: Callable[[Any], bool]) -> None:
    """Note the mistakes that do not give the `same` as a right answer."""
    refuted = REFUTED.get()
    if not isinstance(refuted, set):
        return
    for story, value in instead.items():
        with suppress(Exception):  # A mistake may have no outcome here, as None says, too.
            if value is not SEEN and value is not None and not _gives(value, same):
                refuted.add(story)


def _gives(value: Any, same: Callable[[Any], bool]) -> bool:
    outcome = same(value() if callable(value) else value)
    return outcome is not NotImplemented and bool(outcome)  # as `[1].__eq__(None)` is


def some_parts(found: Array, parts: Sequence[Array], tolerance: float) -> str:
    """Return which ranks' parts alone are in a sum, in words that go behind the rejection, or
    nothing.
    """
    ranks = range(len(parts))
    few = len(parts) <= MANY_PARTS
    sizes = ranks[1:] if few else sorted({1, len(parts) - 1} & set(ranks[1:]))
    for chosen in (each for size in sizes for each in combinations(ranks, size)):
        if found.any() and is_close(
            found, np.asarray(sum(parts[rank] for rank in chosen)), tolerance
        ):
            only = "only what ranks {} have" if len(chosen) > 1 else "only what rank {} has"
            return f": {only.format(' and '.join(map(str, chosen)))} is in it"
    return ""


def likeness(
    rank: int,
    found: Array,
    expected: Array,
    tolerance: float,
    others: Sequence[Array],
    before: Array | None,
) -> str:
    """Return what a wrong array looks like, in words that go behind the rejection, or nothing."""
    same: Callable[[Array, Array], bool] = partial(is_close, tolerance=tolerance)
    if (broken := int((~np.isfinite(found)).sum())) and np.isfinite(expected).all():
        return f": {broken} of its {found.size} values are infinite or not a number"
    if before is not None and same(found, before):
        return ": it is still what was given"
    for other, value in enumerate(others):
        if other != rank and same(found, np.asarray(value)):
            return f": that is what rank {other} should have"
    if found.size != expected.size or found.size < 2:
        return scaled(found, expected) if found.shape == expected.shape else ""
    if not found.any():
        return ": all of it is 0, as if nothing had been written"
    if found.ndim == 2 and same(found.T, expected):
        return ": it is transposed"
    if found.shape != expected.shape:
        return (
            ": the values are right, the shape is not"
            if same(found.reshape(expected.shape), expected)
            else ""
        )
    if tolerance and is_close(found, expected, ROUNDED):
        return ": it is right to seven digits, as if it had been rounded to float32 on the way"
    ordered = same(np.sort(found, axis=None), np.sort(expected, axis=None))
    return scaled(found, expected) or (
        ": these are the right values in another order" if ordered else ""
    )


def scaled(found: Array, expected: Array) -> str:
    """Return what to say if all of an array is too large or too small by one whole factor, or has
    the other sign.
    """
    # exactly: large ones differ in their last digits
    whole = found.dtype.kind in "iu" and expected.dtype.kind in "iu"
    kind, near = (object, 0.0) if whole else (np.complex128, 1e-6)
    a, b = found.astype(kind), expected.astype(kind)
    if a.any() and np.abs(a + b).max() <= near * np.abs(a).max():
        return ": all of it has the other sign"
    for small, large, part in ((b, a, "{} times"), (a, b, "1/{} of")):
        times = (
            round(np.abs(large).sum() / max(np.abs(small).sum(), 1e-300))
            if np.isfinite(found).all()
            else 0
        )
        if (
            1 < times <= LARGEST_FACTOR
            and np.abs(large - times * small).max() <= near * np.abs(large).max()
        ):
            return f": all of it is {part.format(times)} that"
    return ""
