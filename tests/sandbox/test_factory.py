"""The isolation asked for, or a refusal that says how to mend it."""

from __future__ import annotations

import asyncio
import logging
import shutil
from pathlib import Path

import pytest
from pydantic import ValidationError

from quintet.sandbox.config import SandboxConfig
from quintet.sandbox.factory import make_sandbox
from quintet.sandbox.protocol import Call, Limits, Program
from quintet.types import QuintetError
from tests.sandbox.boxes import make_box, missing


def test_without_bubblewrap_the_namespace_back_end_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(QuintetError, match=r"bubblewrap.*not on PATH") as caught:
        make_sandbox(SandboxConfig(backend="namespace"))
    assert "make sandbox-deps" in str(caught.value)


def test_where_bubblewrap_may_not_work_the_reason_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake = tmp_path / "bwrap"
    fake.write_text("#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2\nexit 1\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    with pytest.raises(QuintetError, match="No permissions to create new namespace"):
        make_sandbox(SandboxConfig(backend="namespace"))


@pytest.mark.parametrize("hole", ["--share-net", "no filter"])
def test_a_jail_with_a_hole_in_it_is_refused(hole: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The lock is tried out from inside, whatever the outside promised."""
    if missing("namespace"):
        pytest.skip(str(missing("namespace")))
    copy = tmp_path / "jail"
    shutil.copytree(Path(__file__).parents[2] / "quintet/sandbox/jail", copy)
    if hole == "no filter":
        source = (copy / "isolation.py").read_text()
        line = "        self._filters[limits.processes > 1].install()\n"
        assert line in source
        (copy / "isolation.py").write_text(source.replace(line, ""))
        message = "a program in the jail can"
    else:
        source = (copy / "isolation.py").read_text()
        (copy / "isolation.py").write_text(source.replace('umount2(b"/proc"', 'umount2(b"/nothing"'))
        message = "cannot hide /proc"
    monkeypatch.setattr("quintet.sandbox.launch.jail_folder", lambda: copy)
    with pytest.raises(QuintetError, match=message):
        make_sandbox(SandboxConfig(backend="namespace"))


def test_the_process_back_end_says_that_it_isolates_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        sandbox = make_sandbox(SandboxConfig(backend="process"))
    asyncio.run(sandbox.close())
    assert ["isolates NOTHING" in record.message for record in caplog.records] == [True]


def test_packages_of_a_folder_can_be_imported_and_preloaded(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    (tmp_path / "mine.py").write_text("value = 7")
    (tmp_path / "other.py").write_text("value = 8")
    for backend in ("process", "namespace"):
        box = make_box(backend, workers=1, python_path=[str(tmp_path)], preload=["mine"])
        try:
            result = box.run("import mine, other", expressions=("mine.value", "other.value"))
            assert [value.value for value in result.values] == [7, 8], result
        finally:
            box.close()


def test_a_folder_that_is_not_there_is_refused() -> None:
    with pytest.raises(QuintetError, match=r"sandbox\.python_path: /no/such is not a folder"):
        make_sandbox(SandboxConfig(backend="process", python_path=["/no/such"]))


def test_a_module_that_cannot_be_preloaded_is_said() -> None:
    box = make_box("process", workers=1, preload=["no_such_module"])
    with pytest.raises(QuintetError, match="No module named 'no_such_module'"):
        box.run("1")
    box.close()


class Own:
    """A back end of a user's."""

    def __init__(self, config: SandboxConfig) -> None:
        self.workers = config.workers


def test_a_class_of_your_own() -> None:
    sandbox = make_sandbox(SandboxConfig(backend=f"{__name__}:Own", workers=3))
    assert sandbox.workers == 3  # type: ignore[attr-defined]
    with pytest.raises(QuintetError, match="no_such_package"):
        make_sandbox(SandboxConfig(backend="no_such_package:Class"))


def test_options_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ValidationError, match="not 'docker'"):
        SandboxConfig(backend="docker")
    with pytest.raises(ValidationError, match="url goes with"):
        SandboxConfig(backend="remote")
    with pytest.raises(ValidationError, match="url goes with"):
        SandboxConfig(backend="namespace", url="http://x")


def test_the_limits_of_the_configuration_are_a_sessions(tmp_path: Path) -> None:
    box = make_box("process", workers=1, limits={"memory_mb": 64})
    try:
        session = box.wait(box.sandbox.create())
        result = box.wait(box.sandbox.run(Program("x = bytearray(10**8)", calls=(Call("f"),)), Limits(), session))
        assert result.outcome == "memory"
    finally:
        box.close()
