"""The reward service: weighted sums, abstention, typed failures, signatures, limits."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from quintet.reward import RewardError, load_function
from quintet.reward.config import RewardConfig
from quintet.reward.errors import CallTimeout
from quintet.reward.loading import FunctionSource
from quintet.reward.pool import SlotPool
from quintet.reward.sample import Sample, Verdict
from quintet.reward.service import LocalRewardService
from quintet.reward.worker_process import Template, WorkerProcess
from quintet.types import Failure, FailureKind, FinishReason, Group, GroupId, Prompt, QuintetError, Rollout, Score

FUNCTIONS = Path(__file__).with_name("reward_functions.py")


def spec(name: str) -> str:
    return f"{FUNCTIONS}:{name}"


def rollout(
    group_id: GroupId, index: int, text: str, finish: FinishReason = FinishReason.STOP, failure: Failure | None = None
) -> Rollout:
    ids = list(range(len(text)))
    return Rollout(group_id, index, [1], ids, text, [0.0] * len(ids), [1] * len(ids), [], finish, failure=failure)


def group(
    texts: Sequence[str],
    answer: str | None = "7",
    *,
    prompt_id: str = "p",
    messages: list[dict[str, Any]] | None = None,
    metadata: dict[str, Any] | None = None,
    finish: Sequence[FinishReason] = (),
) -> Group:
    gid = GroupId(prompt_id)
    prompt = Prompt(prompt_id, [1], messages, None if messages else "question", answer=answer, metadata=metadata or {})
    reasons = list(finish) or [FinishReason.STOP] * len(texts)
    return Group(gid, prompt, [rollout(gid, i, t, r) for i, (t, r) in enumerate(zip(texts, reasons, strict=True))])


def score(
    groups: list[Group],
    *functions: str | dict[str, Any],
    given: Sequence[Callable[..., Any]] | None = None,
    **options: Any,
) -> list[list[Score]]:
    """Start a service, score once, close it."""
    if functions:
        options["functions"] = [{"fn": f} if isinstance(f, str) else f for f in functions]
    service = LocalRewardService(RewardConfig.model_validate({"workers": 1} | options), functions=given)
    try:
        service.start()
        return asyncio.run(service.score(groups))
    finally:
        service.close()


def rewards(groups: list[Group], *functions: str | dict[str, Any], **options: Any) -> list[list[float | None]]:
    return [[s.reward for s in scores] for scores in score(groups, *functions, **options)]


# ---- combination -------------------------------------------------------------------------------


def test_rewards_stay_aligned_with_prompts_for_several_samples() -> None:
    # ROL05: prompts A and B, two samples each, 1 when the completion carries its own prompt's letter
    groups = [group(["A", "A"], "A", prompt_id="A"), group(["B", "B"], "B", prompt_id="B")]
    assert rewards(groups, spec("trl_async"), spec("verl_float")) == [[2.0, 2.0], [2.0, 2.0]]


def test_failed_and_aborted_rollouts_are_never_graded() -> None:
    failure = Failure(FailureKind.ENGINE, "out of memory")
    broken = group(["7", "7", "7"], finish=[FinishReason.STOP, FinishReason.ABORTED, FinishReason.FAILED])
    broken.rollouts[2].failure = failure
    [scores] = score([broken], "exact", on_failure="stop", max_failure_frac=0.1)
    assert [s.reward for s in scores] == [1.0, None, None]
    assert scores[1].failure is not None and scores[1].failure.kind == FailureKind.UNSCORED
    assert scores[2].failure == failure


def test_truncated_zero_gives_zero_with_the_reason_without_a_call() -> None:
    cut = group(["7", "7"], finish=[FinishReason.STOP, FinishReason.LENGTH])
    [scores] = score([cut], {"fn": "exact", "truncated": "zero"})
    assert [s.reward for s in scores] == [1.0, 0.0]
    assert scores[1].info == {"exact": {"reason": "truncated"}}
    assert rewards([cut], "exact") == [[1.0, 1.0]]
    assert rewards([cut], {"fn": spec("trl_length"), "truncated": "zero"}) == [[1.0, 0.0]]


def test_a_sample_without_a_usable_reference_is_excluded_not_graded_zero() -> None:
    # REW23
    [scores] = score([group(["7"], "a paragraph without any answer")], "number", max_failure_frac=1.0)
    assert scores[0].reward is None
    assert scores[0].failure is not None and scores[0].failure.kind == FailureKind.GRADER


def test_format_with_a_pattern_matches_the_whole_response_under_the_limit() -> None:
    assert rewards([group(["ab\nc", "xab"])], {"fn": "format", "args": {"pattern": "a.*c"}}) == [[1.0, 0.0]]
    catastrophic = {"fn": "format", "args": {"pattern": "(a+)+b"}}
    [scores] = score([group(["a" * 60, "aab"])], catastrophic, timeout_s=0.5)
    assert scores[0].failure is not None and scores[0].failure.kind == FailureKind.TIMEOUT
    assert scores[1].reward == 1.0


# ---- signatures --------------------------------------------------------------------------------


def test_trl_function_gets_messages_columns_and_ids() -> None:
    conversational = group(
        ["yes", "no"], "yes", messages=[{"role": "user", "content": "q?"}], metadata={"level": 3, "other": "x"}
    )
    assert rewards([conversational], spec("trl_columns")) == [[1 + 3 + 0.3, 0 + 3 + 0.2]]


def test_verl_function_gets_its_four_arguments_and_may_return_a_dict() -> None:
    graded = group(["7", "8"], metadata={"data_source": "gsm8k", "extra_info": {"index": 5}})
    [scores] = score([graded], spec("verl_score"))
    assert [s.reward for s in scores] == [1.0, 0.0]
    assert scores[0].info == {"verl_score": {"source": "gsm8k", "index": 5}}


def test_verl_ground_truth_comes_from_its_own_column_when_there_is_no_answer() -> None:
    graded = group(["7"], None, metadata={"reward_model": {"ground_truth": "7"}})
    assert rewards([graded], spec("verl_float")) == [[1.0]]


def test_args_reach_the_function_and_an_unknown_one_is_refused() -> None:
    assert rewards([group(["7"])], {"fn": spec("verl_float"), "args": {"bonus": 0.5}}) == [[1.5]]
    with pytest.raises(QuintetError, match="no parameter `bonsu`"):
        score([group(["7"])], {"fn": spec("verl_float"), "args": {"bonsu": 0.5}})


def test_async_function_and_none_is_abstention() -> None:
    [scores] = score([group(["7", "", "8"])], spec("trl_async"))
    assert [s.reward for s in scores] == [1.0, None, 0.0]
    assert scores[1].parts == {"trl_async": None}
    assert scores[1].failure is not None and scores[1].failure.kind == FailureKind.UNSCORED


@pytest.mark.parametrize("workers", [0, 1])
def test_workers_and_no_workers_give_the_same_scores(workers: int) -> None:
    graded = [group(["7", ""]), group(["8", "abc"])]
    assert rewards(graded, spec("trl_async"), {"fn": spec("trl_length"), "weight": 0.1}, workers=workers) == [
        [1.1, 0.0],
        [0.1, pytest.approx(0.3)],
    ]


@pytest.mark.parametrize("workers", [0, 1])
def test_unsupported_signature_is_refused_at_start(workers: int) -> None:
    service = LocalRewardService(
        RewardConfig.model_validate({"functions": [{"fn": spec("positional")}], "workers": workers})
    )
    with pytest.raises(QuintetError, match=r"`positional\(text, gold\)` has an unsupported signature") as error:
        service.start()
    assert "completions" in str(error.value) and "solution_str" in str(error.value)


def test_a_required_column_that_the_data_lacks_stops_with_the_columns_there_are() -> None:
    with pytest.raises(RewardError, match=r"`trl_columns`: its parameter `level` is no column .*difficulty"):
        score([group(["7"], metadata={"difficulty": 1})], spec("trl_columns"))


def test_two_functions_of_one_name_are_refused() -> None:
    with pytest.raises(QuintetError, match="two reward functions are called `exact`"):
        LocalRewardService(RewardConfig.model_validate({"functions": [{"fn": "exact"}, {"fn": "exact"}]}))


# ---- loading -----------------------------------------------------------------------------------


def test_load_function_by_module_and_by_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FUNCTIONS.parent))
    assert load_function("reward_functions:bare_float")([]) == 1.0
    assert load_function(f"{FUNCTIONS}:bare_float")([]) == 1.0


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nubmer", "did you mean `number`"),
        ("no_such_module_here:f", "ModuleNotFoundError: No module named 'no_such_module_here'"),
        ("reward_functions:bare_flaot", "did you mean `bare_float`"),
        ("reward_functions:time", "is a module, not a function"),
        ("nowhere/rewards.py:f", "there is no file .*nowhere/rewards.py"),
    ],
)
def test_a_function_that_does_not_load_is_refused_with_the_mend(
    name: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(FUNCTIONS.parent))
    with pytest.raises(QuintetError, match=message):
        load_function(name)


def test_the_workers_import_error_reaches_the_caller(tmp_path: Path) -> None:
    # CFG10
    broken = tmp_path / "broken.py"
    broken.write_text("x = 1\nimport package_that_is_missing\n")
    service = LocalRewardService(RewardConfig.model_validate({"functions": [{"fn": f"{broken}:f"}]}))
    with pytest.raises(QuintetError) as error:
        service.start()
    assert "ModuleNotFoundError: No module named 'package_that_is_missing' (broken.py, line 2)" in str(error.value)


def test_workers_do_not_import_torch() -> None:
    assert rewards([group(["7"])], spec("imported_modules")) == [[0.0]]


# ---- wrong returns (REW17) -----------------------------------------------------------------------


def test_none_entry_is_unscored() -> None:
    # REW17 "None list entry"
    [scores] = score([group(["1", "", "0", "2"])], spec("echo"))
    assert [s.reward for s in scores] == [1.0, None, 0.0, 2.0]


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        # REW17 "3 values", "a bare float", "a raise"
        ("three_values", "returned 3 values for 4 completions (3 vs 4)"),
        ("bare_float", "returned float (1.0), expected a list of 4"),
        ("raises", "ZeroDivisionError: no such luck"),
        ("exits", "SystemExit: 0"),
    ],
)
def test_wrong_return_is_a_grader_failure_or_stops_and_never_a_zero(function: str, reason: str) -> None:
    graded = group(["a", "b", "c", "d"])
    [scores] = score([graded], spec(function), max_failure_frac=1.0)
    for item in scores:
        assert item.reward is None and item.parts == {}
        assert item.failure is not None and item.failure.kind == FailureKind.GRADER
        assert f"`{function}`" in item.failure.message and reason in item.failure.message
    for stop in ({"on_failure": "stop"}, {}):  # by choice, or because more than half of the samples failed
        with pytest.raises(RewardError) as error:
            score([graded], spec(function), **stop)
        assert f"`{function}`" in str(error.value) and reason in str(error.value)


def test_the_traceback_of_a_raise_names_the_line() -> None:
    [scores] = score([group(["a"])], spec("raises"), max_failure_frac=1.0)
    assert scores[0].failure is not None
    assert "reward_functions.py" in scores[0].failure.message and "in raises" in scores[0].failure.message


def test_nan_and_infinity_fail_their_own_sample_only() -> None:
    # REW17 "NaN"
    [scores] = score([group(["1", "nan", "-inf", "0"])], spec("echo"))
    assert [s.reward for s in scores] == [1.0, None, None, 0.0]
    for item in scores[1:3]:
        assert item.failure is not None and item.failure.kind == FailureKind.GRADER
    assert scores[1].failure is not None and "`echo`: returned nan" in scores[1].failure.message


def test_max_failure_frac_is_taken_over_a_steps_samples() -> None:
    config = {"functions": [{"fn": spec("echo")}], "workers": 0, "max_failure_frac": 0.5}
    bad, good = group(["nan", "nan"]), group(["1", "1"])

    async def two_calls(samples_per_step: int | None, second: Group) -> None:
        service = LocalRewardService(RewardConfig.model_validate(config), samples_per_step=samples_per_step)
        await service.score([bad])
        await service.score([second])

    asyncio.run(two_calls(4, good))  # 2 of 4
    with pytest.raises(RewardError, match="2 of 2 samples failed"):
        asyncio.run(two_calls(None, good))
    with pytest.raises(RewardError, match="3 of 4 samples failed"):
        asyncio.run(two_calls(4, group(["nan", "1"])))


# ---- limits --------------------------------------------------------------------------------------


def test_a_hanging_sample_of_a_trl_group_fails_alone() -> None:
    [scores] = score([group(["a", "hang", "b"])], spec("hangs_on_hang"), timeout_s=0.3, workers=2)
    assert [s.reward for s in scores] == [1.0, None, 1.0]
    assert scores[1].failure is not None
    assert scores[1].failure.kind == FailureKind.TIMEOUT
    assert "`hangs_on_hang`: did not return within 0.3 s" in scores[1].failure.message


def test_a_crashing_sample_of_a_trl_group_fails_alone() -> None:
    [scores] = score([group(["a", "crash", "b"])], spec("dies_on_crash"))
    assert [s.reward for s in scores] == [1.0, None, 1.0]
    assert scores[1].failure is not None and scores[1].failure.kind == FailureKind.GRADER
    assert "exit status 7" in scores[1].failure.message


def pid_alive(pid: int) -> bool:
    """Running, not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until(condition: Any, seconds: float = 20.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def test_hung_calls_give_their_workers_back_and_take_their_children_with_them(tmp_path: Path) -> None:
    # REW02, REW14: hangs inside one C call; the worker is killed with its children, and replaced
    template = Template([FunctionSource("verl_hang", spec("verl_hang"))])
    slots = [WorkerProcess(template) for _ in range(2)]
    pool = SlotPool(slots, template)
    for slot in slots:
        slot.prepare()
    before = [slot.pid for slot in slots]
    samples = [Sample("p", "hang", [], False, answer=str(tmp_path / f"pid{i}")) for i in range(3)]
    samples += [Sample("p", "fine", [], False, answer="7")] * 4

    async def main() -> list[Any]:
        calls = [pool.call(0, [sample], 0.6) for sample in samples]
        return list(await asyncio.gather(*calls, return_exceptions=True))

    try:
        results = asyncio.run(main())
        assert [type(result) for result in results[:3]] == [CallTimeout] * 3
        assert [reply.verdicts for reply in results[3:]] == [[Verdict(1.0)]] * 4
        after = [slot.pid for slot in slots]
        assert all(pid is not None and pid_alive(pid) for pid in after)
        assert set(after).isdisjoint(before)
        children = [int((tmp_path / f"pid{i}").read_text()) for i in range(3)]
        assert wait_until(lambda: not any(map(pid_alive, children)))
    finally:
        pool.close()
    assert [slot.pid for slot in slots] == [None, None]
    assert not any(map(pid_alive, filter(None, [*before, *after])))


def test_samples_run_in_parallel_and_the_event_loop_goes_on(tmp_path: Path) -> None:
    # PRF02, without a stop-watch: each of four calls waits for the other three, and for a file that the loop writes
    config = RewardConfig.model_validate({"functions": [{"fn": spec("waits_for_peers")}], "workers": 4})
    service = LocalRewardService(config)
    graded = group(["0", "1", "2", "3"], str(tmp_path))

    async def heartbeat() -> None:
        while len(list(tmp_path.iterdir())) < 4:
            await asyncio.sleep(0.01)
        (tmp_path / "go").touch()

    async def main() -> list[Any]:
        scores, _ = await asyncio.gather(service.score([graded]), heartbeat())
        return scores[0]

    try:
        service.start()
        assert [s.reward for s in asyncio.run(main())] == [1.0] * 4
    finally:
        service.close()


def test_workers_end_when_the_parent_is_killed(tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(
        "import sys, time\n"
        "from quintet.reward.worker_process import Template, WorkerProcess\n"
        "from quintet.reward.loading import FunctionSource\n"
        "from quintet.reward.sample import Sample\n"
        "import threading\n"
        f"slot = WorkerProcess(Template([FunctionSource('verl_hang', {spec('verl_hang')!r})]))\n"
        "slot.prepare()\n"
        f"sample = Sample('p', 'hang', [], False, answer={str(tmp_path / 'child')!r})\n"
        "threading.Thread(target=slot.call, args=(0, [sample], 1000.0), daemon=True).start()\n"
        "print(slot.pid, flush=True)\n"
        "time.sleep(1000)\n"
    )
    env = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True, env=env) as parent:
        assert parent.stdout is not None
        worker = int(parent.stdout.readline())
        assert wait_until(lambda: (tmp_path / "child").exists() and (tmp_path / "child").read_text() != "")
        assert pid_alive(worker)
        parent.kill()
    assert wait_until(lambda: not pid_alive(worker))
    os.kill(int((tmp_path / "child").read_text()), signal.SIGKILL)


# ---- callables -----------------------------------------------------------------------------------


def test_a_local_function_runs_in_a_worker_process() -> None:
    def pid(completions: list[str], **kwargs: Any) -> list[float]:
        return [float(os.getpid())] * len(completions)

    [scores] = score([group(["a"])], given=[pid])
    assert scores[0].reward is not None and scores[0].reward != os.getpid()
    assert list(scores[0].parts) == ["pid"]


def test_an_unpicklable_function_runs_in_a_thread_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    lock = threading.Lock()

    def locked(completions: list[str], **kwargs: Any) -> list[float]:
        with lock:
            return [float(os.getpid())] * len(completions)

    with caplog.at_level(logging.WARNING, "quintet.reward"):
        [scores] = score([group(["a"])], given=[locked])
    assert scores[0].reward == os.getpid()
    assert "`locked` cannot be sent to a worker process" in caplog.text and "soft" in caplog.text


def test_a_hanging_thread_is_abandoned_and_others_go_on(caplog: pytest.LogCaptureFixture) -> None:
    release = threading.Event()

    def waits(solution_str: str, ground_truth: str) -> float:
        if solution_str == "hang":
            release.wait(60.0)
        return 1.0

    [scores] = score([group(["hang", "a", "b"])], given=[waits], workers=0, timeout_s=0.3)
    release.set()
    assert [s.reward for s in scores] == [None, 1.0, 1.0]
    assert scores[0].failure is not None and scores[0].failure.kind == FailureKind.TIMEOUT
    assert "`waits` hangs in a thread" in caplog.text


def test_a_function_of_a_main_script_runs_in_a_worker(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import asyncio, os\n"
        "from quintet.types import FinishReason, Group, GroupId, Prompt, Rollout\n"
        "from quintet.reward.config import RewardConfig\n"
        "from quintet.reward.service import LocalRewardService\n"
        "print('once')\n"
        "def mine(completions, **kwargs):\n"
        "    return [float(os.getpid() != parent) for _ in completions]\n"
        "parent = os.getpid()\n"
        "service = LocalRewardService(RewardConfig(), functions=[mine])\n"
        "gid = GroupId('p')\n"
        "rollout = Rollout(gid, 0, [1], [2], 'a', [0.0], [1], [], FinishReason.STOP)\n"
        "print(asyncio.run(service.score([Group(gid, Prompt('p', [1]), [rollout])]))[0][0].reward)\n"
        "service.close()\n"
    )
    env = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, env=env, timeout=60)
    assert done.stdout.split() == ["once", "1.0"], done.stderr
