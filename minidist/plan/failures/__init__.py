"""What failures leave of a run's time: its goodput, under four policies.

Read `policies.py`: what is assumed, and the closed forms; then `simulate.py`, which draws failures and
counts the seconds, and `published.py`, where both stand beside what large runs have reported
(`python -m minidist plan goodput`).
"""
