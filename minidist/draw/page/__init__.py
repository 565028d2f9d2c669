"""A page about a run: one file that needs no network, light or dark, and says in words what it shows.

Read `page.py`, which puts it together; `curves.py` draws numbers over steps, `timeline.py` what each
rank did in one step, and finds who waited for whom.
"""
