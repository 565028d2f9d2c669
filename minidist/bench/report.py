"""From measurements to tables: ratios to peers, and whether the bounds were met."""

from collections.abc import Iterable, Iterator
from textwrap import indent
from typing import Any, NamedTuple

from minidist.bench.measure import Measurement
from minidist.bench.subject import DTYPE, ON_ONE_GPU, RANKS, Bound, find_subject
from minidist.bench.subjects.copy import state
from minidist.draw.table import aligned, format_seconds
from minidist.full.collectives import COLLECTIVES


class Verdict(NamedTuple):
    """A bound, and what was measured."""

    bench: str
    bound: Bound
    measured: float

    @property
    def met(self) -> bool:
        """Whether the bound holds."""
        return (
            self.measured >= self.bound.limit
            if self.bound.least
            else self.measured <= self.bound.limit
        )

    def __str__(self) -> str:
        what = " ".join(filter(None, (self.bench, self.bound.case, self.bound.competitor)))
        over = f" / {self.bound.peer}" if self.bound.peer else ""
        promised = f"{'at least' if self.bound.least else 'at most'} {self.bound.limit:g}"
        return f"{what}{over}: {number(self.measured)}, {promised}"


class Results:
    """All measurements of a run: their ratios, bounds and tables."""

    def __init__(
        self,
        measurements: Iterable[Measurement],
        dtype: str,
        machine: dict[str, object],
        judged: bool = True,
    ) -> None:
        self.measurements, self.dtype, self.machine, self.judged = (
            list(measurements),
            dtype,
            machine,
            judged,
        )
        self.subjects = {m.bench: find_subject(m.bench) for m in self.measurements}
        probes = [m for m in self.measurements if (m.bench, m.competitor) == ("copy", "other core")]
        self.states = {m.case: state(m.median) for m in probes}
        self.found = {(m.bench, m.case, m.competitor, m.launch): m for m in self.measurements}
        self.verdicts = list(self._verdicts())

    def ratio(self, measurement: Measurement, peer: str) -> float | None:
        """Return the ratio to a peer that took turns with this one: in the tuned launch if that is
        `native tuned`.
        """
        bench, case, competitor = measurement.bench, measurement.case, measurement.competitor
        at = "shipped" if measurement.launch == "tuned" else measurement.launch
        launch, name = ("tuned", "native") if peer == "native tuned" else (at, peer)
        mine, other = (
            self.found.get((bench, case, competitor, launch)),
            self.found.get((bench, case, name, launch)),
        )
        return None if mine is None or other is None or mine is other else mine.ratio(other)

    def _verdicts(self) -> Iterator[Verdict]:
        judged = self.subjects.values() if self.judged else ()
        for bench, bound in ((one.name, bound) for one in judged for bound in one.bounds):
            launch = "here" if bench in ("threads", *ON_ONE_GPU) else "shipped"
            measurement = self.found.get((bench, bound.case, bound.competitor, launch))
            if measurement is None or (
                launch == "shipped" and (measurement.ranks, self.dtype) != (RANKS, DTYPE)
            ):
                continue
            measured = self.ratio(measurement, bound.peer) if bound.peer else measurement.median
            if measured is not None:
                yield Verdict(bench, bound, measured)

    def as_json(self) -> dict[str, Any]:
        """Return everything, to be read by programs."""
        bounds = [
            {"bench": v.bench, **v.bound._asdict(), "measured": v.measured, "met": v.met}
            for v in self.verdicts
        ]
        return {
            "machine": self.machine,
            "dtype": self.dtype,
            "states": self.states,
            "results": [self._json_row(m) for m in self.measurements],
            "bounds": bounds,
        }

    def as_text(self) -> str:
        """Return the tables."""
        parts = [" · ".join(f"{key} {value}" for key, value in self.machine.items() if value)]
        for bench in self.subjects:
            measurements = [m for m in self.measurements if m.bench == bench]
            cases = list(dict.fromkeys(m.case for m in measurements))
            shown = [
                m
                for m in measurements
                if m.launch != "tuned" or bench == "copy" or m.competitor == "native"
            ]
            parts.append(self._table(bench, sorted(shown, key=lambda m: cases.index(m.case))))
        if self.verdicts:
            parts.append(self._summary())
        if not self.judged:
            parts.append(
                "the bounds are for one H100 and the model of the default, so they are not judged "
                "here"
            )
        return "\n\n".join(parts)

    def _table(self, bench: str, measurements: list[Measurement]) -> str:
        peers = [
            p
            for p in self.subjects[bench].peers
            if any(self.ratio(m, p) is not None for m in measurements)
        ]
        rate = "TFLOP/s" if bench in ON_ONE_GPU else "bus GB/s"
        header = [
            "case",
            "competitor",
            "median",
            "quartiles",
            rate,
            *(f"/ {peer}" for peer in peers),
        ]
        table = indent(aligned(header, [self._row(m, peers) for m in measurements], left=2), "  ")
        title = (
            bench
            if bench in ("copy", "threads", *ON_ONE_GPU)
            else f"{bench}, {measurements[0].ranks} ranks"
        )
        return f"{title}{f', {self.dtype}' if bench in COLLECTIVES else ''}\n{table}"

    def _row(self, m: Measurement, peers: list[str]) -> list[str]:
        lower, upper = m.quartiles
        rate = m.flops / m.median / 1e12 if m.flops else (m.bus_bandwidth or 0) / 1e9
        return [
            m.case,
            f"{m.competitor} tuned" if m.launch == "tuned" and m.bench != "copy" else m.competitor,
            quantity(m.median, m.unit),
            f"{quantity(lower, m.unit)} - {quantity(upper, m.unit)}",
            f"{rate:.3g}" if rate else "",
            *("" if m.launch == "tuned" else number(self.ratio(m, peer)) for peer in peers),
        ]

    def _summary(self) -> str:
        met = sum(verdict.met for verdict in self.verdicts)
        lines = [f"bounds: {met} of {len(self.verdicts)} met"]
        if self.states:
            seen = ", ".join(sorted({*self.states.values()}))
            lines[0] += f"; they are for the near state of the cores, and this run saw: {seen}"
        return "\n".join(
            lines
            + [f"  {'met' if verdict.met else 'MISSED'}: {verdict}" for verdict in self.verdicts]
        )

    def _json_row(self, m: Measurement) -> dict[str, Any]:
        """Return a measurement, with its ratios to the peers that took turns with it."""
        peers = [
            peer
            for peer in self.subjects[m.bench].peers
            if (peer == "native tuned") == (m.launch == "tuned")
        ]
        ratios = {peer: ratio for peer in peers if (ratio := self.ratio(m, peer)) is not None}
        lower, upper = m.quartiles
        found = {
            "median": m.median,
            "lower_quartile": lower,
            "upper_quartile": upper,
            "bus_bandwidth": m.bus_bandwidth,
        }
        return m._asdict() | found | {"ratios": ratios}


def quantity(value: float, unit: str) -> str:
    """Return `12.3 us` for 1.23e-5 seconds."""
    return format_seconds(value) if unit == "s" else f"{value:.3g} {unit}".strip()


def number(value: float | None) -> str:
    """Return a ratio in three digits."""
    return "" if value is None else f"{value:.3g}"
