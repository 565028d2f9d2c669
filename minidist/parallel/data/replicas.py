"""Replicas: the same model on every rank of an axis, or a sentence that says where two differ."""

from __future__ import annotations

from collections.abc import Collection
from itertools import zip_longest

from torch import Tensor, nn

from minidist.collectives import broadcast
from minidist.comm import Communicator, MismatchError


def make_equal(model: nn.Module, comm: Communicator, ignored: Collection[nn.Parameter] = ()) -> None:
    """Overwrite all parameters, but those that are to be `ignored`, and all buffers with rank 0's. Collective.

    Raises
    ------
    MismatchError
        On every rank, if two ranks' models differ in a name, shape, dtype, or in what is frozen.
    ValueError
        If ranks that are threads share one model.
    """
    check_same(model, comm)
    for tensor in [*(parameter for parameter in model.parameters() if parameter not in ignored), *model.buffers()]:
        copy_from_root(tensor, comm)


def check_same(model: nn.Module, comm: Communicator) -> None:
    """Raise MismatchError on every rank unless all have built the same model; values may differ. Collective.

    TypeError, also on every rank, for a complex parameter or buffer.
    """
    if comm.wire.one_process and len(set(comm.roll_call(id(model)))) < comm.size:
        raise ValueError("the ranks are threads, and share one model: build it in the function that each of them runs")
    described = [
        (name, tuple(tensor.shape), str(tensor.dtype), "trained" if tensor.requires_grad else "fixed")
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]
    ]
    for rank, other in enumerate(comm.roll_call(described)):
        if other != described:
            pairs = zip_longest(described, other, fillvalue="nothing")
            mine, theirs = next(pair for pair in pairs if pair[0] != pair[1])
            raise MismatchError(
                f"rank {comm.rank} and rank {rank} built different models: {mine} here, {theirs} there, of "
                f"{len(described)} and {len(other)} tensors: build the same model on every rank"
            )
    for name, _, dtype, _ in described:
        if "complex" in dtype and comm.size > 1:
            raise TypeError(
                f"{name} is {dtype}, and complex numbers do not travel between ranks, under no strategy: hold its real "
                "and imaginary part, torch.view_as_real, and take the complex view in forward"
            )


def copy_from_root(tensor: Tensor, comm: Communicator) -> None:
    """Overwrite a tensor with rank 0's, also one that is a transposed view or lies channels last. Collective."""
    flat = tensor.detach().contiguous()
    broadcast(flat, comm, algorithm="tree")  # messages: what is done once shall not keep memory to stage it
    if flat.data_ptr() != tensor.data_ptr():
        tensor.detach().copy_(flat)
