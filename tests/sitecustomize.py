"""What every Python that a test starts on real ranks does first: torch is on its path, and this
folder as well.
"""

import atexit
import gc

# or a process, as it ends, looks for garbage among all that torch imported
atexit.register(gc.freeze)
