"""What is measured: a file for each bench, minidist and its peers doing the same thing.

The collectives share `collective.py`; what needs no communication is in `alone.py`.
"""
