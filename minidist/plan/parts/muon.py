"""What Muon adds to a step: each matrix of a layer comes together on one rank, which makes its change
orthogonal, and goes apart again.

    products     five times X X', its square, and both times X: 4 n^2 m + 2 n^3 operations each for a matrix of n x m,
                 n <= m, in 16 bits (Jordan et al. 2024, Muon)
    ZeRO 1 to 3  ranks with the same parameters share out the matrices, and exchange slices of 32 bits twice; without
                 ZeRO each rank computes every change, and nothing is sent
    tp           the ranks gather the blocks of a matrix, and each computes all of its change

Embedding, head and norms have AdamW. (`further/muon/muon.py` does it.)
"""

from minidist.plan.compute.products import speed
from minidist.plan.memory import parts_of
from minidist.plan.run import Setup
from minidist.plan.stages import Stage

ITERATIONS = 5
MASTER = 4  # bytes of an element of a momentum and of a change


def muon(run: Setup, stage: Stage) -> float:
    """Return the seconds that Muon adds to the optimizer's step on a stage; 0.0 if AdamW does it."""
    if run.optimizer != "muon":
        return 0.0
    alike = stage.layers - stage.leading
    operations = alike * operations_of(run)
    if stage.leading:
        operations += stage.leading * operations_of(run.leading)
    seconds = operations / speed(run.machine.device, run.known, "bf16")
    parts = parts_of(run, stage.layers, 0.0, stage.leading)
    if run.zero:
        for count, same in parts:
            slices = MASTER * count / same.ranks
            seconds += 2 * run.network.exchange(slices, same)
    # routed experts are whole; of all else a rank along tp has a block
    blocks, same = parts[0]
    gathered = MASTER * blocks * run.tp
    if run.zero:
        gathered /= same.ranks
    return seconds + run.network.gather(gathered, run.group("tp"))


def operations_of(run: Setup) -> float:
    """Return the operations of a rank for the matrices of a layer."""
    model = run.model
    dense = [*model.attention]
    if model.experts:
        dense += [(model.hidden, model.experts), *model.shared * model.mlp]
    else:
        dense += model.mlp
    found = sum(map(orthogonal, dense))
    if run.zero:
        found /= run.sharded.ranks
    if not model.experts:
        return found
    expert = sum(map(orthogonal, model.mlp))
    experts = expert * run.own_experts / model.expert
    if run.zero:
        experts /= run.copies.ranks
    return found + experts


def orthogonal(shape: tuple[int, int]) -> float:
    """Return the operations that make a matrix of this shape orthogonal."""
    n, m = sorted(shape)
    return ITERATIONS * (4.0 * n * n * m + 2.0 * n**3)
