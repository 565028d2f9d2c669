"""Buckets: many gradients in one flat tensor of registered memory, which one collective reduces.

    parameters, last first    head.weight │ norm.weight │ down.weight │ ...
    flat                      ├── view ───┼──── view ───┼──── view ───┤
                              ◀───────────────────── one all-reduce ──▶

    in a backward             filling ── launch ─▶ launched ── wait ─▶ done
                              └ mark_ready, for each gradient that comes

Each message costs a latency, however small it is, and then a time for each byte. A bucket is so
large that the latency hardly counts, and so small that there are several: one travels while the
next is filled. (Li et al. 2020, section 3.2.)
"""

from collections.abc import Callable, Iterable
from enum import Enum, auto

from torch import Tensor, nn

from minidist.full.comm import Communicator
from minidist.full.comm.stream import Handle, Stream
from minidist.full.ddp.flatten import flat_buffer, take_gradients, views_into
from minidist.full.ddp.options import BUCKET_MIB
from minidist.full.placement import copies_of, placement_of

MIB = 1 << 20
BUCKET_BYTES = int(BUCKET_MIB * MIB)
FIRST_BUCKET_BYTES = MIB  # small, so that the first message leaves early in backward


class BucketState(Enum):
    """How far a bucket is in a backward."""

    FILLING = auto()  # gradients are still to come
    LAUNCHED = auto()  # they are being reduced
    DONE = auto()  # they are reduced, and somebody has waited for it


class Bucket:
    """Parameters whose gradients are reduced together.

    The gradients stay where autograd has put them until `take` moves them into one flat tensor.
    The ranks of `comm`, which hold the same parameters, reduce it on `link`.

    Attributes
    ----------
    state : BucketState
        Each verb asks for the state it needs, and raises RuntimeError in another one.
    ready : set[nn.Parameter]
        Those whose gradients have come in this backward.
    taken : set[nn.Parameter]
        Those whose gradients were taken since they were last forgotten.
    """

    flat: Tensor | None = None

    def __init__(
        self, parameters: list[nn.Parameter], comm: Communicator, link: Communicator
    ) -> None:
        self.parameters, self.link = parameters, link
        self.kind = parameters[0].dtype, parameters[0].device  # of all its parameters
        self.state = BucketState.FILLING
        self.ready: set[nn.Parameter] = set()
        self.taken: set[nn.Parameter] = set()
        self.handle: Handle | None = None

    # ---------------------------------------------------------------- its way through a backward

    def refill(self) -> None:
        """Begin another backward: no gradient has come yet."""
        self.state = BucketState.FILLING
        self.ready.clear()

    def mark_ready(self, parameter: nn.Parameter) -> None:
        """Note that a gradient has come."""
        self._expect(BucketState.FILLING, "take one more gradient")
        self.ready.add(parameter)

    @property
    def complete(self) -> bool:
        """Whether all gradients have come."""
        return len(self.ready) == len(self.parameters)

    def launch(self, reduce: Callable[["Bucket"], Handle]) -> None:
        """Begin to reduce the gradients; `reduce` returns what to wait for."""
        self._expect(BucketState.FILLING, "be launched")
        self.handle = reduce(self)
        self.state = BucketState.LAUNCHED

    def wait(self) -> None:
        """Wait until the gradients are reduced. It may be called again."""
        if self.state is not BucketState.DONE:
            self._expect(BucketState.LAUNCHED, "be waited for")
            assert self.handle is not None, "what is launched has one"
            self.handle.wait()
            self.state = BucketState.DONE

    def _expect(self, state: BucketState, verb: str) -> None:
        if self.state is not state:
            raise RuntimeError(
                f"a bucket that is {self.state.name.lower()} cannot {verb}, or its gradients would "
                f"be reduced twice or not at all: it must be {state.name.lower()}"
            )

    # ---------------------------------------------------------------- where its gradients are

    def moved(self, parameter: nn.Parameter) -> bool:
        """Tell whether a parameter was moved or converted: torch drops our hooks on it then."""
        return (parameter.dtype, parameter.device) != self.kind

    def check_place(self, parameter: nn.Parameter) -> None:
        """Raise RuntimeError if a parameter was moved or converted."""
        if self.moved(parameter):
            raise RuntimeError(self.moved_away(parameter))

    def moved_away(self, parameter: nn.Parameter) -> str:
        """Return what to say of a parameter whose gradients do not come here any more."""
        was, now = "{}, {}".format(*self.kind), f"{parameter.dtype}, {parameter.device}"
        how, fix = f"from {was} to {now}", "call .to(), .half(), ..."
        if was == now:
            how, fix = "and back, or by grad.data =", f"use grad.copy_() for that, and {fix}"
        return (
            f"a parameter of shape {list(parameter.shape)} was moved or converted {how}, so its "
            f"gradients would no longer come here: {fix} on the model before wrapping it"
        )

    def adopt(self, parameter: nn.Parameter) -> None:
        """Take over the parameter's gradient. Here it stays where autograd has put it."""

    def take(self) -> Tensor:
        """Return all gradients in one flat tensor, to be reduced.

        A missing gradient counts as zero.
        """
        self.taken.update(parameter for parameter in self.parameters if parameter._grad is not None)
        return take_gradients(self.parameters)

    def unreduced(self, parameter: nn.Parameter) -> Tensor | None:
        """Return the gradient of a parameter if it has come, or was changed, since the bucket was
        reduced.
        """
        return parameter._grad


class FlatBucket(Bucket):
    """A bucket whose gradients are views into one flat buffer."""

    flat: Tensor

    def __init__(
        self, parameters: list[nn.Parameter], comm: Communicator, link: Communicator
    ) -> None:
        super().__init__(parameters, comm, link)
        self.reduced = -1  # torch's count of changes when the gradients were reduced last
        self.flat = flat_buffer(parameters, comm)
        self.views = dict(zip(parameters, views_into(self.flat, parameters), strict=True))

    def moved(self, parameter: nn.Parameter) -> bool:
        """Tell whether a parameter was moved or converted: torch takes its gradient out then."""
        outside = (
            self.views[parameter].untyped_storage().data_ptr()
            != self.flat.untyped_storage().data_ptr()
        )
        return outside or super().moved(parameter)

    def adopt(self, parameter: nn.Parameter) -> None:
        """Move the parameter's gradient into the bucket, wherever autograd has put it.

        A missing one counts as zero.

        Raises
        ------
        RuntimeError
            If the model was moved or converted meanwhile.
        """
        self.check_place(parameter)
        view = self.views[parameter]
        if parameter._grad is None:
            view.zero_()
        elif parameter._grad is not view:
            view.copy_(parameter._grad)
        parameter._grad = view

    def take(self) -> Tensor:
        """Return the buffer."""
        return self.flat

    def wait(self) -> None:
        """Wait until the gradients are reduced. It may be called again."""
        if self.state is not BucketState.DONE:
            super().wait()
            self.reduced = self.flat._version

    def unreduced(self, parameter: nn.Parameter) -> Tensor | None:
        """Return the gradient of a parameter if it has come, or was changed, since the bucket was
        reduced.
        """
        unchanged = self.reduced == self.flat._version and parameter._grad is self.views[parameter]
        return None if unchanged else parameter._grad


def kind_of(parameter: nn.Parameter) -> tuple[object, ...]:
    """Return what all parameters in one flat tensor must have in common.

    A parameter that another stage of a pipeline has, too, gets a flat tensor of its own: both
    stages then cut it alike. Experts that ranks have shared out have other copies than all else.
    """
    placement = placement_of(parameter)
    alone = id(parameter) if placement.tie else None
    return (
        parameter.dtype,
        parameter.device,
        parameter.requires_grad,
        alone,
        placement.experts,
    )


def partition(
    parameters: list[nn.Parameter], bucket_bytes: int, first_bytes: int
) -> list[list[nn.Parameter]]:
    """Deal parameters out, in order, to lists.

    A list has one kind, and is closed once it holds enough bytes.
    """
    parts: list[list[nn.Parameter]] = []
    held, limit = 0, first_bytes
    for parameter in parameters:
        same = bool(parts) and kind_of(parts[-1][0]) == kind_of(parameter)
        if not (same and held < limit):
            limit, held = bucket_bytes if parts else first_bytes, 0
            parts.append([])
        parts[-1].append(parameter)
        held += parameter.nbytes
    return parts


def of_one_kind(parameters: Iterable[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Deal parameters out to lists of one kind each."""
    kinds: dict[object, list[nn.Parameter]] = {}
    for parameter in parameters:
        kinds.setdefault(kind_of(parameter), []).append(parameter)
    return list(kinds.values())


def links_of(
    parameters: Iterable[nn.Parameter], comm: Communicator, stream: Stream[Communicator]
) -> dict[Communicator, Communicator]:
    """Return for `comm`, and for the copies of experts that ranks have shared out, a communicator
    that only the stream's thread uses. Collective.
    """
    groups = dict.fromkeys(
        copies for parameter in parameters if (copies := copies_of(parameter, comm)) is not comm
    )
    return {comm: stream.comm} | {copies: copies.fork() for copies in groups}
