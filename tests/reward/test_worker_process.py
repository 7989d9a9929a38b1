"""Workers are forks of a template: at once, as often as asked, also where the template cannot be forked or has died."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from quintet.reward.errors import WorkerDied
from quintet.reward.loading import FunctionSource
from quintet.reward.sample import Sample
from quintet.reward.worker_process import Template, WorkerProcess
from quintet.types import QuintetError

COUNTS = """
import os, threading
open({loads!r}, "a").write("x")
{more}
def grade(solution_str, ground_truth):
    if solution_str == "pid":
        return float(os.getpid())
    if solution_str == "exit":
        os._exit(7)
    return float(threading.active_count())
"""


@contextmanager
def started(tmp_path: Path, more: str = "") -> Iterator[tuple[WorkerProcess, Template, Path]]:
    loads = tmp_path / "loads"
    file = tmp_path / "graders.py"
    file.write_text(COUNTS.format(loads=str(loads), more=more))
    template = Template([FunctionSource("grade", f"{file}:grade")])
    process = WorkerProcess(template)
    try:
        yield process, template, loads
    finally:
        process.close()
        template.close()


def ask(process: WorkerProcess, text: str) -> float:
    reply = process.call(0, [Sample("p", text, [], False, answer="7")], 60.0)
    assert reply.verdicts[0].value is not None
    return reply.verdicts[0].value


def test_workers_share_one_loading_of_the_functions(tmp_path: Path) -> None:
    with started(tmp_path) as (first, template, loads):
        second = WorkerProcess(template)
        try:
            pids = {int(ask(process, "pid")) for process in (first, second)}
            assert pids == {first.pid, second.pid}
        finally:
            second.close()
        assert loads.read_text() == "x"


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere workers are never forks")
def test_a_module_that_started_a_thread_is_loaded_anew_where_its_thread_lives(tmp_path: Path) -> None:
    thread = "threading.Thread(target=threading.Event().wait, daemon=True).start()"
    with started(tmp_path, thread) as (process, _, loads):
        assert ask(process, "threads") == 2.0
        assert loads.read_text() == "xx"


def test_a_template_that_died_is_started_again(tmp_path: Path) -> None:
    with started(tmp_path) as (process, template, loads):
        second = WorkerProcess(template)
        try:
            before = [ask(worker, "pid") for worker in (process, second)]
            os.kill(template.pid, signal.SIGKILL)
            assert [ask(worker, "pid") for worker in (process, second)] == before  # its workers go on
            for worker, pid in zip((process, second), before, strict=True):
                os.kill(int(pid), signal.SIGKILL)
                with pytest.raises(WorkerDied, match="not known"):
                    ask(worker, "pid")
                assert ask(worker, "pid") not in before
        finally:
            second.close()
        assert loads.read_text() == "xx"  # one template more for both


def test_how_a_worker_ended_is_said(tmp_path: Path) -> None:
    with started(tmp_path) as (process, _, _):
        with pytest.raises(WorkerDied, match=r"exit status 7"):
            ask(process, "exit")
        assert ask(process, "threads") == 1.0


def test_a_module_that_ends_the_template_while_it_loads_is_the_users_error(tmp_path: Path) -> None:
    with (
        started(tmp_path, "os._exit(3)") as (process, _, _),
        pytest.raises(QuintetError, match=r"ended \(exit status 3\) while importing `grade`"),
    ):
        process.prepare()
