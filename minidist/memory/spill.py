"""Activations that wait for backward outside the device: in the CPU's memory, or on disk.

    forward    storage ──▶ pinned memory or a file         backward    pinned memory or a file ──▶ storage ──▶ views
                           (once, however many views                   (when autograd asks for it)
                           of it are saved)

    with spill_to_disk("/scratch"):
        loss = model(tokens)
    loss.backward()

It works around any forward pass. With `checkpoint` inside, what is spilled are the inputs of the segments. Cost: each
byte leaves once, and returns once for every tensor saved. Parameters stay. Changing in place what was saved goes
unnoticed, unlike without hooks. (Rajbhandari et al. 2021, ZeRO-Infinity, section 5.1.2.)
"""

from __future__ import annotations

import os
import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

Take = Callable[[], Tensor]
"""Brings bytes back to the CPU, as uint8."""


@contextmanager
def spill_to_cpu(smallest: int = 1 << 16) -> Iterator[None]:
    """Keep what a GPU's forward pass in this context saves in pinned memory.

    Copies take turns with the kernels of their stream: Python does not wait for them, but the GPU does.
    Tensors of less than `smallest` bytes stay, and so do those that are in the CPU's memory already.
    """
    with saved_tensors_hooks(Spiller(_to_pinned_memory, smallest, stays="cpu").pack, _unpack):
        yield


@contextmanager
def spill_to_disk(folder: str | Path, smallest: int = 1 << 16) -> Iterator[None]:
    """Keep what a forward pass in this context saves in files of a temporary subfolder of `folder`.

    A file goes when backward is done with it; the subfolder when the graph has gone, at once if the context raises,
    and at the latest when Python ends. Tensors of less than `smallest` bytes stay.

    Raises
    ------
    ValueError
        If there is no such folder.
    RuntimeError
        If the disk is full.
    """
    files = Files(folder)
    try:
        with saved_tensors_hooks(Spiller(files.write, smallest).pack, _unpack):
            yield
    except BaseException:
        files.remove()
        raise


class Spilled:
    """The bytes of one storage, elsewhere; its address is not given to another storage while `source` refers to it."""

    def __init__(self, source: StorageWeakRef, take: Take) -> None:
        self.source, self.take = source, take


@dataclass(frozen=True)
class View:
    """A tensor without its bytes: what autograd keeps in its place."""

    spilled: Spilled
    dtype: torch.dtype
    device: torch.device
    offset: int
    shape: torch.Size
    stride: tuple[int, ...]

    def restore(self) -> Tensor:
        """Bring the bytes back, and look at them as before."""
        whole = self.spilled.take().to(self.device, non_blocking=True).untyped_storage()
        return torch.empty(0, dtype=self.dtype, device=self.device).set_(whole, self.offset, self.shape, self.stride)


class Spiller:
    """Writes each storage once, by `put`, as long as some graph needs it; tensors on the device `stays` remain."""

    def __init__(self, put: Callable[[Tensor], Take], smallest: int, stays: str = "meta") -> None:
        self.put, self.smallest, self.stays = put, smallest, stays
        self.known: weakref.WeakValueDictionary[tuple[int, int], Spilled] = weakref.WeakValueDictionary()

    def pack(self, x: Tensor) -> Tensor | View:
        """Return what autograd is to keep instead of `x`."""
        if self._remains(x):
            return x
        source = StorageWeakRef(x.untyped_storage())  # type: ignore[no-untyped-call]
        key = (source.cdata, x._version)  # changed in place since, it is another tensor
        spilled = self.known.get(key)
        if spilled is None:
            whole = torch.empty(0, dtype=torch.uint8, device=x.device).set_(x.untyped_storage())
            spilled = self.known[key] = Spilled(source, self.put(whole))
        return View(spilled, x.dtype, x.device, int(x.storage_offset()), x.shape, x.stride())

    def _remains(self, x: Tensor) -> bool:
        owner = x if x._base is None else x._base
        plain = x.layout == torch.strided and not x.is_conj() and not x.is_neg()
        return (
            not plain
            or x.nbytes < self.smallest
            or x.device.type in ("meta", self.stays)
            or isinstance(owner, nn.Parameter)
        )


class Files:
    """A temporary folder, removed when nobody refers to it, at the latest when Python ends."""

    def __init__(self, folder: str | Path) -> None:
        if not Path(folder).is_dir():
            raise ValueError(f"cannot spill activations to {folder}: there is no such folder, so make it first")
        self.folder = folder
        path = tempfile.mkdtemp(prefix="spilled-", dir=folder)
        self.path, self.count = Path(path), 0
        self.remove = weakref.finalize(self, shutil.rmtree, path, ignore_errors=True)

    def write(self, whole: Tensor) -> Take:
        """Write a file; the function that reads it owns it."""
        path = self.path / str(self.count)
        self.count += 1
        try:
            with open(path, "wb") as file:
                file.write(whole.cpu().numpy().data)
        except OSError as error:
            raise RuntimeError(
                f"cannot spill {whole.nbytes} bytes of activations to {self.folder}: {error.strerror}; "
                "make room there, or name a folder on a larger disk"
            ) from error
        file_there = FileThere(self, path, whole.nbytes)
        return file_there.read


class FileThere:
    """A file that is deleted with this object, which also keeps its folder."""

    def __init__(self, files: Files, path: Path, size: int) -> None:
        self.files, self.path, self.size = files, path, size

    def read(self) -> Tensor:
        """Map it into memory: pages are read as they are needed."""
        return torch.from_file(str(self.path), shared=False, size=self.size, dtype=torch.uint8)

    def __del__(self) -> None:
        with suppress(OSError):
            os.unlink(self.path)


def _to_pinned_memory(whole: Tensor) -> Take:
    pinned = torch.empty(whole.shape, dtype=torch.uint8, pin_memory=True)
    pinned.copy_(whole, non_blocking=True)  # the stream that writes it is the one that will read it
    return lambda: pinned


def _unpack(packed: Tensor | View) -> Tensor:
    return packed.restore() if isinstance(packed, View) else packed
