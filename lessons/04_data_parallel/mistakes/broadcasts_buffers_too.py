# task 2: broadcasts the whole state_dict: buffers, too, which are every rank's own.
from solution import *  # noqa: F403

from minidist.full.collectives import broadcast


def start_equal(model, comm):
    for tensor in model.state_dict().values():
        broadcast(tensor, comm, algorithm="tree")
