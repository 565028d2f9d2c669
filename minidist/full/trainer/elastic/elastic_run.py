"""The loop around the trainer: enter a view, train in it, and enter the next when a rank is lost."""

from collections.abc import Callable
from dataclasses import replace
from math import ceil, lcm

from minidist.full.comm import Communicator
from minidist.full.comm.errors import LimitError, RankFailed
from minidist.full.comm.membership.agreement import Wanted
from minidist.full.trainer.config import Config, ConfigError
from minidist.full.trainer.elastic.carry import Carrier, Enters
from minidist.full.trainer.loop import Regroup

LOST = (RankFailed, LimitError)
"""What a rank hears when another one is lost, or hangs."""


def run_elastically(member: Enters, train: Callable[[Communicator, Carrier], int]) -> int:
    """Call `train(comm, carrier)` in one view after the other until it returns; return its status.

    A member that waits outside until the job is done returns 0.

    Raises
    ------
    RankFailed, LimitError
        If two views of the same members were over without a step between them: then no rank is
        lost, but they cannot work together.
    """
    carrier, before = Carrier(member), None
    while (comm := member.enter(carrier.standing.done, carrier.standing.place)) is not None:
        try:
            carrier.meet(comm)
            status = train(comm, carrier)
            member.finish(status)
            return status
        except Regroup:
            member.leave("members wait outside")
        except LOST as error:
            member.lost(str(error))
            carrier.settle()
            now = (comm.size, carrier.standing.done, str(error))
            if now == before:
                raise
            before = now
    return 0


def on_ranks_of(config: Config, ranks: int, wanted: Wanted) -> Config:
    """Return the run on so many ranks of the job, whose global batch stays: where replicas are
    missing, the others accumulate.

    Raises
    ------
    ConfigError
        If a rank would hold what no other rank has, or ranks that are lost together are no replica.
    """
    parallel = config.parallel
    model_ranks = parallel.tp * parallel.pp * parallel.cp
    replica = parallel.tp * parallel.pp * lcm(parallel.cp, parallel.hsdp or 1)
    alone = {
        # in groups of --hsdp ranks each shard is in every group
        f"--zero {parallel.zero}": parallel.zero and not parallel.hsdp,
        f"--ep {parallel.ep}": parallel.ep > 1,
        f"--local-steps {parallel.local_steps}": parallel.local_steps,
        f"--compress {parallel.compress}": parallel.keeps_back,
        f"--offload {config.memory.offload}": config.memory.offload != "none",
        "--lora": config.adapter_rank,  # the weights beside adapters come from --init
        "--precision fp8": config.precision == "fp8",
        "--balance bias": config.model.balance == "bias",
        "--profile": config.run.profile,
        "--trace": config.run.trace,
    }
    for option in (option for option, asked in alone.items() if asked):
        raise ConfigError(
            f"{option} keeps on one rank what a replacement cannot get from a peer: leave it out, or "
            "let the job start again from checkpoints, with --max-restarts alone"
        )
    if replica != wanted.together or not parallel.order.startswith("dp"):
        raise ConfigError(
            f"a replica has {replica} ranks (tp * pp * cp, or a group of --hsdp), neighbours with dp "
            f"outermost, but "
            f"{wanted.together} are lost together: use --replica {replica}, and dp first in --order"
        )
    shared = accumulating(config, ranks, wanted.ranks)
    return replace(shared, parallel=replace(shared.parallel, dp=ranks // model_ranks))


def accumulating(config: Config, ranks: int, first: int) -> Config:
    """Return the run on `ranks` of the `first` ranks: a microbatch has no more rows than it had.

    A pipeline keeps its number of microbatches, on which its schedule depends.
    """
    parallel = config.parallel
    if ranks >= first or parallel.pp > 1:
        return config
    cuts = min(ceil(first / ranks) * parallel.accumulate, config.data.batch)
    return replace(config, parallel=replace(parallel, accumulate=cuts))
