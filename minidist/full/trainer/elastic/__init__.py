"""A run that goes on when ranks are lost, without being started again.

    member ──enter──▶ comm ──▶ Trainer ── a rank is lost ──▶ enter ──▶ comm ──▶ Trainer ...
                                  └───────── carry.py ────────────────────────────┘

`carry.py` takes what a rank has trained from one view of the job into the next; `elastic_run.py` is
the loop around the trainer. Who belongs to a view is decided in `full/comm/membership/`.
"""
