"""A job of many processes: how it is started, watched and ended.

`watchdog.py`, `interrupt.py` and `background.py` see to it that it ends; `mpirun.py` finds the right launcher;
`jobs.py` runs other programs and ends them for certain; `standin.py` forks ranks that have imported what they need;
`marked_output.py` names the rank in each printed line.
"""
