"""Lesson 16, tasks 1, 2 and 4: the programs that run beside an answer, and their judges."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

import numpy as np

from minidist import Communicator
from minidist.course.grader.contract import Array, Arrays, Case, Note, Wrong, known, sent_by

CATEGORIES = ("parameters", "gradients", "optimizer", "activations", "communication")
NAMES = ("first.weight", "first.bias", "second.weight")
NOTHING = -1


def ask_words(exercise: ModuleType, comm: Communicator, given: Arrays) -> dict[str, Any]:
    """Run task 1."""
    hashed = hash_as_processes_do(exercise, comm.rank)
    odd = exercise.odd_ranks(given["words"].tobytes().decode(), comm)
    return {"odd": np.array(odd, np.int64), "hashed": len(hashed)}


def hash_as_processes_do(exercise: ModuleType, rank: int) -> list[int]:
    """Let `hash` in the answer have another secret on each rank, and return the list to which it
    adds what it gives: ranks are processes of their own at full scale, and here threads of one.
    """
    hashed: list[int] = []

    def hash_of_this_process(value: object) -> int:
        hashed.append(hash((rank, value)))
        return hashed[-1]

    vars(vars(exercise).get("_exercise", exercise)).setdefault("hash", hash_of_this_process)
    return hashed


def judge_words(case: Case, results: Sequence[Arrays], notes: Sequence[Note]) -> None:
    """Every rank names the same odd ones, after one digest from each to each."""
    texts = [given["words"].tobytes() for given in case.given]
    instead: dict[str, Any] = {
        clause: odd_ones([str(digest(text)) for text in texts])
        for clause, digest in DIGESTS.items()
    }
    instead["what rank 0 has counts as right, not what most have"] = odd_ones(texts, texts[0])
    last = max(reversed(texts), key=texts.count)
    instead["of equally many another text than that of the lowest rank counts as right"] = odd_ones(
        texts, last
    )
    rarest, right = min(texts, key=texts.count), odd_ones(texts)
    instead |= {
        "the text that the fewest ranks have counts as right": odd_ones(texts, rarest),
        "those are returned whose words are right": [
            rank for rank in range(case.ranks) if rank not in right
        ],
        "more than half of the ranks have to agree; the most frequent text is right, however "
        "frequent": (
            [*range(case.ranks)] if 2 * max(map(texts.count, texts)) <= case.ranks else [NOTHING]
        ),
        "only the first odd rank is returned": right[:1],
        "only the last odd rank is returned": right[-1:],
        "the alphabetically first of equally many texts is right": odd_ones(
            texts, max(sorted(texts), key=texts.count)
        ),
    }
    told = [result["odd"].tolist() for result in results]
    for rank, result in enumerate(results):
        mine = [other for other in range(case.ranks) if texts[other] != texts[rank]]
        near = [other for other in mine if (other - rank) % case.ranks in (1, case.ranks - 1)]
        own = {
            "what this rank has counts as right, not what most have": mine,
            "only the neighbours' words are compared with this rank's": near,
            "answers are in the order in which they came, and are not put in the order of the "
            "ranks": odd_ones(
                [texts[(rank - distance) % case.ranks] for distance in range(case.ranks)]
            ),
            "answers are counted from this rank on, and not from rank 0": odd_ones(
                [texts[(rank + distance) % case.ranks] for distance in range(case.ranks)]
            ),
        }
        if rank and told[rank] == told[0] != right:
            own = {}
        if result["hashed"]:
            own, instead = {HASHED: told[rank]}, {}
        elif told[rank] and set(texts) <= {text.encode() for text in NO_NUMBERS}:
            own[NO_NUMBER] = told[rank]
        expect_ranks(rank, "the odd ranks", result["odd"], right, instead | own)
        expect_sent(rank, notes, [8] * (case.ranks - 1))


HASHED = "the digest is Python's `hash`, which is another in each process"
# their digests by SHA-256 and MD5, and by SHA-1 and BLAKE2, read as float64 are NaN
NO_NUMBERS = ("all_reduce(float32, 9637197, sum)", "all_reduce(float32, 21995376, sum)")
NO_NUMBER = "the digest is read as float64: one in a thousand is NaN, which is not equal to itself"
DIGESTS: dict[str, Callable[[bytes], object]] = {
    "the digest does not depend on the letters' order, as their sum does not": sorted,
    "the digest is a sum of letters times their places: many words have the same": lambda text: sum(
        place * letter for place, letter in enumerate(text)
    ),
    "the digest is the length": len,
    "the digest is of the first letters alone": lambda text: text[:8],
}


def odd_ones(answers: Sequence[Any], right: Any = None) -> list[int]:
    """Return which answers are not the `right` one: the most frequent one, of equally frequent ones
    the first.
    """
    counts = Counter(answers)
    right = right or max(counts, key=lambda answer: (counts[answer], -answers.index(answer)))
    return [rank for rank, answer in enumerate(answers) if answer != right]


def train(exercise: ModuleType, comm: Communicator, given: Arrays) -> dict[str, Any]:
    """Run task 2 after each of four steps; return the first that it found."""
    stored, hashed = given["weights"].copy(), hash_as_processes_do(exercise, comm.rank)
    # the last: not contiguous
    arrays = {name: stored[i].T if i == 2 else stored[i] for i, name in enumerate(NAMES)}
    found: dict[str, Any] = {"step": NOTHING, "name": NOTHING, "ranks": np.empty(0, np.int64)}
    for step in range(4):
        stored *= 2  # an update that rounds nothing, so what is odd stays odd
        if step == given["when"] and given["mine"]:
            kind = given["kind"].tobytes().decode()
            if kind == "exchange":
                stored[[0, 1]] = stored[[1, 0]]
            where = int(given["where"]) + (int(given["mine"]) - 1 if kind == "others" else 0)
            for number in range(where, len(NAMES) if kind == "rest" else where + 1):
                spoil(stored[number], "bit" if kind in ("rest", "others") else kind)
        odd = comm.rank % 2  # here the same numbers lie in another order
        answer = exercise.first_difference(
            {n: np.array(a, order="F") if odd else a for n, a in arrays.items()}, comm
        )
        if answer is not None and found["step"] == NOTHING:
            if not (isinstance(answer, tuple) and len(answer) == 2 and answer[0] in NAMES):
                raise Wrong(f"first_difference returns {answer!r}, expected (name, ranks), or None")
            name, ranks = answer
            found = {"step": step, "name": NAMES.index(name), "ranks": np.array(ranks, np.int64)}
    return found | {"hashed": len(hashed)}


def spoil(array: Array, kind: str) -> None:
    """Change an array of 2 x 4 float64, in place."""
    if kind == "bit":
        array.view(np.uint64)[1, 3] ^= np.uint64(1)
    elif kind == "swap":
        array[0, 0], array[0, 1] = array[0, 1], array[0, 0]
    elif kind == "sign":
        array[1, 1] = -array[1, 1]
    elif kind == "nan":
        array[0, 2] = np.nan
    elif kind == "sum":
        array[0, 0] += 1
        array[1, 0] -= 1


def judge_training(case: Case, results: Sequence[Arrays], notes: Sequence[Note]) -> None:
    """The step, the array and the ranks; and details are sent only from then on."""
    given = case.given[0]
    hit = [rank for rank, mine in enumerate(int(g["mine"]) for g in case.given) if mine == 1]
    later = [rank for rank, mine in enumerate(int(g["mine"]) for g in case.given) if mine == 2]
    bits = {rank: 1 if rank in hit else 0 for rank in range(case.ranks)}
    harmless = given["kind"].tobytes() == b"nothing" or len(hit) == case.ranks
    step = NOTHING if harmless else int(given["when"])
    for rank, result in enumerate(results):
        if (found := int(result["step"])) != step:
            says = [
                f"at step {number}" if number != NOTHING else "nowhere" for number in (found, step)
            ]
            missed = found == NOTHING or found > step != NOTHING
            why = MISSED[given["kind"].tobytes().decode()] if missed else IMAGINED
            why = f"this is what comes out if {HASHED}" if result["hashed"] else why
            raise Wrong(
                f"rank {rank}: the first difference is found {says[0]}, expected {says[1]}: {why}"
            )
        if not harmless:
            name = NAMES[int(result["name"])]
            if name != NAMES[int(given["where"])]:
                several = given["kind"].tobytes() in (b"rest", b"exchange")
                why = ", the first of several that differ" if several or later else ""
                raise Wrong(
                    f"rank {rank}: found {name}, expected {NAMES[int(given['where'])]}{why}"
                )
            right = odd_ones(list(bits.values()))
            instead = {
                "the ranks are returned that differ in any array, not in this one": sorted(
                    {*right, *later}
                ),
                "those are returned whose array is right": [
                    r for r in range(case.ranks) if r not in right
                ],
                "only the first odd rank is returned": right[:1],
                "the rank itself is returned": [rank],
                "all ranks are returned that differ from this one": [
                    r for r in bits if bits[r] != bits[rank]
                ],
            }
            expect_ranks(rank, f"the ranks where {name} is odd", result["ranks"], right, instead)
        odd_steps, others, all_of_them = 0 if harmless else 4 - step, case.ranks - 1, 8 * len(NAMES)
        one, good, where = [8] * others, [8] * others * (4 - odd_steps), int(given["where"])
        instead = {
            "the digests of all arrays are sent also while all is well": [all_of_them] * others * 4,
            "the digests of all arrays are sent besides while all is well": (
                one + [all_of_them] * others
            )
            * 4,
            "each array has messages of its own": good + one * (1 + len(NAMES)) * odd_steps,
            "each array, up to the first odd one, has messages of its own": good
            + one * (2 + where) * odd_steps,
        }
        sizes = [note.bytes for note in sent_by(rank, notes)]
        if harmless and 0 < sizes.count(all_of_them) < 4 * others:  # in one step, and not in all
            instead[NO_NUMBER] = sizes
        expect_sent(rank, notes, good + (one + [all_of_them] * others) * odd_steps, instead)


MISSED = {  # what is overlooked, by what was done
    "bit": "one bit of one number is another, which the digest has to see: it is of all bits, not of "
    "what is printed",
    "others": "one bit of one number is another, which the digest has to see: it is of all bits",
    "rest": "one bit of one number is another, which the digest has to see: it is of all bits, not of "
    "what is printed",
    "swap": "two numbers have changed places, which the digest has to see",
    "sum": "two numbers have changed, though not their sum, which the digest has to see",
    "exchange": "two arrays have changed places, which the digest of everything has to see",
    "sign": "0.0 has become -0.0, of which a bit is another",
}
IMAGINED = (
    "all bits are the same there, also of what is no number; arrays only lie in memory in another "
    "order"
)


def ask_memory(exercise: ModuleType, comm: Communicator, given: Arrays) -> dict[str, Any]:
    """Run task 4."""
    held = [dict(zip(CATEGORIES, row, strict=True)) for row in given["held"].tolist()]
    answer = exercise.out_of_memory(
        [(float(second), sample) for second, sample in enumerate(held)], 100, comm
    )
    if answer is None:
        return {"rank": NOTHING, "category": NOTHING}
    if not (isinstance(answer, tuple) and len(answer) == 2 and answer[1] in CATEGORIES):
        raise Wrong(
            f"out_of_memory returns {answer!r}, expected (rank, the name of a category), or None"
        )
    rank, category = answer
    return {"rank": rank, "category": CATEGORIES.index(category)}


def judge_memory(case: Case, results: Sequence[Arrays], notes: Sequence[Note]) -> None:
    """Compare peaks, which are moments, not sums of what was held at different ones."""
    held = [given["held"] for given in case.given]
    instead = {
        "what is just the capacity counts as above it": blamed(held, capacity=99),
        "the first rank above the capacity is taken": blamed(held, first=True),
        "the largest category is to blame": blamed(held, usual=lambda peaks, worst: 0),
        "the rank is compared with the mean": blamed(
            held, usual=lambda peaks, worst: peaks.mean(axis=0)
        ),
        "the rank itself is left out of the median": blamed(
            held, usual=lambda peaks, worst: np.median(np.delete(peaks, worst, axis=0), axis=0)
        ),
        "of equal peaks the last sample is taken": blamed([samples[::-1] for samples in held]),
        "the largest values of different moments are added up": blamed(
            [each.max(axis=0)[None] for each in held]
        ),
        "the last sample is taken, not the one with the largest total": blamed(
            [each[-1:] for each in held]
        ),
        "the first sample is taken, not the one with the largest total": blamed(
            [each[:1] for each in held]
        ),
        "the sample with the largest single category is taken": blamed(
            [each[each.max(axis=1).argmax()][None] for each in held]
        ),
        "the rank is compared with the least of all": blamed(
            held, usual=lambda peaks, worst: peaks.min(axis=0)
        ),
        "the rank is compared with the most of all": blamed(
            held, usual=lambda peaks, worst: peaks.max(axis=0)
        ),
        "the rank is compared with rank 0": blamed(held, usual=lambda peaks, worst: peaks[0]),
        "how many times as much as the median counts, not how much more": blamed(
            held, excess=lambda peak, usual: peak / np.maximum(usual, 1)
        ),
        "being far below the median counts as well": blamed(
            held, excess=lambda peak, usual: np.abs(peak - usual)
        ),
        "the category is taken that is least above the median": blamed(
            held, excess=lambda peak, usual: usual - peak
        ),
        "of several categories the last is taken": blamed(held, last_category=True),
        "of several ranks with the largest peak the last is taken": blamed(held, pick=last_of),
        "the rank is taken that is furthest above the median, not the one with the largest peak": blamed(
            held, pick=lambda peaks: int((peaks - np.median(peaks, axis=0)).max(axis=1).argmax())
        ),
        "the rank with the smallest peak is taken": blamed(
            held, pick=lambda peaks: int(peaks.sum(axis=1).argmin())
        ),
        "there is always a rank to blame": blamed(held, capacity=-1),
    }
    order = sorted(CATEGORIES)
    expected = blamed(held)
    for rank, result in enumerate(results):
        found = int(result["rank"]), int(result["category"])
        if found != expected:
            own = blamed(held, pick=lambda peaks, rank=rank: rank)
            others = {
                "each rank names itself, not the one with the largest peak": own
                if own[0] != expected[0]
                else None,
                "categories are in alphabetical order, not in that of the samples": (
                    expected[0],
                    CATEGORIES.index(order[expected[1]]) if expected[1] >= 0 else NOTHING,
                ),
            }
            others["each rank names itself, with the category of the right one"] = (
                rank,
                expected[1],
            )
            says = f"rank {rank}: out of memory is {named(*found)}, expected {named(*expected)}"
            raise Wrong(says + known(instead | others, found.__eq__))
        expect_sent(rank, notes, [40] * (case.ranks - 1))


def last_of(peaks: Array) -> int:
    """Return the last of the ranks with the largest peak."""
    totals = peaks.sum(axis=1)
    return len(totals) - 1 - int(totals[::-1].argmax())


def blamed(
    held: Sequence[Array],
    usual: Callable[[Array, int], Any] = lambda peaks, worst: np.median(peaks, axis=0),
    first: bool = False,
    capacity: int = 100,
    excess: Callable[[Array, Any], Array] = lambda peak, usual: peak - usual,
    pick: Callable[[Array], int] = lambda peaks: int(peaks.sum(axis=1).argmax()),
    last_category: bool = False,
) -> tuple[int, int]:
    """Return the rank and the category to blame; other arguments than `held` are what goes
    wrong.
    """
    peaks = np.array([samples[samples.sum(axis=1).argmax()] for samples in held])
    totals = peaks.sum(axis=1)
    if totals.max() <= capacity:
        return NOTHING, NOTHING
    worst = int((totals > capacity).argmax()) if first else pick(peaks)
    more = excess(peaks[worst], usual(peaks, worst))
    return worst, len(more) - 1 - int(more[::-1].argmax()) if last_category else int(more.argmax())


def named(rank: int, category: int) -> str:
    """Say which rank and category."""
    return "None" if rank == NOTHING else f"rank {rank} by its {CATEGORIES[category]}"


def letters(text: str) -> Array:
    """Return a text as an array."""
    return np.frombuffer(text.encode(), np.uint8)


def expect_ranks(
    rank: int, name: str, found: Any, expected: list[int], instead: Mapping[str, Any]
) -> None:
    """Raise `Wrong` unless just these ranks were named; `instead` is what known mistakes name."""
    if (ranks := found.tolist()) != expected:
        raise Wrong(
            f"rank {rank}: {name} are {ranks}, expected {expected}{known(instead, ranks.__eq__)}"
        )


def expect_sent(
    rank: int, notes: Sequence[Note], sizes: list[int], instead: Mapping[str, Any] = {}
) -> None:
    """Raise `Wrong` unless a rank sent messages of just these sizes, in this order; `instead`: as
    known mistakes do.
    """
    found = [note.bytes for note in sent_by(rank, notes)]
    if found != sizes:
        raise Wrong(
            f"rank {rank} sent messages of {found} bytes, expected "
            f"{sizes}{known(instead, found.__eq__)}"
        )
