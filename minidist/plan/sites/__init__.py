"""Several sites, each with a planned machine, and the slow wire that joins them: `ways.py`."""
