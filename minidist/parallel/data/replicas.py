"""Replicas: the same model on every rank of an axis, or else an error that says where two ranks differ."""

from collections.abc import Collection
from itertools import zip_longest

from torch import Tensor, nn

from minidist.collectives import broadcast
from minidist.comm import Communicator, MismatchError
from minidist.model.moe import routed_in
from minidist.parallel.placement import expert_groups_of


def make_equal(model: nn.Module, comm: Communicator, ignored: Collection[nn.Parameter] = ()) -> None:
    """Overwrite all parameters (but the `ignored` ones), buffers, and biases of routers by rank 0's. Collective.

    Experts that ranks have shared out are left as they are: they were equal before.

    Cost: one broadcast for each tensor, and the roll calls of `check_same`.

    Raises
    ------
    MismatchError
        On every rank, if the models of two ranks differ in a name, shape or dtype, or in what is frozen.
    ValueError
        If ranks that are threads share one model.
    TypeError
        On every rank, for a complex parameter or buffer.
    """
    check_same(model, comm)
    for tensor in [*model.parameters(), *model.buffers()]:
        if tensor not in ignored and expert_groups_of(tensor) is None:
            copy_from_root(tensor, comm)
    for layer in routed_in(model):
        if layer.config.balance == "bias" and not layer.router.is_meta:
            bias = layer.bias.to(layer.router.device)
            copy_from_root(bias, comm)
            layer.bias = bias.cpu()


def check_same(model: nn.Module, comm: Communicator) -> None:
    """Raise on every rank unless all have built the same model; values may differ. Collective, raises as `make_equal`.

    Cost: one roll call of all names, shapes and dtypes; another one where ranks are threads.
    """
    if comm.wire.one_process and len(set(comm.roll_call(id(model)))) < comm.size:
        raise ValueError("the ranks are threads, and share one model: build it in the function that each of them runs")
    described = [
        (name, tuple(tensor.shape), str(tensor.dtype), "trained" if tensor.requires_grad else "fixed")
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]
        if expert_groups_of(tensor) is None  # ranks may have different numbers of experts
    ]
    for rank, other in enumerate(comm.roll_call(described)):
        if other != described:
            pairs = zip_longest(described, other, fillvalue="nothing")
            mine, theirs = next(pair for pair in pairs if pair[0] != pair[1])
            fault = f"rank {comm.rank} and rank {rank} built different models: {mine} here, {theirs} there"
            raise MismatchError(f"{fault}, of {len(described)} and {len(other)} tensors: build the same on every rank")
    for name, _, dtype, _ in described:
        if "complex" in dtype and comm.size > 1:
            raise TypeError(f"{name} is {dtype}, which no rank can send: hold its torch.view_as_real instead")


def copy_from_root(tensor: Tensor, comm: Communicator) -> None:
    """Overwrite a tensor of any memory layout by rank 0's: one broadcast. Collective."""
    flat = tensor.detach().contiguous()
    broadcast(flat, comm, algorithm="tree")  # faster algorithms would keep memory afterwards
    if flat.data_ptr() != tensor.data_ptr():
        tensor.detach().copy_(flat)
