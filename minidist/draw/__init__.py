"""Floor 5: pictures of what was traced, measured and planned.

Of a run: read `recording.py`, what each buffer held after each event, with `observer.py`, one rank's part of that. Then
`player.py`, which steps through it, and `filmstrip.py`, for places without scripts. `pipeline.py` draws a plan in time,
`memory.py` the bytes that were held. `attention.py` records whose queries meet whose keys. `notebook.py` shows any of
these in a notebook. `gather_trace.py` joins the ranks' traces, for Perfetto to draw.
"""
