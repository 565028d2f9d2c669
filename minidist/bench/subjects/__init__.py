"""What is measured: a file for each bench, minidist and its peers doing the same thing.

The collectives share `collective.py`.
"""
