"""What torch calls when it is imported: the entry point "torch.backends" of this package.

So a program may say `init_process_group("minidist")` without importing anything of ours, if mpirun
or our launcher has started it. In all other processes nothing happens.
"""

from minidist.comm.start import started_by_mpi


def of_torch() -> None:
    """Register the backend "minidist" on ranks that mpirun has started."""
    if started_by_mpi():
        import minidist.c10d  # noqa: F401
