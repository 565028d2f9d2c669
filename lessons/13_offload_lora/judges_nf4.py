"""Lesson 13, task 3: the judge of weights in four bits."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np

from minidist.course.grader.contract import Array, Arrays, Case, Note, Wrong, expect_close, known

BELOW = [-1.0, -0.6961928, -0.52507305, -0.39491749, -0.28444138, -0.18477343, -0.09105004, 0.0]
LEVELS = np.array(
    [*BELOW, 0.0795803, 0.1609302, 0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1.0]
)


def judge_nf4(case: Case, results: Sequence[Arrays], notes: Sequence[Note]) -> None:
    """Shapes and bytes; scales within their rule; each weight at its nearest level; what is packed
    can be read.
    """
    given, found = case.given[0], results[0]
    flat, count = given["weights"].ravel().astype("float64"), given["weights"].size
    for name in ("codes", "scales", "steps", "mean"):
        if (found[name].dtype, found[name].shape) != (given[name].dtype, given[name].shape):
            kind = f"{given[name].dtype} {given[name].shape}"
            raise Wrong(f"{name} are {found[name].dtype} {found[name].shape}, expected {kind}")
    if count % 2 and found["codes"][-1] & 15:
        raise Wrong(
            f"of {count} weights the last byte is {found['codes'][-1]:#04x}: its low four "
            "bits are of no weight, 0"
        )
    if not flat.any() and (astray := np.flatnonzero(found["codes"][: count // 2] != 0x77)).size:
        code = found["codes"][astray[0]] >> 4
        raise Wrong(
            f"all weights and scales are 0, and weight {2 * astray[0]} has the code {code}, "
            "expected 7"
        )
    expect_scales(
        found,
        np.array([np.abs(flat[start : start + 64]).max() for start in range(0, count, 64)]),
        flat,
    )
    expect_codes(found, flat)
    if (kind := found["read"].dtype) != np.float32:
        raise Wrong(f"dequantize returns {kind}, expected float32")
    shape = given["weights"].shape
    instead = {clause: partial(reread, given, count, shape, how) for how, clause in READS.items()}
    expect_close(
        0,
        "dequantize of given codes",
        found["read"],
        reread(given, count, shape),
        1e-5,
        instead=instead,
    )
    for each, bits in zip((count, 64, 100_000), found["bits"].tolist(), strict=True):
        codes, blocks, groups = -(-each // 2), -(-each // 64), -(-each // 64 // 256)
        expected = 8 * (codes + blocks + 4 * groups + 4) / each
        instead = {
            "the mean is not counted": expected - 32 / each,
            "the steps are not counted": expected - 32 * groups / each,
            "the codes alone are counted": 8 * codes / each,
            "the codes and scales alone are counted": 8 * (codes + blocks) / each,
            "bytes are counted, not bits": expected / 8,
            "a code takes a whole byte; two share one": 8 * (each + blocks + 4 * groups + 4) / each,
            "a scale takes 4 bytes; it is an int8": 8
            * (codes + 4 * blocks + 4 * groups + 4)
            / each,
            "each block has a scale of 4 bytes, and nothing else: scales are packed, too, to a byte, "
            "with steps and a mean": 8 * (codes + 4 * blocks) / each,
            "steps and mean take a byte each; they are float32": 8
            * (codes + blocks + groups + 1)
            / each,
            "a step takes a byte; it is float32": 8 * (codes + blocks + groups + 4) / each,
            "a step takes 2 bytes; it is float32": 8 * (codes + blocks + 2 * groups + 4) / each,
            "each group has a mean of its own; all blocks share one": 8
            * (codes + blocks + 8 * groups)
            / each,
            "there are 256 weights in a group; it is 256 blocks": (
                8 * (codes + blocks + 4 * -(-each // 256) + 4) / each
            ),
            "a last block that is not full is left out": 8
            * (codes + each // 64 + 4 * groups + 4)
            / each,
            "a last group that is not full is left out": 8
            * (codes + blocks + 4 * (blocks // 256) + 4)
            / each,
            "the last byte, with one code, is left out": 8
            * (each // 2 + blocks + 4 * groups + 4)
            / each,
            "blocks and groups that are not full count in part": 8
            * (codes + each / 64 + each / 64 / 64 + 4)
            / each,
            "it is the limit for many weights, with all blocks and groups full": 4
            + 8 / 64
            + 32 / 64 / 256,
        }
        if abs(bits - expected) > 1e-9:
            why = known(instead, lambda value: abs(value - bits) < 1e-9)  # noqa: B023
            raise Wrong(f"bits_per_weight({each}) is {bits:.6f}, expected {expected:.6f}{why}")


def expect_scales(found: Arrays, largest: Array, flat: Array) -> None:
    """Raise `Wrong` unless the mean, the steps and the scales are those of blocks with these
    largest |weights|.
    """
    blocks = [flat[start : start + 64] for start in range(0, len(flat), 64)]
    means = {
        "the largest weight of a block is taken, not the largest |weight|": np.mean(
            [b.max() for b in blocks]
        ),
        "it is the mean of all |weights|, not of the blocks' largest": np.abs(flat).mean(),
        "it is the largest of all blocks": largest.max(),
        "it is the smallest of the blocks' largest": largest.min(),
        "it is the median of the blocks' largest": np.median(largest),
        "it is the mean of each block's mean |weight|": np.mean([np.abs(b).mean() for b in blocks]),
        "it is half of largest and smallest": (largest.max() + largest.min()) / 2,
        "it is the sum, not divided by the number of blocks": largest.sum(),
        "it is left 0": 0.0,
    }
    far = np.abs(largest - largest.mean())
    steps = np.array([far[start : start + 256].max() for start in range(0, len(far), 256)]) / 127
    instead = {clause: np.reshape(value, 1) for clause, value in means.items()}
    expect_close(0, "mean", found["mean"], largest.mean().reshape(1), 1e-5, instead=instead)
    groups = [largest[start : start + 256] - largest.mean() for start in range(0, len(far), 256)]
    instead = {
        "all groups have the step of the largest deviation of all": np.full(
            len(steps), far.max() / 127
        )
    }
    instead |= {
        f"it is divided by {by}; a code lies between -127 and 127": steps * 127 / by
        for by in (1, 15, 126, 128, 254, 255, 256)
    }
    instead |= {
        "only deviations above the mean are looked at, not |largest - mean|": np.array(
            [g.max() / 127 for g in groups]
        ),
        "only deviations below the mean are looked at": np.array([-g.min() / 127 for g in groups]),
        "the mean is not subtracted before": np.array(
            [(g + largest.mean()).max() / 127 for g in groups]
        ),
        "it is the range of largest - mean, from the smallest to the largest": np.array(
            [(g.max() - g.min()) / 127 for g in groups]
        ),
        "the mean of each group is subtracted, not that of all blocks": np.array(
            [np.abs(g - g.mean()).max() / 127 for g in groups]
        ),
    }
    expect_close(0, "steps", found["steps"], steps, 1e-4, instead=instead)
    step = np.repeat(found["steps"], 256)[: len(far)]
    off = (read_scales(found) - largest) / np.where(step == 0, 1, step)
    if (wrong := np.flatnonzero((off < -1e-3) | (off > 1.001))).size:
        says = (
            f"the scale of block {wrong[0]} lies {off[wrong[0]]:.3f} steps above its largest "
            "|weight|"
        )
        ways = {
            "scale codes are rounded down, not up": 0.0,
            "scale codes are rounded to the nearest, not up": 0.5,
        }
        raise Wrong(f"{says}, expected 0 to 1{known(ways, lambda most: off.max() <= most + 1e-3)}")


def expect_codes(found: Arrays, flat: Array) -> None:
    """Raise `Wrong` unless each weight has the code of the level that is nearest, by the scales as
    they are read.
    """
    count, scale = len(flat), np.repeat(read_scales(found), 64)[: len(flat)]
    most = np.abs(LEVELS * scale[:, None] - flat[:, None]).min(1) + 1e-6 * np.abs(flat).max()
    weights = read(found, count)
    if (wrong := np.flatnonzero(np.abs(weights - flat) > most)).size:
        swapped = read({**found, "codes": found["codes"] >> 4 | found["codes"] << 4}, count)
        largest = np.maximum.reduceat(np.abs(flat), range(0, count, 64)).repeat(64)[:count]
        mean, safe = found["mean"].astype("float64")[0], np.where(scale == 0, 1, scale)

        def by(other: Array) -> Array:
            return (
                LEVELS[np.abs(LEVELS - (flat / np.where(other == 0, 1, other))[:, None]).argmin(1)]
                * scale
            )

        above = LEVELS[np.minimum(np.searchsorted(LEVELS, flat / safe), 15)] * scale
        codes = np.stack((found["codes"] >> 4, found["codes"] & 15), axis=1).ravel()[:count]
        instead = {
            "the earlier weight's code is in the low four bits": np.abs(swapped - flat) <= most,
            "a code is that of weight / largest, not of weight / scale": by(largest) == weights,
            "the mean is not added to scale code * step": by(scale - mean) == weights,
            "weights are not divided by their scale": by(np.ones(count)) == weights,
            "weights are divided by the mean": by(np.full(count, mean)) == weights,
            "the next level above is taken": above == weights,
            "levels are taken to be equally far apart": (
                codes == np.clip(np.rint((flat / safe + 1) * 7.5), 0, 15)
            ),
            "levels are taken to be signed numbers from -8 to 7": codes
            == np.clip(np.rint(flat / safe * 7) + 8, 0, 15),
            "codes count from the largest level down": (
                15 - codes == np.abs(LEVELS - (flat / safe)[:, None]).argmin(1)
            ),
            "weights are cut off to the level towards zero": np.abs(weights) <= np.abs(flat) + 1e-9,
        }
        says = f"weight {wrong[0]} is {flat[wrong[0]]:.6f} and is read as {weights[wrong[0]]:.6f}"
        raise Wrong(
            f"{says}: not the nearest level{known(instead, lambda fits: fits.mean() > 0.98)}"
        )


def read_scales(packed: Arrays) -> np.ndarray:
    """Return the scales of all blocks."""
    steps = np.repeat(packed["steps"].astype("float64"), 256)[: len(packed["scales"])]
    return packed["scales"] * steps + packed["mean"]


def read(packed: Arrays, count: int) -> np.ndarray:
    """Return the weights of all codes."""
    codes = np.stack((packed["codes"] >> 4, packed["codes"] & 15), axis=1).ravel()[:count]
    return LEVELS[codes] * np.repeat(read_scales(packed), 64)[:count]


READS = {
    "no mean": "the mean is not added to scale code times step",
    "low first": "the earlier weight's code is in the low four bits",
    "halves": "all high four bits are read first, then all low ones; the two of a byte are neighbours",
    "one step": "all groups have the step of the first",
    "step of the block": "each block takes a step of its own, modulo groups; a group has 256 blocks",
    "unsigned": "scale codes are read as unsigned numbers",
    "equal levels": "levels are taken to be equally far apart, not those of LEVELS",
    "no scale": "levels are not multiplied by a scale",
    "scale without step": "the scale code is not multiplied by its step",
    "one block": "all weights have the scale of the first block",
    "mean times": "the mean multiplies, and is not added",
    "divides": "levels are divided by the scale",
}


def reread(given: Arrays, count: int, shape: Sequence[int], how: str = "") -> Array:
    """Return the weights that task 3b reads; `how` is one of `READS`."""
    high, low, codes = given["codes"] >> 4, given["codes"] & 15, given["scales"].astype("float64")
    both = {"low first": np.stack((low, high), axis=1), "halves": np.stack((high, low))}
    which = both.get(how, np.stack((high, low), axis=1)).ravel()[:count]
    codes = codes % 256 if how == "unsigned" else codes
    steps, mean = given["steps"].astype("float64"), float(given["mean"][0])
    step = {
        "one step": steps[:1].repeat(len(codes)),
        "step of the block": np.resize(steps, len(codes)),
    }
    step["scale without step"] = np.ones(len(codes))
    each = codes * step.get(how, np.repeat(steps, 256)[: len(codes)])
    each = {"no mean": each, "no scale": np.ones(len(codes)), "mean times": each * mean}.get(
        how, each + mean
    )
    scale = (each[:1].repeat(len(each)) if how == "one block" else each).repeat(64)[:count]
    levels = np.linspace(-1, 1, 16) if how == "equal levels" else LEVELS
    with np.errstate(divide="ignore"):
        return (levels[which] / scale if how == "divides" else levels[which] * scale).reshape(shape)
