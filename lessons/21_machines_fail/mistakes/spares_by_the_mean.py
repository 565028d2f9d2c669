# task 5: keeps as many spares as are in repair on average: about half of the failures find none.
from math import ceil

from solution import *  # noqa: F403


def spares(machines, mtbf, repair, risk):
    return ceil(machines * repair / mtbf)
