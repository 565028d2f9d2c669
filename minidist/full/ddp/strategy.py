"""What all strategies over the data axis share: a model that is wrapped, and starts equal on all
ranks.

They differ in what they reduce, and when. That is theirs, and so are their hooks on backward.
"""

from collections import Counter
from collections.abc import Collection, Iterator, Set
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import nn

from minidist.full.collectives import all_reduce
from minidist.full.comm import Communicator
from minidist.full.ddp.backward import kept_by_graph, remove_all
from minidist.full.ddp.replicas import copy_from_root, make_equal
from minidist.full.memory.hooks import waiting_for
from minidist.full.placement import any_experts, copies_of
from minidist.full.replica import Replica


class DataParallel(nn.Module, Replica):
    """What all strategies share, plain or fast: ranks that start equal, buffers that stay equal,
    and `no_sync`.

    Parameters
    ----------
    model : nn.Module
        The serial model. Its parameters and buffers are overwritten by rank 0's.
    comm : Communicator
        The ranks of the data axis.
    op : {"sum", "mean"}
        How the gradients of all ranks are joined: "mean" if each rank's loss is the mean over its
        own batch, as in torch's DDP; "sum" if each rank divides its loss by the tokens of all
        ranks. There is no default: the wrong one makes all gradients P times too large or too
        small, which Adam hides.
    unused : bool
        Allow parameters that get no gradient. A parameter that no rank has used then keeps
        `grad = None`, as in a serial run; finding out costs an all-reduce of one byte for each
        parameter. Without it, such a parameter is an error.
    equal : bool
        All ranks have the same values already, so nothing is compared and broadcast.

    Raises
    ------
    MismatchError
        On every rank, if the ranks' models differ in a name, shape or dtype, or in what is frozen.
    ValueError
        If `op` is missing or unknown, if a layer would compute something else on each rank (see
        `check_layers`), if another strategy has wrapped the model already, or if tensor parallelism
        has given ranks of `comm` different blocks of a parameter.
    """

    alone = False
    own_buffers = False  # whether a forward in training may have changed buffers, since rank 0's
    ignored: Set[nn.Parameter] = frozenset()  # left to the caller, if the strategy offers that

    def __init__(
        self,
        model: nn.Module,
        comm: Communicator,
        op: str | None = None,
        unused: bool = False,
        *,
        equal: bool = False,
    ) -> None:
        super().__init__()
        self.op = checked_op(op, type(self).__name__)
        self.module, self.comm = model, comm
        self.hooks: list[Any] = []  # on the model, until `unwrap`
        self.names = {
            parameter: name
            for name, parameter in model.named_parameters()
            if parameter not in self.ignored
        }
        for parameter, name in self.names.items():
            if parameter.untyped_storage().nbytes() < parameter.nbytes:
                raise ValueError(
                    f"{name} has no memory of its own, as if sharded already, so there is nothing "
                    "to start from: wrap the model once"
                )
            if waiting_for(parameter):
                raise ValueError(
                    f"parameter {name} belongs to another DDP already: call unwrap() on the other "
                    "first"
                )
        check_layers(model, comm, self.names, type(self).__name__)
        self.expected = ExpectedGradients(
            type(self).__name__, self.names, comm, unused, self.ignored
        )
        self.parameters_to_reduce = self.expected.parameters
        if self.op == "mean" and any_experts(self.names):
            raise ValueError(
                "op='mean' would divide shared-out experts by their copies, not the ranks: use "
                "op='sum'"
            )
        if not equal:
            make_equal(model, comm, self.ignored)

    @property
    def called(self) -> nn.Module:
        """What to call in place of the model."""
        return self

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model.

        Buffers such as running averages first become rank 0's, in training, and in the first
        evaluation after it: one broadcast for each.

        Raises
        ------
        RuntimeError
            In training, if a parameter was added or unfrozen after wrapping: nobody would reduce
            its gradient. In evaluation this is found out when a backward ends.
        """
        if self.training:
            self._check_parameters()
            self.own_buffers = True
        if self.own_buffers and self.expected.synchronising:
            for buffer in self.module.buffers():
                copy_from_root(buffer, self.comm)
            self.own_buffers = self.training
        return kept_by_graph(self, self.module(*args, **kwargs))

    def unwrap(self) -> nn.Module:
        """Return the model without hooks, to be changed and wrapped again."""
        remove_all(self.hooks)
        return self.module

    def __getstate__(self) -> NoReturn:
        """Refuse to be copied or pickled: running ranks cannot be copied."""
        raise TypeError(
            f"{type(self).__name__} belongs to running ranks: copy or save its .module instead"
        )

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Only add up gradients locally in this context: for all microbatches of a step but the
        last.
        """
        expected = self.expected
        before, expected.synchronising = expected.synchronising, False
        try:
            yield
        finally:
            expected.synchronising = before

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all gradients, or make them zeros."""
        self.forget_gradients(set(self.parameters_to_reduce), set_to_none)

    def forget_gradients(self, parameters: Set[nn.Parameter], set_to_none: bool = True) -> None:
        """Forget the gradients of these parameters.

        Without `set_to_none` they become zeros, as in torch.

        Zeros move twice the bytes: autograd reads them and adds to them, instead of putting its own
        in their place.
        """
        for parameter in parameters:
            if set_to_none:
                parameter._grad = None
            elif parameter._grad is not None:
                parameter._grad.zero_()

    def volume(self, microbatches: int) -> tuple[str, float]:
        """Return what a rank sends in a step: one all-reduce, or its two halves, of which ZeRO 2
        takes the first for each microbatch.
        """
        halves = 2 if self.whole_gradients else microbatches + 1
        # by the ranks that hold the same: all of the data axis, or fewer for experts
        bytes = Counter[Communicator]()
        for parameter in self.parameters_to_reduce:
            bytes[copies_of(parameter, self.comm)] += parameter.nbytes
        sent = sum(halves * (comm.size - 1) / comm.size * count for comm, count in bytes.items())
        formula = f"{halves} (P - 1)/P x bytes"
        if len(bytes) > 1:
            formula += ", of experts with P copies"
        return formula, sent

    def _check_parameters(self) -> None:
        """Raise RuntimeError if the model has a trained parameter whose gradient nobody would
        reduce.
        """
        self.expected.check_parameters(self.module)

    def reduced(self, used: Set[nn.Parameter]) -> None:
        """Set `grad = None` for parameters that no rank has used: all gradients of a backward are
        reduced. Raises as `ExpectedGradients`.
        """
        self._check_parameters()
        self.expected.drop_unused(used)


class ExpectedGradients:
    """Knows the trained parameters, and says what is wrong with the gradients that came.

    Parameters
    ----------
    strategy : str
        Who asks, for errors.
    names : dict[nn.Parameter, str]
        All parameters, in the same order on every rank of `comm`.
    unused : bool
        Allow parameters that get no gradient, as for `DataParallel`.
    ignored : Set[nn.Parameter]
        Parameters whose gradients are the caller's business.

    Attributes
    ----------
    parameters : list[nn.Parameter]
        The trained ones.
    synchronising : bool
        Whether the gradients of this backward are to be reduced; not in `no_sync`.
    nowhere_used : set[nn.Parameter]
        Those that no rank has used in the last step.
    """

    def __init__(
        self,
        strategy: str,
        names: dict[nn.Parameter, str],
        comm: Communicator,
        unused: bool,
        ignored: Set[nn.Parameter],
    ) -> None:
        self.strategy, self.names = strategy, names
        self.parameters = [parameter for parameter in names if parameter.requires_grad]
        self.shapes = {parameter: parameter.shape for parameter in self.parameters}
        self.comm, self.unused, self.ignored = comm, unused, ignored
        self.synchronising = True
        self.nowhere_used: set[nn.Parameter] = set()

    def check_parameters(self, model: nn.Module) -> None:
        """Raise RuntimeError if the model has a trained parameter whose gradient nobody would
        reduce.
        """
        for name, parameter in model.named_parameters():
            if not parameter.requires_grad or parameter in self.ignored:
                continue
            if self.shapes.get(parameter) != parameter.shape:
                raise RuntimeError(
                    f"parameter {name} was added, replaced, resized or unfrozen after wrapping, so "
                    "its gradients would stay different on every rank: change the model first, "
                    "then wrap it"
                )

    def refuse_graphs(self) -> None:
        """Raise RuntimeError in a backward whose gradients are to be differentiated again."""
        if torch.is_grad_enabled():
            raise RuntimeError(
                f"{self.strategy} reduces no graphs: call backward() without create_graph=True"
            )

    def check_arrival(self, parameter: nn.Parameter, arrived: Collection[nn.Parameter]) -> None:
        """Raise RuntimeError for a gradient that is to be differentiated again, that is sparse, or
        that came before in this backward.
        """
        self.refuse_graphs()
        refuse_sparse(parameter, self.names[parameter], self.strategy)
        if self.synchronising and parameter in arrived:
            raise RuntimeError(
                f"a second gradient came for {self.names[parameter]} within one backward, and the "
                "first may be reduced already: checkpointed layers that share it need "
                "checkpoint(use_reentrant=False)"
            )

    def drop_unused(self, used: Set[nn.Parameter]) -> None:
        """Set `grad = None` for parameters that no rank has used; without `unused`, raise for those
        of this rank.

        Cost: with `unused`, an all-reduce of one byte for each parameter.
        """
        parameters = self.parameters
        if not self.unused or not parameters:
            missing = [self.names[parameter] for parameter in parameters if parameter not in used]
            some = ", ".join(missing[:3])
            if len(missing) > 3:
                some += " and others"
            if missing:
                raise RuntimeError(
                    f"rank {self.comm.rank}: no gradient came for {some}: freeze them, or pass "
                    "unused=True if the model is meant to leave them out"
                )
            return
        device = "cpu" if parameters[0].device.type == "meta" else parameters[0].device
        flags = torch.tensor(
            [parameter in used for parameter in parameters], dtype=torch.uint8, device=device
        )
        all_reduce(flags, self.comm, op="max")
        self.nowhere_used = {
            parameter
            for parameter, flag in zip(parameters, flags.tolist(), strict=True)
            if not flag
        }
        for parameter in self.nowhere_used:
            parameter._grad = None


def check_layers(
    model: nn.Module, comm: Communicator, names: dict[nn.Parameter, str], strategy: str
) -> None:
    """Raise ValueError if a layer of the model would compute something else on each rank: a sparse
    gradient, rows that are normalised where they are looked up, statistics that need torch's group.
    """
    alone = comm.size > 1 and not torch.distributed.is_initialized()
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag):
            weight: Any = module.weight
            if module.sparse and weight.requires_grad and weight in names:
                raise ValueError(sparse_fault(names[weight], strategy))
            if module.max_norm is not None:
                raise ValueError(
                    f"{name} has max_norm={module.max_norm}, and a rank would normalise only the "
                    "rows that its batch uses, so copies would differ: leave max_norm out, and "
                    "normalise the whole weight after each step"
                )
        elif isinstance(module, nn.SyncBatchNorm) and alone:
            raise ValueError(
                f"{name} is a SyncBatchNorm, which asks torch's group of ranks, and there is none, so "
                "each rank would use the statistics of its own batch: use GroupNorm, or torchrun on "
                "GPUs"
            )


def refuse_sparse(parameter: nn.Parameter, name: str, strategy: str) -> None:
    """Raise RuntimeError if the gradient of a parameter is sparse."""
    if parameter._grad is not None and parameter._grad.layout != torch.strided:
        raise RuntimeError(sparse_fault(name, strategy))


def sparse_fault(name: str, strategy: str) -> str:
    """Return why a sparse gradient is refused."""
    return (
        f"the gradient of {name} is sparse, with other rows on each rank, and {strategy} reduces "
        "whole ones: give its embedding sparse=False, or freeze it"
    )


def checked_op(op: str | None, strategy: str) -> str:
    """Return `op`, by which gradients are joined. Raises ValueError if it is missing or unknown."""
    if op in ("sum", "mean"):
        return op
    if op is None:
        fault = f"{strategy} has no default for op="
    else:
        fault = f"op={op!r} is unknown to {strategy}"
    raise ValueError(
        f"{fault}, and the wrong one would make all gradients too large or too small by the number "
        "of ranks: pass op=\"mean\" if each rank's loss is the mean over its own batch, as in torch's "
        'DDP, or op="sum" if each rank divides its loss by the number of tokens of all ranks'
    )
