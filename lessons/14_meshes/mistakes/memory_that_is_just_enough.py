# task 5: leaves out a layout that needs just the memory there is.
import math

from solution import *  # noqa: F403
from solution import Layout, bytes_per_step


def layouts_that_fit(
    ranks, cluster, *, layers, hidden, intermediate, heads, sequence, sequences, memory, flops
):
    parameters = layers * (4 * hidden**2 + 3 * hidden * intermediate)
    compute = 6 * parameters * sequence * sequences / (ranks * flops)
    found = {}
    for pp, tp in ((pp, tp) for pp in range(1, ranks + 1) for tp in range(1, ranks + 1)):
        dp = ranks // (pp * tp)
        if dp * pp * tp != ranks or layers % pp or heads % tp or sequences % dp:
            continue
        m, sizes = sequences // dp, {"dp": dp, "pp": pp, "tp": tp}
        activations = min(pp, m) * (layers // pp) * 34 * sequence * hidden / tp
        if 16 * parameters / (pp * tp) + activations >= memory:
            continue
        sent = bytes_per_step(
            sizes,
            stage=1 if pp > 2 else 0,
            layers=layers,
            hidden=hidden,
            intermediate=intermediate,
            tokens=sequence,
            microbatches=m,
            itemsize=2,
        )
        links = Layout(**sizes).links(cluster)
        bandwidth = {
            axis: (cluster.inside if links[axis] == "inside" else cluster.across).bandwidth
            for axis in sizes
        }
        seconds = {axis: sent[axis] / bandwidth[axis] for axis in sizes}
        stretched = (compute + seconds["tp"]) * (m + pp - 1) / m
        found[dp, pp, tp] = math.fsum((stretched, seconds["pp"], seconds["dp"]))
    return found
