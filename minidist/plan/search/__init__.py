"""The search for a layout: all of them are tried, and the fastest that fit are kept.

Read `best.py`, the search as a whole; then `layouts.py`, which makes layouts of `choices.py`, with
`cuts.py`, which deals out their layers, and `ladders.py`, which saves memory; and `fitting.py`, which
asks of each whether it fits and how long it takes. `batches.py` looks for a batch that more layouts
divide, and `clocked.py` puts the best on a clock. `found.py` is what comes out.
"""

from minidist.plan.search.best import search
from minidist.plan.search.fitting import RESERVE
from minidist.plan.search.found import Answer, Found, shares

__all__ = ["RESERVE", "Answer", "Found", "search", "shares"]
