"""minidist: distributed training from scratch.

    import minidist

    def hello(comm):
        return f"rank {comm.rank} of {comm.size}"

    minidist.run(hello, ranks=4)        # four simulated ranks in this process
    comm = minidist.init()              # or: this process is one rank of `mpirun` or `torchrun`

Read the package from the ground floor up: `trace`, `comm`, `collectives`, `mesh` and `model`,
`parallel`, `trainer`.
"""

from minidist.comm import Cluster, Communicator, DeadlockError, init, run
from minidist.mesh import Layout, Mesh
from minidist.trace import Trace

__version__ = "0.3.0"
__all__ = ["Cluster", "Communicator", "DeadlockError", "Layout", "Mesh", "Trace", "init", "run"]
