"""Rollout servers as processes, and what is needed to load, kill and drain them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx

ROOT = Path(__file__).parents[2]
MODEL = "builtin:tiny"


class ServerProcess:
    """`quintet serve rollout` on a free port, ready when the constructor returns."""

    def __init__(self, log: Path, *options: str, key: str) -> None:
        command = [
            sys.executable,
            "-m",
            "quintet.cli.main",
            "serve",
            "rollout",
            "--model",
            MODEL,
            "--port",
            "0",
            *options,
        ]
        environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "QUINTET_ROLLOUT_KEY": key}
        self.log = log
        self.process = subprocess.Popen(
            [*command, *options], stdout=log.open("w"), stderr=subprocess.STDOUT, env=environment, cwd=ROOT
        )
        self.url = ""

    def wait_ready(self, timeout_s: float = 240.0) -> str:
        deadline = time.monotonic() + timeout_s
        while not self._answers():
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < deadline, "the server did not come up"
            time.sleep(0.1)
        return self.url

    def rss_mb(self) -> float:
        """Resident memory."""
        pages = int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 2**20

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            self.process.wait(30)

    def _answers(self) -> bool:
        said = dict(line.split(": ", 1) for line in self.log.read_text().splitlines() if ": " in line)
        self.url = said.get("url", "")
        try:
            return bool(self.url) and httpx.get(f"{self.url}/health", timeout=5).status_code == 200
        except httpx.HTTPError:
            return False
