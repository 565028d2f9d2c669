"""Replicas: the same model on every rank of an axis, or else an error that says where two ranks
differ.

Every strategy that treats ranks as replicas comes here first. So one function, `check_same`, finds
out for all of them whether the ranks hold the same block of each parameter: it compares what the
records of tensor parallelism say. It compares blocks, not the members of communicators, because
`init(group)` numbers the ranks of each group anew.
"""

from collections.abc import Collection
from itertools import zip_longest
from typing import NamedTuple

from torch import Tensor, nn

from minidist.full.collectives import broadcast
from minidist.full.comm import Communicator, MismatchError
from minidist.full.placement import placement_of


class Block(NamedTuple):
    """Which part of a parameter a rank holds: channels `start` to `stop` along `dim`.

    `ranks` ranks share the parameter.
    """

    parameter: str
    dim: int
    start: int
    stop: int
    ranks: int


def make_equal(
    model: nn.Module, comm: Communicator, ignored: Collection[nn.Parameter] = ()
) -> None:
    """Overwrite all parameters (but the `ignored` ones), buffers, and extra state of modules by
    rank 0's. Collective.

    Experts that ranks have shared out are left as they are: they were equal before.

    Cost: one broadcast for each tensor, a roll call of the extra state if there is some (torch's
    word for what is neither parameter nor buffer), and those of `check_same`.

    Raises
    ------
    MismatchError
        On every rank, if the models of two ranks differ in a name, shape or dtype, or in what is
        frozen.
    ValueError
        On every rank, if ranks hold different blocks of a parameter, or if ranks that are threads
        share one model.
    TypeError
        On every rank, for a complex parameter or buffer.
    """
    check_same(model, comm, ignored)
    for tensor in [*model.parameters(), *model.buffers()]:
        if tensor not in ignored and placement_of(tensor).experts is None:
            copy_from_root(tensor, comm)
    extra = {
        name: module.get_extra_state()
        for name, module in model.named_modules()
        if keeps_more(module)
    }
    if extra:
        for name, state in comm.all_gather_object(extra)[0].items():
            model.get_submodule(name).set_extra_state(state)


def keeps_more(module: nn.Module) -> bool:
    """Tell whether a module's state has more than tensors that are parameters or buffers: such as a
    router's bias.
    """
    return type(module).set_extra_state is not nn.Module.set_extra_state


def check_same(
    model: nn.Module, comm: Communicator, ignored: Collection[nn.Parameter] = ()
) -> None:
    """Raise on every rank unless all have built the same model; values may differ.

    Collective, raises as `make_equal`.

    Tensor parallelism may have cut the model before, along another axis. Then all ranks must hold
    the same block of each parameter that is not `ignored`.

    Cost: one roll call of all names, shapes, dtypes and blocks; another where ranks are threads.
    """
    if comm.wire.one_process and len(set(comm.all_gather_object(id(model)))) < comm.size:
        raise ValueError(
            "the ranks are threads, and share one model: build it in the function that each of "
            "them runs"
        )
    compared = [
        (name, tensor)
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]
        if placement_of(tensor).experts is None  # ranks may have different numbers of experts
    ]
    described = [
        (
            name,
            tuple(tensor.shape),
            str(tensor.dtype),
            "trained" if tensor.requires_grad else "fixed",
        )
        for name, tensor in compared
    ]
    blocks = {name: None if tensor in ignored else block_of(tensor) for name, tensor in compared}
    everyones: list[tuple[list[tuple[object, ...]], dict[str, Block | None]]] = (
        comm.all_gather_object((described, blocks))
    )
    check_blocks([held for _, held in everyones])
    for rank, (other, _) in enumerate(everyones):
        if other != described:
            pairs = zip_longest(described, other, fillvalue="nothing")
            mine, theirs = next(pair for pair in pairs if pair[0] != pair[1])
            raise MismatchError(
                f"rank {comm.rank} and rank {rank} built different models: {mine} here, {theirs} "
                f"there, of {len(described)} and {len(other)} tensors: build the same on every rank"
            )
    for name, _, dtype, _ in described:
        if "complex" in dtype and comm.size > 1:
            raise TypeError(
                f"{name} is {dtype}, and complex numbers do not travel between ranks: hold its "
                "real and imaginary part, torch.view_as_real, and take the complex view in forward"
            )


def block_of(parameter: Tensor) -> Block | None:
    """Return which block of a parameter this rank holds; None if it holds the whole."""
    placement = placement_of(parameter).block
    if placement is None or placement.dim is None:
        return None
    start, stop = placement.bounds[placement.comm.rank]
    return Block(placement.name, placement.dim, start, stop, placement.comm.size)


def check_blocks(everyones: list[dict[str, Block | None]]) -> None:
    """Raise ValueError if ranks that are to be replicas hold different blocks of a parameter.

    `everyones` are the blocks of each rank, by the parameters' names. All ranks raise the same.
    """
    for name, first in everyones[0].items():
        for rank, blocks in enumerate(everyones):
            # a name that is missing is another model: see `check_same`
            other = blocks.get(name, first)
            cut = first or other
            if cut is not None and other != first:
                raise ValueError(
                    f"tensor parallelism has cut {cut.parameter} along an axis of {cut.ranks} "
                    f"ranks, and of the {len(everyones)} ranks given here rank 0 has "
                    f"{_words(first)}, but rank {rank} {_words(other)}: one would overwrite the "
                    "other, so pass the ranks that hold the same block: mesh.dp, or mesh.data "
                    "where there is a context axis"
                )


def _words(block: Block | None) -> str:
    return (
        f"channels {block.start} to {block.stop - 1} of dim {block.dim}" if block else "all of it"
    )


def copy_from_root(tensor: Tensor, comm: Communicator) -> None:
    """Overwrite a tensor of any memory layout by rank 0's: one broadcast. Collective."""
    flat = tensor.detach().contiguous()
    broadcast(flat, comm, algorithm="tree")  # faster algorithms would keep memory afterwards
    if flat.data_ptr() != tensor.data_ptr():
        tensor.detach().copy_(flat)
