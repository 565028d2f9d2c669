"""Floor 5: pictures and tables of what was traced, measured and planned.

To see a run, read `recording.py`, which notes the contents of each buffer after each event, and
`observer.py`, one rank's part of it. Then read `player.py`, which steps through a recording, and
`filmstrip.py`, for places without scripts. `attention.py` records whose queries meet whose keys.

`pipeline.py` draws a schedule in time, `memory.py` the bytes of an account, and `plan.py` the bytes
and seconds of predicted layouts. `notebook.py` shows any of these in a notebook.

To see a trace, read `table.py`, which tells where each rank's time went, and `perfetto.py`, which
writes a file that https://ui.perfetto.dev opens. `gather_trace.py` joins the ranks' traces for that.
"""
