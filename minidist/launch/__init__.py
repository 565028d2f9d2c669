"""Starting programs on many ranks, and ending them for certain. What is started knows nothing of it.

`mpirun.py` finds the launcher that belongs to this Python; `jobs.py` runs a command with everything that it starts;
`marked_output.py` names the rank in each printed line; `standin.py` forks ranks that have imported what they need.
`parser.py` and `imports.py` are for commands that run as one process.
"""
