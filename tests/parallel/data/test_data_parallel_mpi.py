"""Data parallelism between processes: the same parity under mpirun and torchrun, and torch's own
DDP beside ours.
"""

from __future__ import annotations

import pytest
from ranks import mpirun, torchrun

PARITY = """
    import hashlib
    import minidist
    from data_parallel import CONFIG, DROPPING, VARIANTS, Case, check_parity, parallel

    comm = minidist.init(limit=90)
    cases = [Case(variant) for variant in VARIANTS]
    cases += [Case(VARIANTS[0], DROPPING, microbatches=2), Case(VARIANTS[0], bucket_bytes=1 << 20)]
    for case in cases:
        found = parallel(comm, case)
        check_parity([found], case.config)
        bits = hashlib.sha256(b"".join(parameter.numpy().tobytes() for parameter in found.values())).hexdigest()
        assert len(set(comm.all_gather_object(bits))) == 1, "the ranks' parameters are not the same bits"
    comm.barrier()
    if comm.rank == 0:
        print(f"{len(cases)} cases on {comm.size} ranks of {comm.wire.kind}")
"""

BUCKETS = """
    import torch
    from minidist.full.comm import MismatchError
    from minidist.full import DDP

    try:
        DDP(torch.nn.Linear(2, 3 if comm.rank == 1 else 2), comm, op="sum")
    except MismatchError as error:
        assert "rank 0 and rank 1 of 3" in str(error)
    else:
        raise AssertionError("nobody noticed")

    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        layers = torch.nn.ModuleList(torch.nn.Linear(100, 100, bias=False, dtype=dtype) for _ in range(4))
        ddp = DDP(layers, comm, op="sum", unused=True, bucket_bytes=1, first_bucket_bytes=1)
        if dtype != torch.bfloat16:
            for bucket in ddp.reducer.buckets:
                assert len(ddp.stream.comm.peers(bucket.flat.numpy())) == 3, "not in the shared window"
        waiting = []  # how many buckets are not launched yet, whenever a gradient has arrived
        for parameter in layers.parameters():
            parameter.register_post_accumulate_grad_hook(lambda _: waiting.append(len(ddp.reducer.to_launch)))
        before = comm.traffic.bytes
        x = torch.ones(1, 100, dtype=dtype)
        with ddp.no_sync():
            layers[3](layers[0](x)).sum().backward()
        assert comm.traffic.bytes == before
        ddp.zero_grad(), waiting.clear()
        hidden = layers[1](layers[0](x)) if comm.rank == 2 else layers[0](x)
        (layers[3](hidden).float().sum() * (comm.rank + 1)).backward()
        assert waiting == [3] * (3 if comm.rank == 2 else 2), waiting  # the first is launched while backward runs
        assert [p.grad is None for p in layers.parameters()] == [False, False, True, False]  # as on all ranks
        for parameter in layers.parameters():
            answers = comm.all_gather_object(None if parameter.grad is None else parameter.grad.double().sum().item())
            assert len(set(answers)) == 1
    print("all is well")
"""

TORCH = """
    import copy
    import torch
    from torch import nn
    from minidist.full import DDP

    torch.manual_seed(comm.rank)
    def build():
        layers = nn.Linear(6, 9), nn.BatchNorm1d(9), nn.Tanh(), nn.Linear(9, 9), nn.Linear(9, 2)
        return nn.Sequential(*layers).double()

    ours = build()
    ours[3].bias.requires_grad_(False)
    theirs = copy.deepcopy(ours)
    wrapped = {
        "ours": DDP(ours, comm, op="mean", bucket_bytes=300, first_bucket_bytes=100),
        "theirs": nn.parallel.DistributedDataParallel(theirs, gradient_as_bucket_view=True),
    }
    for ddp in wrapped.values():
        draws = torch.Generator().manual_seed(comm.rank)
        trained = [parameter for parameter in ddp.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=0.05)
        for step in range(4):
            optimizer.zero_grad()
            with ddp.no_sync():
                x = torch.randn(5, 6, generator=draws, dtype=torch.float64)
                ddp(x).square().mean().backward()
            ddp(torch.randn(5, 6, generator=draws, dtype=torch.float64)).square().mean().backward()
            if step == 3:  # what is averaged already may be averaged again
                ddp(torch.randn(5, 6, generator=draws, dtype=torch.float64)).square().mean().backward()
            optimizer.step()
    assert list(ours.state_dict()) == list(theirs.state_dict())
    for name, tensor in theirs.state_dict().items():
        assert torch.equal(ours.state_dict()[name], tensor), name
    for a, b in zip(ours.parameters(), theirs.parameters()):
        assert a.grad is None and b.grad is None or torch.equal(a.grad, b.grad)
    print("the same bits")
"""


@pytest.mark.soak
@pytest.mark.parametrize("ranks", [2, 4])
def test_parity_under_mpirun(ranks: int) -> None:
    job = mpirun(ranks, PARITY, timeout=100)
    assert job.returncode == 0, job.stderr
    assert f"6 cases on {ranks} ranks of mpi" in job.stdout


def test_parity_buckets_unused_parameters_and_differing_models_under_mpirun() -> None:
    job = mpirun(3, PARITY + BUCKETS, timeout=100)
    assert job.returncode == 0, job.stderr
    assert "6 cases on 3 ranks of mpi" in job.stdout
    assert job.stdout.count("all is well") == 3


def test_a_mistake_in_one_ranks_backward_ends_the_job() -> None:
    job = mpirun(
        2,
        """
        import torch
        import minidist
        from minidist.full import DDP

        comm = minidist.init(limit=90)
        model = torch.nn.Sequential(*(torch.nn.Linear(50, 50) for _ in range(4)))
        ddp = DDP(model, comm, op="sum", bucket_bytes=1, first_bucket_bytes=1)
        if comm.rank == 1:
            model[1].register_full_backward_hook(lambda *_: 1 / 0)
        ddp(torch.ones(1, 50)).sum().backward()
        print("came through")
        """,
        timeout=100,
    )
    assert job.returncode not in (0, 124), job.stderr
    assert "[rank 1] ZeroDivisionError" in job.stderr
    assert "came through" not in job.stdout


def test_under_torchrun_parity_and_the_same_bits_as_torch_ddp() -> None:
    job = torchrun(2, PARITY + TORCH, timeout=100)
    assert job.returncode == 0, job.stderr
    assert "6 cases on 2 ranks of torch" in job.stdout
    assert job.stdout.count("the same bits") == 2
