"""The search for a layout: all of them are tried, and the fastest that fit are kept.

Read `fitting.py`, which asks of each layout whether it fits and how long it takes, then `layouts.py`,
which makes them of `choices.py`. `found.py` is what comes out.
"""

from minidist.plan.search.fitting import RESERVE, search
from minidist.plan.search.found import Answer, Found, shares

__all__ = ["RESERVE", "Answer", "Found", "search", "shares"]
