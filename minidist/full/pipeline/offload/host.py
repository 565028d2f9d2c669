"""Carrying out `OFF` and `FETCH`: weights leave for host memory and come back, beside the computing.

    2OFF0      device ──copy──▶ host      then the weights' storage is freed
    2OFF1                                 the copy is still right, so the storage is freed at once
    2FETCH0    host ──copy──▶ device      into a storage of the old size
    2F3                                   waits for the copy, if it is not done

Storages are resized, to 0 bytes and back, so what autograd has saved (a weight, or a view of it)
finds the same values in backward. The values are written past autograd, which would otherwise say
that a saved tensor was changed.

On a GPU the copies have a stream of their own, and pinned memory at the other end; on a CPU, whose
device memory is the host's, a thread shows the same. Parameters that two stages of a rank share
stay.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

Waiting: TypeAlias = Callable[[], object]
"""Called, it waits until something is done."""


class Port:
    """Where copies to the host and back are made: one after the other, beside the computing."""

    def __init__(self, device: torch.device) -> None:
        self.stream: Any = None
        if device.type == "cuda":
            self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self.worker = ThreadPoolExecutor(1, "host", torch.set_grad_enabled, (False,))

    def launch(self, job: Callable[..., None], *arguments: Any) -> Waiting:
        """Begin a job that copies; return what waits for it.

        On a GPU it is the stream of the computing that waits, not the caller.
        """
        if self.stream is None:
            return self.worker.submit(job, *arguments).result
        job(*arguments)
        done = self.stream.record_event()
        return lambda: torch.cuda.current_stream(self.stream.device).wait_event(done)

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Copy what the computing so far has left in `source`."""
        if self.stream is None:
            target.copy_(source)
            return
        self.stream.wait_stream(torch.cuda.current_stream(self.stream.device))
        with torch.cuda.stream(self.stream):
            target.copy_(source, non_blocking=True)
        for tensor in (target, source):
            if tensor.is_cuda:
                # the allocator gives its memory to nobody else before the copy is done
                tensor.record_stream(self.stream)


class StageWeights:
    """The parameters of one stage: on the device, on their way, or away."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.parameters = parameters
        self.copies: list[Tensor] = []
        self.away = False
        self.coming: Waiting | None = None

    def own(self) -> None:
        """Give a storage of its own to each parameter whose storage cannot be resized.

        On a CPU torch no longer resizes one that numpy has seen, as it has in every message.
        """
        for parameter in self.parameters:
            if not parameter.untyped_storage().resizable():
                parameter.data = parameter.data.clone()

    def leave(self, port: Port, copy: bool) -> None:
        """Free the parameters' storages, behind a copy if there is none of this step yet."""
        if not self.copies:
            for parameter in self.parameters:
                pinned = parameter.is_cuda
                self.copies.append(torch.empty_like(parameter, device="cpu", pin_memory=pinned))
        for parameter, kept in zip(self.parameters, self.copies, strict=True):
            if copy:
                port.copy(kept.data, parameter.data)
            parameter.untyped_storage().resize_(0)

    def come(self, port: Port) -> None:
        """Fill the storages again."""
        for parameter, kept in zip(self.parameters, self.copies, strict=True):
            parameter.untyped_storage().resize_(parameter.nbytes)
            # not `parameter.copy_`: autograd would count it as a change of what it has saved
            port.copy(parameter.data, kept.data)


class HostMemory:
    """The weights of a rank's stages that leave while their stage waits.

    Parameters
    ----------
    stages : mapping of int to nn.Module
        This rank's, by number.
    leaving : iterable of int
        Those that the plan offloads.

    Raises
    ------
    ValueError
        If a parameter shares its storage with others, so that it cannot be freed by itself.

    It holds as many bytes of the host's memory as the weights of these stages have.
    """

    def __init__(self, stages: Mapping[int, nn.Module], leaving: Iterable[int]) -> None:
        users = Counter(p for module in stages.values() for p in set(module.parameters()))
        self.weights = {}
        for stage in leaving:
            mine = [p for p in stages[stage].parameters() if users[p] == 1]
            self.weights[stage] = StageWeights(mine)
            for parameter in mine:
                if parameter.untyped_storage().nbytes() != parameter.nbytes:
                    raise ValueError(
                        f"the weights of stage {stage} lie in one buffer with others, as under "
                        "ZeRO, so they cannot be freed by themselves: use DDP, or a plan without "
                        "OFF and FETCH"
                    )
        device = next(p.device for module in stages.values() for p in module.parameters())
        self.port = Port(device) if self.weights else None

    def begin(self) -> None:
        """Prepare for a step."""
        for weights in self.weights.values():
            weights.own()

    def offload(self, stage: int, copy: bool) -> None:
        """Begin to let the weights of a stage leave; `copy` unless this step has copied them
        already.
        """
        self.ready(stage)
        assert self.port is not None
        self.weights[stage].away = True
        self.port.launch(self.weights[stage].leave, self.port, copy)

    def fetch(self, stage: int) -> None:
        """Begin to bring the weights of a stage back."""
        assert self.port is not None
        weights = self.weights[stage]
        weights.coming = self.port.launch(weights.come, self.port)
        weights.away = False

    def ready(self, stage: int) -> None:
        """Wait until the weights of a stage are there, if they are on their way."""
        weights = self.weights.get(stage)
        if weights is not None and weights.coming is not None:
            weights.coming()
            weights.coming = None

    def finish(self) -> None:
        """Wait for all weights, and bring those back that an error has left away."""
        for stage, weights in self.weights.items():
            if weights.away:
                self.fetch(stage)
            self.ready(stage)
