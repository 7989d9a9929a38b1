"""Line and stacked charts as inline SVG text: no library, no network, colours from the page's CSS.

Long runs are drawn in at most `MAX_POINTS` buckets: their mean as the line, their range as a band, so that
a spike is never averaged out of sight.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from itertools import accumulate

WIDTH, HEIGHT = 420, 170
LEFT, RIGHT, TOP, BOTTOM = 48, 412, 10, 146
MAX_POINTS = 240
COLOURS = 8  # --c0 ... --c7 of the page's style
SMOOTH_FROM = 40  # fewer points are shown as they are


@dataclass(frozen=True)
class Series:
    name: str
    points: list[tuple[int, float]]  # (step, value), ascending
    colour: str = ""  # a CSS colour; empty: by its place in the chart
    dash: str = ""  # SVG stroke-dasharray; empty: a whole line


@dataclass(frozen=True)
class Key:
    """One entry of a legend."""

    label: str
    colour: str
    dash: str = ""


@dataclass(frozen=True)
class Bucket:
    step: int
    mean: float
    low: float
    high: float


def buckets(points: Sequence[tuple[int, float]], limit: int = MAX_POINTS) -> list[Bucket]:
    """Neighbouring points joined until at most `limit` are left; a bucket stands at its last step."""
    size = max(1, math.ceil(len(points) / limit))
    out = []
    for i in range(0, len(points), size):
        values = [v for _, v in points[i : i + size]]
        last_step = points[min(i + size, len(points)) - 1][0]
        out.append(Bucket(last_step, sum(values) / len(values), min(values), max(values)))
    return out


def smooth(values: Sequence[float]) -> list[float]:
    """Centred moving average over about a twentieth of the values (narrower at the ends); short series unchanged."""
    n = len(values)
    if n < SMOOTH_FROM:
        return list(values)
    sums = [0.0, *accumulate(values)]
    half = n // 40
    windows = ((i - reach, i + reach + 1) for i in range(n) for reach in [min(half, i, n - 1 - i)])
    return [(sums[end] - sums[start]) / (end - start) for start, end in windows]


def ticks(low: float, high: float, count: int = 4) -> list[float]:
    """Round numbers inside [low, high], about `count` of them."""
    if high <= low:
        return [low]
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [i * step for i in range(first, math.floor(high / step + 1e-9) + 1)]


def number(value: float) -> str:
    """A tick label: short, never scientific between 0.001 and 100,000."""
    if value == 0:
        return "0"
    size = abs(value)
    if size >= 1e5 or size < 1e-3:
        return f"{value:.1e}".replace(".0e", "e").replace("e-0", "e-").replace("e+0", "e")
    return f"{value:,.0f}" if size >= 1000 else f"{value:.3g}"


@dataclass(frozen=True)
class Frame:
    """Data to pixels."""

    x0: float
    x1: float
    y0: float
    y1: float

    def x(self, step: float) -> float:
        if self.x1 == self.x0:
            return (LEFT + RIGHT) / 2
        return LEFT + (step - self.x0) / (self.x1 - self.x0) * (RIGHT - LEFT)

    def y(self, value: float) -> float:
        return BOTTOM - (value - self.y0) / (self.y1 - self.y0) * (BOTTOM - TOP)

    def path(self, points: Sequence[tuple[float, float]]) -> str:
        return " ".join(f"{self.x(x):.1f},{self.y(y):.1f}" for x, y in points)


def fit(series: Sequence[Series], *, floor: float | None = None, ceiling: float | None = None) -> Frame:
    """A frame around all points. `floor` and `ceiling` are values that the y axis at least reaches."""
    steps = [x for s in series for x, _ in s.points]
    values = [y for s in series for _, y in s.points]
    low, high = min(values), max(values)
    low = low if floor is None else min(low, floor)
    high = high if ceiling is None else max(high, ceiling)
    if low == high:
        pad = abs(low) or 1.0
        low, high = (low, high + pad) if low == floor else (low - pad / 2, high + pad / 2)
    else:
        pad = 0.06 * (high - low)
        low, high = (low if low == floor else low - pad), (high if high == ceiling else high + pad)
    return Frame(min(steps), max(steps), low, high)


def line_chart(
    title: str,
    note: str,
    series: Sequence[Series],
    *,
    keys: Sequence[Key] | None = None,
    floor: float | None = None,
    ceiling: float | None = None,
) -> str:
    """A `<figure>` with one line per series. Series without points must not be given. `keys`: the legend, where it is
    not simply the series."""
    frame = fit(series, floor=floor, ceiling=ceiling)
    colours = [s.colour or f"var(--c{i % COLOURS})" for i, s in enumerate(series)]
    body = "".join(_line(frame, s, colour, bare=len(series) > 3) for s, colour in zip(series, colours, strict=True))
    last = series[0].points[-1][1] if len(series) == 1 else None
    if keys is None:
        keys = [Key(s.name, c, s.dash) for s, c in zip(series, colours, strict=True)] if len(series) > 1 else []
    return _figure(title, note, frame, body, series, keys, last)


def _line(frame: Frame, series: Series, colour: str, *, bare: bool) -> str:
    """`bare`: among many lines, without the band and the raw values behind the smoothed ones."""
    cells = buckets(series.points)
    means = [(float(c.step), c.mean) for c in cells]
    smoothed = list(zip((x for x, _ in means), smooth([y for _, y in means]), strict=True))
    out = ""
    if len(cells) < len(series.points) and not bare:
        edge = [(float(c.step), c.high) for c in cells] + [(float(c.step), c.low) for c in reversed(cells)]
        out += f'<polygon class="band" points="{frame.path(edge)}" style="fill:{colour}"/>'
    if smoothed != means and not bare:
        out += f'<polyline class="raw" points="{frame.path(means)}" style="stroke:{colour}"/>'
    dash = f";stroke-dasharray:{series.dash}" if series.dash else ""
    out += f'<polyline class="main" points="{frame.path(smoothed)}" style="stroke:{colour}{dash}"/>'
    if len(cells) <= 12:
        out += "".join(
            f'<circle cx="{frame.x(x):.1f}" cy="{frame.y(y):.1f}" r="3" style="fill:{colour}"/>' for x, y in smoothed
        )
    return out


def stacked_chart(title: str, note: str, series: Sequence[Series]) -> str:
    """A `<figure>` with the series stacked as shares of their sum per step. All must have the same steps. The
    legend says each one's share of the whole run."""
    cells = [buckets(s.points) for s in series]
    sums = [sum(c.mean for c in column) or 1.0 for column in zip(*cells, strict=True)]
    steps = [float(c.step) for c in cells[0]]
    if len(steps) == 1:  # one step: an area needs two edges
        steps, sums, cells = [steps[0] - 0.5, steps[0] + 0.5], sums * 2, [column * 2 for column in cells]
    frame = Frame(steps[0], steps[-1], 0.0, 1.0)
    base, body = [0.0] * len(steps), ""
    colours = [s.colour or f"var(--c{i % COLOURS})" for i, s in enumerate(series)]
    for i, column in enumerate(cells):
        top = [b + c.mean / total for b, c, total in zip(base, column, sums, strict=True)]
        edge = list(zip(steps, top, strict=True)) + list(zip(reversed(steps), reversed(base), strict=True))
        body += f'<polygon class="area" points="{frame.path(edge)}" style="fill:{colours[i]}"/>'
        base = top
    whole = sum(v for s in series for _, v in s.points) or 1.0
    keys = [
        Key(f"{s.name} {sum(v for _, v in s.points) / whole:.0%}", colour)
        for s, colour in zip(series, colours, strict=True)
    ]
    return _figure(title, note, frame, body, series, keys, None, percent=True)


def _figure(
    title: str,
    note: str,
    frame: Frame,
    body: str,
    series: Sequence[Series],
    keys: Sequence[Key],
    last: float | None,
    percent: bool = False,
) -> str:
    grid = "".join(_y_tick(frame, t, f"{t:.0%}" if percent else number(t)) for t in ticks(frame.y0, frame.y1))
    grid += "".join(
        f'<text x="{frame.x(t):.1f}" y="{BOTTOM + 16}" text-anchor="middle">{t:.0f}</text>'
        for t in ticks(frame.x0, frame.x1, 5)
        if t == round(t)
    )
    legend = "".join(legend_key(key) for key in keys)
    shown = f'<span class="last">{number(last)}</span>' if last is not None else ""
    data = [{"name": s.name, "points": [[c.step, _rounded(c.mean)] for c in buckets(s.points)]} for s in series]
    return (
        f'<figure class="card" data-series="{escape(json.dumps(data, separators=(",", ":")))}" '
        f'data-frame="{json.dumps([LEFT, RIGHT, frame.x0, frame.x1, WIDTH])}">'
        f"<figcaption><b>{escape(title)}</b>{shown}</figcaption><p>{escape(note)}</p>"
        f'<div class="keys">{legend}</div>'
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)} by step">{grid}{body}'
        f'<line class="cursor" y1="{TOP}" y2="{BOTTOM}"/></svg><div class="tip"></div></figure>'
    )


def legend_key(key: Key) -> str:
    line = f'<line x1="0" x2="22" y1="5" y2="5" style="stroke:{key.colour};stroke-dasharray:{key.dash or "none"}"/>'
    return f'<span class="key"><svg viewBox="0 0 22 10">{line}</svg>{escape(key.label)}</span>'


def _rounded(value: float) -> float:
    return float(f"{value:.6g}")


def _y_tick(frame: Frame, value: float, label: str) -> str:
    y = f"{frame.y(value):.1f}"
    return (
        f'<line class="grid" x1="{LEFT}" x2="{RIGHT}" y1="{y}" y2="{y}"/>'
        f'<text x="{LEFT - 6}" y="{y}" dy="4" text-anchor="end">{label}</text>'
    )
