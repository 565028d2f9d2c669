"""What is measured of a step: its seconds, what of them was waiting, and beside it the plan."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

from minidist.full.comm import Communicator
from minidist.full.comm.torch_wire.torch_wire import TorchWire
from minidist.full.mesh import Mesh
from minidist.full.trainer.config import Config
from minidist.full.trainer.metrics import StepMetrics, known_peak
from minidist.full.trainer.observed.stragglers import Computing, Stragglers

SAMPLED = 10.0  # seconds between two looks at the memory, which cost a microsecond for each tensor


class StepMeter:
    """Measures the steps of one run, on one rank.

    Attributes
    ----------
    computed : list of float
        By rank, the seconds that each has computed in the last step; empty if nobody asks for them.
    """

    def __init__(
        self, config: Config, mesh: Mesh, device: torch.device, flops_per_token: float
    ) -> None:
        self.comm: Communicator = mesh.world
        self.site = mesh.site
        self.on_gpu = device.type == "cuda"
        self.flops_per_token = flops_per_token
        self.peak = config.run.peak_tflops * 1e12
        if not self.peak and self.on_gpu:
            self.peak = known_peak(torch.cuda.get_device_name(device))
        self.observed = config.run.observed
        # on a GPU kernels run later: it notes the times itself
        wire = self.comm.wire
        self.stalls = wire.job.stalls if self.on_gpu and isinstance(wire, TorchWire) else None
        self.stood = 0.0
        compares = self.observed and (self.stalls is not None or not self.on_gpu)
        self.stragglers = None
        if compares:
            self.stragglers = Stragglers(mesh.layout, config.data.batch, mesh.dcn.rank)
        self.computed: list[float] = []
        self.sent: dict[str, int] = {}
        self.memory: dict[str, int] = {}
        self.sampled = float("-inf")

    def begin(self) -> None:
        """Begin a step."""
        self.started, self.waited = self.comm.clock(), self.comm.traffic.seconds
        self.wall = time.perf_counter()
        if self.stalls is not None:
            self.stalls.begin()

    def own_computing(self) -> list[float]:
        """Return, at this rank's place in its site, the seconds that it has computed since the step
        began; nothing if nobody asks.
        """
        if self.stragglers is None:
            return []
        if self.stalls is not None:
            computed = self.stalls.computed()
        else:
            waited = self.comm.traffic.seconds - self.waited
            computed = self.comm.clock() - self.started - waited
        mine = [0.0] * self.site.size
        mine[self.site.rank] = max(0.0, computed)
        return mine

    def hear(self, computed: list[float]) -> None:
        """Take the seconds of all ranks, if anybody asked. A GPU has come so far by now."""
        self.computed = computed
        if self.stalls is not None:
            self.stood = self.stalls.end()

    def sample(self, sent: dict[str, int], memory: Callable[[], dict[str, int]]) -> None:
        """Note what was sent so far, by axis, and now and then what is held, by category."""
        if not self.observed:
            return
        self.sent = sent
        if time.perf_counter() - self.sampled > SAMPLED:
            self.memory, self.sampled = memory(), time.perf_counter()

    def end(self, step: int, loss: float, norm: float, rate: float, tokens: int) -> StepMetrics:
        """Return what a step has taken; `step` counts from 1, `tokens` are of the global batch."""
        seconds = time.perf_counter() - self.wall
        speed = tokens / seconds
        waited = self.comm.traffic.seconds - self.waited if self.stalls is None else self.stood
        return StepMetrics(
            step,
            loss,
            norm,
            rate,
            seconds,
            speed,
            waited / seconds,
            utilisation=self.utilisation(speed),
            computing=self.computing(self.computed),
            sent=self.sent or None,
            memory=self.memory or None,
        )

    def computing(self, computed: Sequence[float]) -> Computing | None:
        """Return what the ranks' seconds say, if they were asked for."""
        return self.stragglers.step(computed) if self.stragglers and computed else None

    def utilisation(self, tokens_per_second: float) -> float | None:
        """Return the model's operations beside the peak of all devices, if that is known."""
        if not self.peak:
            return None
        return self.flops_per_token * tokens_per_second / (self.peak * self.comm.size)
