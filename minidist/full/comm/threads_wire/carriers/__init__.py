"""What carries simulated ranks: threads that all run, or tasks of which exactly one does.

Read `carrier.py` (what a `World` asks of a carrier), then `threads.py`, then `cooperative.py`: the
queue of those who may go on, and the draw of the next. What it needs beneath is small: `baton.py`
has threads that take turns, `browser.py` stacks that a browser sets aside. `engines.py` has all of
them by the names that `run` takes, and says when to use which.
"""
