"""What every benchmark here shares: sides that take turns, medians, one RATIO line, the limit of the hardware.

Two cores of a shared machine are worth between one and two from minute to minute, so that absolute seconds mean
little: the sides run in turns of a few seconds, and what is compared are medians of the same minutes.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median

import torch

from quintet.observe import charts

Turns = dict[str, list[float]]


def alternate(sides: Mapping[str, Callable[[], float]], turns: int, *, say: bool = True) -> Turns:
    """Seconds (or another figure) that each side's function returns, `turns` times in turn, the order reversed every
    second time so that none is always the first after a pause."""
    found: Turns = {name: [] for name in sides}
    for turn in range(turns):
        names = list(sides) if turn % 2 == 0 else list(reversed(sides))
        for name in names:
            found[name].append(sides[name]())
            if say:
                print(f"  turn {turn + 1}/{turns}  {name:12} {found[name][-1]:9.3f}", flush=True)
    return found


def ratio_line(
    name: str, ours: float, theirs: float, *, peer: str, unit: str = "s", more_is_better: bool = False
) -> str:
    """`RATIO grpo_step 2.31x trl=54.2s quintet=23.5s`: how many times better quintet is."""
    return f"RATIO {name} {theirs / ours:.2f}x {peer}={theirs:.4g}{unit} quintet={ours:.4g}{unit}"


def print_ratio(name: str, found: Turns, *, peer: str, ours: str = "quintet") -> float:
    """From `alternate`'s seconds, medians; returns the ratio."""
    mine, theirs = median(found[ours]), median(found[peer])
    print(ratio_line(name, mine, theirs, peer=peer), flush=True)
    return theirs / mine


def write_page(path: Path, title: str, figures: Sequence[str]) -> None:
    """Charts of quintet.observe.charts one below the other, as a page that needs nothing else."""
    style = (Path(charts.__file__).parent / "report.css").read_text()
    narrow = "body { max-width: 36rem; margin: 2rem auto; } figure { margin-bottom: 1rem; }"  # letters grow with it
    head = f"<meta charset=utf-8><title>{title}</title><style>{style}{narrow}</style>"
    path.write_text(f"<!doctype html>{head}<body>{''.join(figures)}")


def machine() -> str:
    cpu = torch.cpu.get_capabilities()
    has = [key for key in ("avx2", "avx512_f", "avx512_bf16", "amx_bf16") if cpu.get(key)]
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else cpu.get("cpu_name", platform.processor())
    return f"{device}, {torch.get_num_threads()} threads, {' '.join(has)}, torch {torch.__version__}"


def matmul_flops(rows: int, inner: int, columns: int, dtype: torch.dtype, device: str = "cpu") -> float:
    """FLOP/s of one matrix product of this shape, the best of several tenths of a second."""
    a, b = (torch.randn(shape, device=device).to(dtype) for shape in ((rows, inner), (columns, inner)))
    return 2.0 * rows * inner * columns / _best_seconds(lambda: torch.nn.functional.linear(a, b), device)


def read_bandwidth(device: str = "cpu", n_bytes: int = 1 << 28) -> float:
    """Bytes/s of reading memory that does not fit any cache."""
    x = torch.ones(n_bytes // 4, device=device)
    return n_bytes / _best_seconds(x.sum, device)


def _best_seconds(work: Callable[[], object], device: str) -> float:
    best, until = float("inf"), time.perf_counter() + 0.5
    while time.perf_counter() < until:
        start = time.perf_counter()
        work()
        if device != "cpu":
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - start)
    return best
