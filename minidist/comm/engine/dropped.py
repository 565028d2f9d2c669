"""Messages whose requests a program has dropped, although their engine still uses the buffers.

    comm.isend(np.full(2000, 1.0), right)    Python frees the request, and with it the array
    MPI, a moment later                      would send what lies there by then

Gloo would send nothing, and the receiver would wait for ever. So a dropped request stays here until
its message is through.
"""

import threading

from minidist.comm.wire import Request

DROPPED: set[Request] = set()
LOOKING = threading.Lock()


class EngineRequest(Request):
    """A message that an engine carries."""

    def drop(self) -> bool:
        DROPPED.add(self)
        # The garbage collector may come here in the middle of this, and another thread may, too.
        if LOOKING.acquire(blocking=False):
            try:
                for request in list(DROPPED):
                    DROPPED.discard(request)  # for good if it raises
                    if not request.test():
                        DROPPED.add(request)
            finally:
                LOOKING.release()
        return self not in DROPPED
