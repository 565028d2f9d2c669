"""The `mpi` wire: ranks are processes that `mpirun` started.

Read `mpi_wire.py`; `memory.py` is what MPI is given of a buffer, `window.py` memory that processes of
one machine share, `segment.py` what MPICH shares among them, `native_mpi.py` MPI's own collectives.
In debug mode `noted.py` has the two ends of a message compare dtypes.
"""
