"""What `train` finds out about this machine before any work starts: can it write its files, does it
have the memory?

A mistake of the user is one sentence, and the same on every rank. Options are checked in
`full/trainer/config.py`.
"""

import os
import tempfile
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path

from minidist.full.checkpoint import store
from minidist.full.checkpoint.lock import hold
from minidist.full.comm import Communicator
from minidist.full.data.files import retold
from minidist.full.model import GPTConfig
from minidist.full.trainer.config import Config, ConfigError
from minidist.further.nf4.options import in_four_bits
from minidist.plan.equation import ModelStates, adapted_states


def check_files(config: Config, comm: Communicator, again: bool = False) -> ExitStack:
    """Find out before the run whether its files can be written, and that no other run's are in the
    way.

    A job that goes on by itself (`again`) may find checkpoints or none.

    What is returned holds the lock of the folder of checkpoints, on rank 0: close it at the end of
    the run.
    """
    run, folder = config.run, Path(config.run.save)
    if run.profile and comm.wire.one_process and comm.size > 1:
        raise ConfigError(f"--profile {run.profile} takes a process a rank: use mpirun or torchrun")
    if isinstance(config.offload_to, Path):  # on each machine's own disk, perhaps
        _try_folder("offload-folder" if config.memory.offload_folder else "save", config.offload_to)
    if run.profile:
        _try_folder("profile", Path(run.profile))
    with ExitStack() as held:
        if comm.rank > 0:
            return held
        if run.save:
            if not again:
                _check_checkpoints(folder, run.resume)
            _try_folder("save", folder)
            with _writing("save", folder):
                held.enter_context(hold(folder))
            if not again:  # those of a run that has ended meanwhile
                _check_checkpoints(folder, run.resume)
        files = [("metrics", metrics_file(config)), ("metrics", serial_metrics_file(config))]
        files.append(("trace", Path(run.trace) if run.trace else None))
        for name, file in files:
            if file is not None:
                with _writing(name, file):
                    file.parent.mkdir(parents=True, exist_ok=True)
                    file.open("a").close()
        return held.pop_all()


def _check_checkpoints(folder: Path, resume: bool) -> None:
    if resume:
        store.newest(folder)
    elif there := store.complete(folder):
        raise ConfigError(
            f"--save {folder} holds {there[-1].name}: add --resume to go on, or save to another "
            "folder"
        )


def _try_folder(name: str, folder: Path) -> None:
    with _writing(name, folder):
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()


def _writing(name: str, path: Path) -> AbstractContextManager[None]:
    return retold(
        ConfigError,
        OSError,
        before=f"--{name} {path} cannot be written (",
        after="): give another path",
    )


def check_memory(config: Config, sizes: GPTConfig, ranks_here: int) -> None:
    """Refuse a model that this machine cannot hold: asked for the memory, it would stall or kill
    the job.

    It comes before anything is built: even without memory of its own, a model of a billion layers
    takes hours.
    """
    needed = host_memory(config, sizes, ranks_here)
    there = (
        os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        if hasattr(os, "sysconf")
        else needed
    )
    if needed > there:
        raise ConfigError(
            f"{sizes.parameter_count:,} parameters, with gradients and AdamW's state, need "
            f"{needed / 1e9:,.0f} GB for the ranks of this machine ({ranks_here}), which has "
            f"{there / 1e9:,.0f} GB: use fewer --layers or a smaller --hidden"
        )


def host_memory(config: Config, sizes: GPTConfig, ranks_here: int) -> float:
    """Return the bytes that a machine with so many of the ranks needs on its host until each has
    its share.
    """
    count, bytes = sizes.parameter_count, config.dtype.itemsize
    state = 12 if bytes == 2 else 2 * bytes  # AdamW's two moments, and a master
    if config.memory.offload == "disk":
        state = 0
    state += max(4, bytes) * config.parallel.outer_copies
    shares = config.parallel.tp * config.parallel.pp
    trained: float = count
    if rank := config.adapter_rank:
        trained = adapted_states(
            sizes, rank, in_four_bits(config.run), each=ModelStates(0, 1, 0)
        ).gradients
    # Each rank draws the whole model, and then keeps its share of it, with gradients and state of
    # what is trained.
    return (count * bytes + trained * (bytes + state) / shares) * ranks_here


def metrics_file(config: Config) -> Path | None:
    """Return where the metrics go."""
    if config.run.metrics:
        return Path(config.run.metrics)
    return Path(config.run.save) / "metrics.jsonl" if config.run.save else None


def serial_metrics_file(config: Config) -> Path | None:
    """Return where the metrics of the serial run go, beside the file of `--metrics`.

    None without it or `--verify`.
    """
    file = Path(config.run.metrics)
    return (
        file.with_suffix(f".serial{file.suffix}")
        if config.run.metrics and config.run.verify
        else None
    )
