"""What holds for all tests."""

import signal

# Whoever is started in the background ignores Ctrl-C, and so would every program that is tested: ours is to hear it.
signal.signal(signal.SIGINT, signal.default_int_handler)
