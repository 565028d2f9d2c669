"""Replicas: the same model on every rank of an axis, or else an error that says where two ranks
differ.

Every strategy that treats ranks as replicas comes here first. Ranks compare a line of text for each
tensor: name, shape, dtype, and which block tensor parallelism has left of it. The line names no
communicator, because `init(group)` numbers the ranks of each group anew.
"""

from collections.abc import Collection
from itertools import zip_longest

from torch import Tensor, nn

from minidist.full.collectives import broadcast
from minidist.full.comm import Communicator, MismatchError
from minidist.full.placement import placement_of


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
        On every rank, if the models of two ranks differ in a name, shape or dtype, in what is
        frozen, or in the blocks of a parameter that they hold.
    ValueError
        On every rank, if ranks that are threads share one model.
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
    lines = [
        describe(name, tensor, tensor in ignored)
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]
        if placement_of(tensor).experts is None  # ranks may have different numbers of experts
    ]
    everyones = comm.all_gather_object(lines)
    for rank, other in enumerate(everyones):
        if other != everyones[0]:
            pairs = zip_longest(everyones[0], other, fillvalue="nothing")
            first, second = next(pair for pair in pairs if pair[0] != pair[1])
            raise MismatchError(
                f"rank 0 and rank {rank} of {comm.size} have different models: {first} there, and "
                f"{second} here: build the same on every rank, and where tensor parallelism has "
                "cut it pass the ranks that hold the same block: mesh.dp, or mesh.data where "
                "there is a context axis"
            )
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if tensor.is_complex() and comm.size > 1:
            raise TypeError(
                f"{name} is {tensor.dtype}, and complex numbers do not travel between ranks: hold "
                "its real and imaginary part, torch.view_as_real, and take the complex view in "
                "forward"
            )


def describe(name: str, tensor: Tensor, ignored: bool) -> str:
    """Return what has to be the same on all ranks, in words."""
    trained = "trained" if tensor.requires_grad else "fixed"
    line = f"{name} {list(tensor.shape)} of {tensor.dtype}, {trained}"
    block = placement_of(tensor).block
    if block is None or block.dim is None or ignored:
        return line
    start, stop = block.bounds[block.comm.rank]
    return f"{line}, channels {start} to {stop - 1} of dim {block.dim} of {block.name} {list(block.shape)}"


def copy_from_root(tensor: Tensor, comm: Communicator) -> None:
    """Overwrite a tensor of any memory layout by rank 0's: one broadcast. Collective."""
    flat = tensor.detach().contiguous()
    broadcast(flat, comm, algorithm="tree")  # faster algorithms would keep memory afterwards
    if flat.data_ptr() != tensor.data_ptr():
        tensor.detach().copy_(flat)
