"""Floor 5: pictures and tables of what was traced, measured and planned.

Of a run: read `recording.py`, what each buffer held after each event, with `observer.py`, one
rank's part of that. Then `player.py`, which steps through it, and `filmstrip.py`, for places
without scripts. `pipeline.py` draws a plan in time, `memory.py` the bytes that were held, `plan.py`
the bytes and seconds of layouts that were predicted. `attention.py` records whose queries meet
whose keys. `notebook.py` shows any of these in a notebook.

Of a trace: `table.py`, where each rank's time went; `perfetto.py`, a file that
https://ui.perfetto.dev opens, and `gather_trace.py`, which joins the ranks' traces for that.
"""
