"""Floor 5: start programs on many ranks, and end them for certain. The programs do not notice.

`mpirun.py` finds the launcher that belongs to this Python's MPI; `jobs.py` runs a command and ends
it with everything that it started, and `restarts.py` starts it again when a rank is lost, or `replacing.py`
the lost rank alone; `allocation.py` does so on the machines of a SLURM job;
`health.py` finds the machine that is not fit before a start, `leaving.py` hears a scheduler's
warning; `marked_output.py` puts the rank in front of each printed
line; `standin.py` forks ranks off a process that has imported what they need. `parser.py` and
`imports.py` are for commands that run as one process.
"""
