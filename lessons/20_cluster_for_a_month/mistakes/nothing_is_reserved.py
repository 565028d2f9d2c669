# task 2: forgets what the driver, NCCL and fragmentation take.
from dataclasses import replace

import solution
from solution import *  # noqa: F403


def fits(machine, bytes):
    return solution.fits(replace(machine, reserved=0.0), bytes)
