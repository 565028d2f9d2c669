"""What torch calls when it is imported: the entry point "torch.backends" of this package.

So a program may say `init_process_group("minidist")` without importing anything of ours, if mpirun
or our launcher has started it. In all other processes nothing happens.
"""

from minidist.full.comm.start import started_by_mpi


def of_torch() -> None:
    """Register the backend "minidist" on ranks that mpirun has started."""
    if started_by_mpi():
        import minidist.torch_backend  # noqa: F401
