"""What native collectives of torch say when they fail."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.distributed as dist

import minidist
from minidist.full.comm.errors import RankFailed
from minidist.full.comm.torch_wire.native_torch import NativeTorch
from minidist.full.comm.torch_wire.stalls import Stalls


@pytest.mark.parametrize(
    ("said", "kind"),
    [
        ("[pair.cc:538] Read error [10.0.0.1]:917: Connection reset by peer", RankFailed),
        ("[pair.cc:81] Application timeout caused pair closure", RankFailed),
        ("NCCL communicator was aborted on rank 0.", RankFailed),
        ("tensors must be contiguous", RuntimeError),
    ],
)
def test_a_lost_rank_is_told_apart_from_a_wrong_call(
    said: str, kind: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job that goes on without lost ranks knows them by this."""

    def fail(*_: object) -> None:
        raise RuntimeError(said)

    def broadcast(comm: minidist.Communicator) -> None:
        native = NativeTorch((0,), None, None, torch.from_numpy, Stalls())  # type: ignore[arg-type]
        native.broadcast(np.zeros(1), comm, 0)

    monkeypatch.setattr(dist, "broadcast", fail)
    with pytest.raises(Exception) as raised:
        minidist.run(broadcast, 1)
    assert type(raised.value) is kind
