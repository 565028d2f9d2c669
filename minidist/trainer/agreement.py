"""Ranks go on together, or stop together with one sentence; and what tells whether they have the
same model.
"""

import hashlib
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import nn

from minidist.comm import Communicator

Ready = TypeVar("Ready")


def all_or_none(comm: Communicator, work: Callable[[], Ready], *refused: type[Exception]) -> Ready:
    """Do `work` and return this rank's result. Collective: `work` sends nothing, or fails on all
    ranks alike.

    Raises
    ------
    Exception
        If `work` raises one of the kinds `refused` on any rank: every rank raises what the first of
        these ranks did.
    """
    problem = None
    try:
        result = work()
    except refused as error:
        problem = type(error), str(error)
    for kind, sentence in filter(None, comm.roll_call(problem)):
        raise kind(sentence)
    return result


def fingerprint(model: nn.Module) -> str:
    """Return a digest of all parameters' bits: ranks that hold the same model have the same."""
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
