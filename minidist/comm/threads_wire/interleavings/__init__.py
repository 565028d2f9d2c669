"""Every interleaving of a small program, but for those that cannot differ.

Read `explore.py`, what users call, then `search.py`: which interleavings are still to be tried.
`watched.py` sees what each step of a rank has touched, `same.py` compares results.
"""
