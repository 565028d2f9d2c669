"""Persistent collectives: checked, chosen and allocated once, and then called again and again.

    handle = prepare("all_reduce", buffer, comm)        collective, like the call that it prepares
    handle()                                            the same buffer, whatever it holds by now

There is no second implementation of anything. `handle.py` has `prepare`, which calls the operation
itself, once, on a communicator that sends nothing (`noting.py`): it notes each message, sum and
copy. A handle repeats what was noted.
"""
