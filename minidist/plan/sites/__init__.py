"""Several sites, each with a planned machine, and the slow wire that joins them.

ways.py     ways to train on all of them: bytes, seconds, and from which bandwidth on they are free
stops.py    what failures leave of the time of each
planned.py  both of a planned layout
"""
