"""Lesson 16, task 2: trainings in which something becomes of a weight."""

from __future__ import annotations

import numpy as np
from judges import letters

from minidist.course.grader.contract import Case, Draw


def damage(kind: str, where: int, when: int, *who: int, ranks: int = 3) -> Draw:
    """Draw a training of four steps in which, at step `when`, something becomes of array number
    `where` on some ranks.

    `kind` is what: `bit` (one bit of one number), `swap` (two numbers change places), `sign` (0.0
    becomes -0.0), `nan` (on every rank alike), `sum` (two numbers change, their sum does not),
    `exchange` (arrays 0 and 1 change places), `rest` (a bit of this array and of all behind it) or
    `nothing`.
    """

    def draw(rng: np.random.Generator) -> list[Case]:
        weights = rng.integers(1, 9, (3, 2, 4)).astype(np.float64)
        weights[:, 0, 0], weights[:, 1, 1] = 20.0, 0.0
        shared = {
            "weights": weights,
            "where": np.array(where),
            "when": np.array(when),
            "kind": letters(kind),
        }
        given = tuple(
            {**shared, "mine": np.array(int(not who or rank in who))} for rank in range(ranks)
        )
        label = f"{ranks} ranks, {kind}"
        return [Case(given, label)]

    return draw


# the digest of all weights drawn from these is NaN after one of the four steps, if it is read as
# float64: by SHA-256, of the arrays or of their digests; and by SHA-1 and BLAKE2
NO_NUMBERS = (299188, 114996)


def nothing_wrong(rng: np.random.Generator) -> list[Case]:
    """Nothing is wrong; and the same of weights whose digest is no number to who reads it so."""
    nothing = damage("nothing", 0, 0, 1)
    cases = [nothing(np.random.default_rng(seed))[0] for seed in NO_NUMBERS]
    return nothing(rng) + [case._replace(label=f"{case.label}, other weights") for case in cases]


def several_differ(rng: np.random.Generator) -> list[Case]:
    """Rank 0 differs in two arrays; or rank 1 differs in one, and rank 2 in the one behind it."""
    case = damage("others", 0, 1, 1, 2, ranks=5)(rng)[0]
    case.given[2]["mine"] = np.array(2)  # type: ignore[index]
    return [*damage("rest", 1, 2, 0)(rng), case]
