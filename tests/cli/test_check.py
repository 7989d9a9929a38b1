"""`quintet check` on a very small model: what is reported, what is refused, and with what exit code."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from typer.testing import CliRunner

from quintet.algorithms.config import AlgorithmConfig
from quintet.algorithms.presets import resolve
from quintet.buffer.journal import SqliteJournal
from quintet.cli.main import app
from quintet.cluster.build import Base
from quintet.cluster.check import Verdict
from quintet.cluster.check_offline import checker_of
from quintet.cluster.estimate import disk_estimate, fixed_bytes, memory_estimate, parameter_counts, size
from quintet.config import RunConfig, load_config, save
from tests.small_recipe import SMALL, small

runner = CliRunner()


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def checked(*overrides: str, **sections: Any) -> tuple[int, str]:
    """Exit code, and what was printed with its line breaks undone."""
    Path("recipe.yaml").write_text(yaml.safe_dump(small(**sections)))
    result = runner.invoke(app, ["check", "recipe.yaml", *(w for text in overrides for w in ("--set", text))])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, " ".join(result.stdout.split())


def jsonl(name: str, rows: list[dict[str, Any]]) -> str:
    Path(name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return name


def test_a_sound_recipe_is_told_in_full_and_nothing_is_written() -> None:
    code, text = checked()
    assert code == 0 and "OK: ready to train. quintet train recipe.yaml" in text
    assert "80 training prompts, 20 held out; a prompt has 4 to 4 tokens, 4.0 on average" in text
    assert "plain text; the first prompt, 4 ids: | " in text and "'<eos>' (1), or after 3 tokens" in text
    assert "4 prompts x 4 samples = 16 samples a step, at most 48 sampled tokens" in text
    assert "1 optimizer steps a step, 3 in 3 steps" in text
    assert "3 steps x 4 prompts = 12 draws = 0.15 passes over 80 prompts" in text
    assert "4 + 4 + 8 = 16 bytes a trained parameter" in text
    assert "32 reference answers earn 1 on average, another prompt's answer 0" in text
    assert text.count("dry run sample ") == 2 and text.count("reward 0 (exact 0), reference '") == 2
    assert "engine and trainer differ by at most" in text
    assert [p.name for p in Path().iterdir()] == ["recipe.yaml"]


def test_a_wrong_option_ends_it_before_anything_loads() -> None:
    Path("recipe.yaml").write_text("rollout: {group_size: 1}\n")
    error = runner.invoke(app, ["check", "recipe.yaml"]).exception
    assert "group-relative methods need n>=2" in str(error)


def test_rows_left_out_and_shared_prompts_are_told_with_reasons() -> None:
    train = [{"prompt": f"{i}+1=", "answer": str(i + 1)} for i in range(8)]
    odd = [{"prompt": "", "answer": "1"}, {"prompt": "1+" * 20, "answer": "1"}]
    sections = {
        "source": jsonl("train.jsonl", train + odd),
        "eval_source": jsonl("eval.jsonl", [*train[:3], {"prompt": "9+9=", "answer": "18"}]),
    }
    Path("recipe.yaml").write_text(yaml.safe_dump({**SMALL, "data": sections}))
    result = runner.invoke(app, ["check", "recipe.yaml"])
    text = " ".join(result.stdout.split())
    assert result.exit_code == 0 and "ready to train, 3 to look at" in text
    assert "1 rows skipped (empty_prompt): train.jsonl:9" in text and "1 rows skipped (overlong)" in text
    assert "3 of 4 held-out prompts are also trained on" in text


def test_a_missing_column_is_a_problem_but_the_folder_is_checked_all_the_same() -> None:
    source = jsonl("train.jsonl", [{"question": "1+1=", "answer": "2"}] * 3)
    Path("recipe.yaml").write_text(yaml.safe_dump({**SMALL, "data": {"source": source, "eval_size": 0}}))
    result = runner.invoke(app, ["check", "recipe.yaml"])
    text = " ".join(result.stdout.split())
    assert result.exit_code == 2 and "Not ready: 1 to mend" in text and "data.columns.prompt" in text
    assert "ok folder runs/small can be written" in text and "reward" not in text


def test_a_reward_function_that_does_not_load_is_a_problem() -> None:
    code, text = checked(reward={"functions": [{"fn": "absent_module:score"}]})
    assert code == 2 and "Not ready" in text and "absent_module" in text


def test_a_reward_that_fails_on_the_reference_answers_is_a_problem() -> None:
    Path("failing.py").write_text("def score(completions, **columns):\n    raise RuntimeError('no grader today')\n")
    code, text = checked(reward={"functions": [{"fn": "failing.py:score"}], "workers": 0, "max_failure_frac": 1.0})
    assert code == 2 and "no grader today" in text


def test_a_reward_that_does_not_tell_right_from_wrong_is_pointed_out() -> None:
    code, text = checked(reward={"functions": [{"fn": "format", "args": {"pattern": "[0-9]+"}}]})
    assert code == 0 and "no difference: format 1" in text and "1 to look at" in text


def test_the_run_of_another_recipe_in_the_folder_is_a_problem_and_its_own_is_not() -> None:
    other = load_config({**SMALL, "seed": 7})
    Path("runs/small").mkdir(parents=True)
    save(other, "runs/small/config.yaml")
    code, text = checked()
    assert code == 2 and "holds a run that differs in seed" in text
    assert checked("seed=7")[0] == 0


def test_a_folder_of_something_else_or_of_another_version_is_a_problem() -> None:
    Path("runs/small").mkdir(parents=True)
    Path("runs/small/thesis.tex").write_text("mine")
    code, text = checked()
    assert code == 2 and "problem folder runs/small is not empty and holds no run" in text
    save(load_config(SMALL), "runs/small/config.yaml")
    SqliteJournal(Path("runs/small/journal.sqlite")).close()
    assert checked()[0] == 0
    db = sqlite3.connect("runs/small/journal.sqlite")
    db.execute("UPDATE meta SET value='1' WHERE key='schema_version'")
    db.commit()
    db.close()
    code, text = checked()
    assert code == 2 and "journal schema 1, this program reads" in text


def test_data_that_ends_before_the_steps_do_is_pointed_out() -> None:
    code, text = checked("steps=30", "data.epochs=1")
    assert code == 0 and "data.epochs 1 ends the run after 20 of 30 steps" in text


def test_a_model_that_does_not_fit_is_a_problem_and_is_not_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quintet.cluster.check.available_memory", lambda device: 1000)
    code, text = checked()
    assert code == 2 and "1 kB available on cpu" in text and "the model does not fit into memory" in text
    assert "sample 0" not in text


def test_a_full_disk_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quintet.cluster.check.free_disk", lambda folder: 10)
    code, text = checked()
    assert code == 2 and "problem disk" in text and "10 B free" in text


def test_memory_is_16_bytes_a_parameter_and_what_comes_beside_it() -> None:
    config = load_config({**SMALL, "algorithm": {"kl": {"name": "k3", "coef": 0.01}}})
    base, algorithm = Base.of(config), resolve(config.algorithm)
    every, trained = parameter_counts(base.hf_config, config)
    assert every == trained == sum(p.numel() for p in _model(config).parameters())
    parts = memory_estimate(
        config, algorithm, base.hf_config, (every, trained), dtype=torch.float32, prompt_tokens=(4.0, 4)
    )
    assert parts["master weights"] + parts["gradients"] + parts["AdamW moments"] == 16 * every
    assert parts["reference"] == parts["engine weights"] == 4 * every and parts["published version"] == 8 * every
    # 16 samples of 3 tokens and 4 prompts of 4: 2 (K, V) x 2 layers x 1 head x 16 wide x 4 bytes x 64 tokens
    assert parts["KV cache"] == 2 * 2 * 1 * 16 * 4 * 64
    assert fixed_bytes(parts) == 32 * every


def test_lora_trains_few_parameters_and_needs_no_copy_of_the_reference() -> None:
    tree = {**SMALL, "algorithm": {"kl": {"name": "k3", "coef": 0.01}}}
    tree["model"] = {**SMALL["model"], "lora": {"r": 4, "alpha": 8}}
    config = load_config(tree)
    from quintet.models.lora import apply_lora

    assert config.model.lora is not None
    adapted = apply_lora(_model(config), config.model.lora, 0)
    trained = sum(p.numel() for p in adapted.parameters() if p.requires_grad)
    base = Base.of(config)
    assert parameter_counts(base.hf_config, config)[1] == trained
    parts = memory_estimate(
        config, resolve(config.algorithm), base.hf_config, (9999, trained), dtype=torch.float32, prompt_tokens=(4.0, 4)
    )
    assert parts["reference"] == 0 and parts["gradients"] + parts["AdamW moments"] == 12 * trained


def test_disk_counts_the_checkpoints_that_are_kept_and_the_one_being_written() -> None:
    config = RunConfig.model_validate({**SMALL, "checkpoint": {"keep_last": 3}})
    parts = disk_estimate(config, resolve(AlgorithmConfig()), (1000, 1000))
    assert parts == {"checkpoints": 4 * 12_000, "final and starting model": 4000, "journal": 48 * (9 * 3 + 400)}
    assert [size(n) for n in (12, 1500, 2e6, 7.75e9)] == ["12 B", "2 kB", "2 MB", "7.8 GB"]


def _model(config: RunConfig) -> Any:
    from quintet.models.loader import load_model

    return load_model(config.model)


def test_a_critic_is_counted_in_memory_and_checkpoints() -> None:
    config = load_config({**SMALL, "algorithm": {"preset": "ppo"}})
    parts = memory_estimate(
        config, resolve(config.algorithm), Base.of(config).hf_config, (10, 10), dtype=torch.float32,
        prompt_tokens=(4.0, 4),
    )  # fmt: skip
    assert parts["critic"] == 16 * 10
    disk = disk_estimate(config, resolve(config.algorithm), (10, 10))
    assert disk["checkpoints"] == 2 * 120 * (config.checkpoint.keep_last + 1)


def test_an_offline_recipe_is_checked_without_training(tmp_path: Path) -> None:
    tiny = {"hidden_size": 32, "intermediate_size": 48, "layers": 1, "heads": 2, "kv_heads": 1, "max_position": 32}
    data = {"source": "task:sums_pairs", "args": {"max": 9, "template": "{a}+{b}="}, "eval_size": 20, "epochs": 2}
    config = load_config(
        {
            "steps": 50,
            "algorithm": {"preset": "dpo"},
            "model": {"tiny": tiny},
            "data": data,
            "offline": {"batch_size": 8},
        }
    )
    lines = asyncio.run(checker_of(config, tmp_path / "run", lambda line: None).run())
    said = {about: " ".join(line.text for line in lines if line.about == about) for about in {x.about for x in lines}}
    assert "80 pairs, 20 held out" in said["data"]
    assert "its rejected answer" in said["template"]
    assert "50 steps x 8 rows = 400 rows = 5.00 passes over 80" in said["batches"]
    assert "data.epochs 2 ends the run after 20 of 50 steps" in said["batches"]
    assert "reference" in said["memory"] and "journal" not in said["disk"]
    assert not (tmp_path / "run").exists()
    broken = load_config({"algorithm": {"preset": "dpo"}, "model": {"tiny": tiny}, "data": {"source": "task:sums"}})
    lines = asyncio.run(checker_of(broken, tmp_path / "run", lambda line: None).run())
    assert [line.about for line in lines if line.verdict is Verdict.PROBLEM] == ["data"]
