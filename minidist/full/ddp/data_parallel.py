"""DDP for any model: a bucket is reduced while backward still computes the gradients of the next.

    backward   ...layer 4....layer 3....layer 2....layer 1...│ wait
    stream              └ bucket 0 ┘ └── bucket 1 ──┘ └ bucket 2 ┘

`DDP` has a `Reducer`, which has the hooks on backward. The bytes are those of `PlainDataParallel`: each rank
sends 2 (P - 1)/P n bytes for n bytes of gradients. (Li et al. 2020, section 3.2.)
"""

from collections.abc import Set

from torch import Tensor, nn

from minidist.full.collectives import PreparedLater
from minidist.full.comm import Communicator
from minidist.full.comm.stream import Handle, Stream
from minidist.full.ddp.buckets import BUCKET_BYTES, FIRST_BUCKET_BYTES, Bucket, FlatBucket
from minidist.full.ddp.reducer import Reducer
from minidist.full.ddp.strategy import DataParallel
from minidist.full.memory.hooks import Hook
from minidist.full.optimizer.guard import Guard
from minidist.full.placement import copies_of


class DDP(DataParallel):
    """All-reduce each bucket in place, so that every rank has all gradients. To read:
    `minidist.ddp.DDP`.

    Parameters
    ----------
    model, comm, op, unused, equal
        As for `DataParallel`.
    bucket_bytes, first_bucket_bytes : int
        A bucket is closed once it holds this many bytes. The first bucket is small, so that sending
        starts early.

    A second backward adds to the first, as in a serial run. Gradients of an earlier backward are
    already summed over ranks. So before the next all-reduce every rank but rank 0 zeroes them.
    (Experts: every copy but the first.) `torch.autograd.grad` runs no hooks, so it returns this
    rank's own gradients.
    """

    stream: Stream[Communicator]
    kind: type[Bucket] = FlatBucket

    def __init__(
        self,
        model: nn.Module,
        comm: Communicator,
        op: str | None = None,
        unused: bool = False,
        bucket_bytes: int = BUCKET_BYTES,
        first_bucket_bytes: int = FIRST_BUCKET_BYTES,
        *,
        equal: bool = False,
    ) -> None:
        super().__init__(model, comm, op, unused, equal=equal)
        self.stream = comm.stream()
        # Experts that no other rank has are left out: their gradients are whole as they come.
        shared = [
            parameter
            for parameter in self.parameters_to_reduce
            if copies_of(parameter, comm).size > 1 or comm.size == 1
        ]
        self.reducer = Reducer(self, self.kind, shared, bucket_bytes, first_bucket_bytes)
        if comm.size > 1:
            self.hooks.append(Guard(Hook(self._check_step)))
        self.reductions = {
            bucket: PreparedLater("all_reduce", bucket.flat, bucket.link, op=self.op)
            for bucket in self.reducer.buckets
            if bucket.flat is not None
        }

    def _check_step(self, _: object, updated: Set[int]) -> None:
        """Raise ValueError if a step would update one of these by a gradient of this rank alone."""
        for parameter in self.reducer.bucket_of:
            if id(parameter) in updated and self.reducer.only_own(parameter):
                raise ValueError(
                    f"{self.names[parameter]} has a gradient that nobody has reduced, so this step "
                    "would differ between ranks: let the last backward() run outside of no_sync(), "
                    "and use autograd.grad() with a model that no DDP wraps"
                )

    def launch(self, bucket: Bucket) -> Handle:
        """Begin to sum a bucket over ranks; return what to wait for."""
        bucket.take()
        return self.stream.launch(self.reductions[bucket])

    def begin_again(self) -> None:
        """Let gradients that are sums already, and the same on every rank, enter the next sum only
        once.
        """
        if self.op == "sum":
            for parameter in self.parameters_to_reduce:
                if parameter.grad is not None and copies_of(parameter, self.comm).rank > 0:
                    parameter.grad.zero_()

    def synchronize(self) -> None:
        """Reduce what `no_sync` has only added up, if no later backward has reduced it."""
        self.reducer.synchronize()

    def forget_gradients(self, parameters: Set[nn.Parameter], set_to_none: bool = True) -> None:
        """Forget the gradients of these parameters, or make them zeros; see `DataParallel`."""
        super().forget_gradients(parameters, set_to_none)
        self.reducer.forget(parameters, set_to_none)

    def held(self) -> dict[str, list[Tensor]]:
        """Return this rank's tensors by category, for `Account`: the buckets are gradients."""
        flats = [bucket.flat for bucket in self.reducer.buckets if bucket.flat is not None]
        return {"gradients": flats}

    def _check_parameters(self) -> None:
        """Raise if nobody would reduce the gradient of a trained parameter, or one was
        converted.
        """
        super()._check_parameters()
        self.reducer.check_places()
