# task 4: every rank clips by the norm of its own slices, so each scales by another factor.
from solution import *  # noqa: F403

from minidist.full import clip_by_global_norm


def clip(slices, limit, comm):
    return clip_by_global_norm(slices, limit)
