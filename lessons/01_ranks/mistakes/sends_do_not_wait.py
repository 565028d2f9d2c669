# task 5: takes it that a send is complete at once, as if somebody kept the message: rings of senders seem harmless.
from solution import *  # noqa: F403


def who_never_finishes(plans):
    done, kept, moved = [0] * len(plans), [], True
    while moved:
        moved = False
        for rank, plan in enumerate(plans):
            if done[rank] < len(plan):
                kind, peer = plan[done[rank]]
                if kind == "send":
                    kept.append((rank, peer))
                elif (peer, rank) in kept:
                    kept.remove((peer, rank))
                else:
                    continue
                done[rank] += 1
                moved = True
    return [rank for rank, plan in enumerate(plans) if done[rank] < len(plan)]
