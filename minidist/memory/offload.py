"""Offloading: the optimizer's state lives in CPU memory or on a disk, and visits a chunk at a time.

    main      │ update chunk 0 ──────│ update chunk 1 ──────│ update chunk 2 ...
    worker    │ fetch 1 ─────────────│ keep 0 │ fetch 2 ────│ keep 1 │ fetch 3 ...

    fetch     gradients down from the device; state from its file into memory
    keep      parameters up to the device; state from memory into its file

AdamW keeps two numbers for each weight, and a third, the float32 master, if the weight has 16 bits: 12 bytes beside 2.
With `to="cpu"` they lie in host memory: a gradient travels down and a parameter up, and the update runs on the CPU (Ren
et al. 2021, ZeRO-Offload, section 4). With `to=folder` they lie in files, and memory holds two chunks of state: one
that is updated and one that comes or goes. (Rajbhandari et al. 2021, ZeRO-Infinity, section 5.)

Files are mapped into memory and have no name: they vanish with the tensor or with the process, whatever ends it. Their
space is claimed when they are made. A mapped file that meets a full disk later would end the process with SIGBUS.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from math import prod
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim.optimizer import ParamsT

from minidist.parallel.buckets import partition

MIB = 1 << 20
State: TypeAlias = dict[str, Any]
"""What is kept of one parameter: the optimizer's tensors and numbers by their names, and `master`."""


def mapped(shape: tuple[int, ...], dtype: torch.dtype, folder: Path, name: str = "tensor") -> Tensor:
    """Return a tensor of zeros whose memory is a file in `folder`, as the shards of ZeRO-3 may be.

    The system reads pages when they are touched and writes them back when it needs the memory. The file loses its name
    at once, so nothing is to be removed later: it lives as long as the tensor or a view of it.

    Raises
    ------
    OSError
        If the disk has no room, or the folder is not there. No space is taken then.
    """
    size = prod(shape) * dtype.itemsize
    if size == 0:
        return torch.empty(shape, dtype=dtype)
    free = shutil.disk_usage(folder).free
    descriptor, path = tempfile.mkstemp(prefix=f"{name}.", dir=folder)
    try:
        os.posix_fallocate(descriptor, 0, size)
        return torch.from_file(path, shared=True, size=prod(shape), dtype=dtype).view(shape)
    except OSError as error:
        raise OSError(error.errno, f"{name} needs {size:,} bytes in {folder}, where {free:,} are free") from None
    finally:
        os.close(descriptor)
        os.unlink(path)


@dataclass
class Visit:
    """A chunk in memory: parameters of one group, and what the optimizer is given in their place."""

    group: dict[str, Any]
    parameters: list[nn.Parameter]
    masters: list[nn.Parameter]
    states: list[State]


class OffloadedOptimizer(torch.optim.Optimizer):
    """Any optimizer that treats each parameter for itself, with its state elsewhere.

    Parameters
    ----------
    params : iterable of parameters, or of groups
        On any device.
    optimizer : type
        `torch.optim.AdamW` or any other class; it is given tensors on the CPU.
    to : "cpu" or Path
        Where the state lives: in host memory, or in files in a folder.
    chunk_bytes : int
        Parameters are updated in chunks that are closed once they hold so many bytes.
    **defaults
        The optimizer's own options.

    Raises
    ------
    OSError
        If the folder has no room for the state of all trained parameters; a later `step` claims the room for those that
        were unfrozen since. No parameter and no state has been changed then.

    The numbers are those of the optimizer itself, bit for bit. A parameter of 16 bits, or on a GPU, is updated as a
    float32 master on the CPU; who overwrites the parameter in place, say from a checkpoint, overwrites the master too.
    Tensors without dimensions, such as `step`, stay in memory.
    """

    def __init__(
        self,
        params: ParamsT,
        optimizer: Callable[..., torch.optim.Optimizer],
        to: Literal["cpu"] | Path = "cpu",
        chunk_bytes: int = 16 * MIB,
        **defaults: Any,
    ) -> None:
        self.optimizer, self.options, self.chunk_bytes = optimizer, defaults, chunk_bytes
        self.folder = None if to == "cpu" else Path(to)
        self.files: dict[Tensor, dict[str, Tensor]] = {}
        self.versions: dict[Tensor, int] = {}  # of parameters with a master, when they last were its rounded copies
        self.worker = Worker()
        super().__init__(params, optimizer([nn.Parameter(torch.zeros(1, 1))], **defaults).defaults)
        self._claim_files(lambda parameter: parameter.requires_grad)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient; return what `closure`, called first, returned."""
        with torch.enable_grad():
            loss = closure() if closure else None
        self._claim_files(lambda parameter: parameter.grad is not None)
        chunks = list(self._chunks())
        for device in {parameters[0].device for _, parameters in chunks if parameters[0].is_cuda}:
            torch.cuda.synchronize(device)  # the worker copies on another stream than the one that made the gradients
        kept: list[Future[None]] = []
        coming = [self.worker.submit(self._fetch, *chunk) for chunk in chunks[:1]]
        try:
            for number in range(len(chunks)):
                visit = coming.pop().result()
                coming += [self.worker.submit(self._fetch, *chunk) for chunk in chunks[number + 1 : number + 2]]
                visit.states = self._advance(visit.group, visit.masters, visit.states)
                kept.append(self.worker.submit(self._keep, visit))
        finally:
            self.worker.submit(lambda: None).result()  # all before it is done then, and forgotten
        for job in kept:
            job.result()
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of this class or of the bare optimizer, and move it to its place."""
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        mine = [parameter for group in self.param_groups for parameter in group["params"]]
        loaded = {p: state_dict["state"][n] for n, p in zip(numbers, mine, strict=False) if n in state_dict["state"]}
        self._claim_files(lambda parameter: parameter in loaded)
        super().load_state_dict({**state_dict, "state": {}})  # which checks and takes the groups
        self.versions.clear()
        for parameter, state in loaded.items():
            self._store(parameter, {name: _copy(value, _wide(parameter)) for name, value in state.items()})

    def close(self) -> None:
        """Forget the state, and give its memory and files back."""
        self.state.clear()
        self.files.clear()

    def _chunks(self) -> Iterator[tuple[dict[str, Any], list[nn.Parameter]]]:
        for group in self.param_groups:
            present = [parameter for parameter in group["params"] if parameter.grad is not None]
            for chunk in partition(present, self.chunk_bytes, self.chunk_bytes):
                yield group, chunk

    def _fetch(self, group: dict[str, Any], parameters: list[nn.Parameter]) -> Visit:
        """Bring a chunk into memory; on the worker."""
        states = []
        for parameter in parameters:
            files, state = self.files.get(parameter, {}), self.state.get(parameter, {})
            states.append({name: value.clone() if name in files else value for name, value in state.items()})
        masters = [self._master(p, state.pop("master", None)) for p, state in zip(parameters, states, strict=True)]
        return Visit(group, parameters, masters, states)

    def _master(self, parameter: nn.Parameter, master: Tensor | None) -> nn.Parameter:
        """Return what is to be updated, with its gradient: the parameter itself, if that can be."""
        if not _has_master(parameter):
            return parameter
        written = self.versions.get(parameter) != parameter._version  # by somebody else; the same value, perhaps
        if master is None or (written and not torch.equal(master.to(parameter), parameter)):
            master = _down(parameter.detach())
        twin = nn.Parameter(master.pin_memory() if parameter.is_cuda else master)  # no copy if it is pinned already
        assert parameter.grad is not None
        twin.grad = _down(parameter.grad)
        return twin

    def _advance(self, group: dict[str, Any], masters: list[nn.Parameter], states: list[State]) -> list[State]:
        """Have the optimizer do its step on a chunk; return the new state."""
        options = {name: value for name, value in group.items() if name not in ("params", "param_names")}
        optimizer = self.optimizer([{**options, "params": masters}], **self.options)
        optimizer.state.update({master: state for master, state in zip(masters, states, strict=True) if state})
        optimizer.step()
        return [dict(optimizer.state[master]) for master in masters]

    def _keep(self, visit: Visit) -> None:
        """Bring a chunk's state, and parameters that are copies of a master, to where they live; on the worker."""
        for parameter, master, state in zip(visit.parameters, visit.masters, visit.states, strict=True):
            if master is not parameter:
                parameter.copy_(master)
                self.versions[parameter] = parameter._version
                state["master"] = master.detach()
            self._store(parameter, state)

    def _store(self, parameter: Tensor, state: State) -> None:
        if state:
            files = self.files.get(parameter, {})
            kept = {name: files[name].copy_(value) if name in files else value for name, value in state.items()}
            self.state[parameter] = kept

    def _claim_files(self, wanted: Callable[[Tensor], bool]) -> None:
        """Make the files for parameters that have none, of the sizes that a trial step on zeros shows."""
        if self.folder is None:
            return
        sizes = {
            parameter: self._trial(group, parameter)
            for group in self.param_groups
            for parameter in group["params"]
            if parameter not in self.files and wanted(parameter)
        }
        needed = sum(like.nbytes for named in sizes.values() for like in named.values())
        free = shutil.disk_usage(self.folder).free
        files: dict[Tensor, dict[str, Tensor]] = {parameter: {} for parameter in sizes}
        try:
            for number, (parameter, named) in enumerate(sizes.items(), len(self.files)):
                for name, like in named.items():
                    files[parameter][name] = mapped(like.shape, like.dtype, self.folder, f"{number}.{name}")
        except OSError as error:
            files.clear()  # gives the space back
            reason = f"the optimizer's state needs {needed:,} bytes in {self.folder}, where {free:,} are free"
            raise OSError(error.errno, f"{reason}: choose another folder, or train fewer parameters") from None
        self.files |= files

    def _trial(self, group: dict[str, Any], parameter: Tensor) -> dict[str, Tensor]:
        """Return the state that the optimizer will have for a parameter, as shapes without memory."""
        twin = nn.Parameter(torch.zeros(parameter.shape, dtype=_wide(parameter)))
        twin.grad = torch.zeros_like(twin)
        (state,) = self._advance(group, [twin], [{}])
        if _has_master(parameter):
            state["master"] = twin.detach()
        return {name: value.to("meta") for name, value in state.items() if isinstance(value, Tensor) and value.dim()}


class Worker:
    """One daemon thread that does one job after the other; it ends with the last reference to this object."""

    def __init__(self) -> None:
        self.jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        threading.Thread(target=_serve, args=(self.jobs,), name="offload", daemon=True).start()
        weakref.finalize(self, self.jobs.put, None)

    def submit(self, work: Callable[..., Any], *args: Any) -> Future[Any]:
        """Do `work(*args)` after what was submitted before."""
        future: Future[Any] = Future()

        def job() -> None:
            try:
                future.set_result(work(*args))
            except BaseException as error:
                future.set_exception(error)

        self.jobs.put(job)
        return future


@torch.no_grad()
def _serve(jobs: SimpleQueue[Callable[[], None] | None]) -> None:
    while (job := jobs.get()) is not None:
        job()


def _has_master(parameter: Tensor) -> bool:
    return parameter.device.type != "cpu" or parameter.dtype != _wide(parameter)


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


def _down(tensor: Tensor) -> Tensor:
    """Copy to the CPU, and widen there. A GPU writes fast only to memory that is pinned."""
    if tensor.is_cuda:
        tensor = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor)
    return tensor.to("cpu", _wide(tensor))


def _copy(value: Any, dtype: torch.dtype) -> Any:
    """Copy a piece of loaded state to the CPU, widened; but not what has no dimensions, or holds integers."""
    if not isinstance(value, Tensor):
        return value
    return value.to("cpu", dtype if value.dim() and value.is_floating_point() else value.dtype, copy=True)
