"""A job as each of its ranks sees it: no rank waits for ever, and all end together.

`watchdog.py` ends a job that hangs, saying who waits for whom, and hears Ctrl-C beside a rank that
waits in a library; `limit.py` says how long an operation may wait, and `background.py` ends threads
with the program.
"""
