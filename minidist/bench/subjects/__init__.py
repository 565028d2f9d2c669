"""What is measured: a file for each bench, minidist and its peers doing the same thing.

What sends messages and nothing else is in `messages.py`, what sends none in `alone.py`.
"""
