"""Recipes to trees, and what is refused on the way. Ids such as CFG01 name reported cases."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from quintet.config import (
    RunConfig,
    check,
    defaults_yaml,
    diff,
    digest,
    load_config,
    require_writable,
    run_folder,
    save,
    to_yaml,
    walk,
)
from quintet.types import QuintetError

RECIPES = sorted((Path(__file__).parents[1] / "recipes").glob("*.yaml"))


def refusal(tmp_path: Path, text: str, *overrides: str) -> str:
    """The message that a recipe of this text is refused with; the file's path is shortened to R."""
    path = tmp_path / "recipe.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(QuintetError) as caught:
        load_config(path, overrides)
    message = str(caught.value).replace(str(path), "R")
    assert len(message.splitlines()) <= 3
    return message


# -- loading -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", RECIPES, ids=lambda p: p.name)
def test_every_recipe_is_valid_and_named_after_its_file(path: Path) -> None:
    assert load_config(path).name == path.stem


def test_there_are_recipes() -> None:
    assert {"sums_tiny", "smollm2_sums", "smollm2_sums_lora"} <= {p.stem for p in RECIPES}


def test_overrides_are_yaml_and_applied_in_order() -> None:
    config = load_config(
        {"model": "some/folder"},
        ["train.lr=1e-5", "train.lr=2e-5", "model.lora.r=4", "rollout.stop=[a, b]", "model.chat_template_kwargs.x=no"],
    )
    assert config.train.lr == 2e-5
    assert config.model.name == "some/folder"
    assert config.model.lora is not None and config.model.lora.r == 4
    assert config.rollout.stop == ["a", "b"]
    assert config.model.chat_template_kwargs == {"x": "no"}


def test_plain_scalars_follow_yaml_1_2(tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    path.write_text("data:\n  args: {lr: 1e-5, word: no, code: 010, time: 1:30, n: -3, x: 1.5, t: true, nothing: ~}\n")
    args = load_config(path).data.args
    assert args == {
        "lr": 1e-5,
        "word": "no",
        "code": "010",
        "time": "1:30",
        "n": -3,
        "x": 1.5,
        "t": True,
        "nothing": None,
    }


def test_chinese_text_is_kept_cfg13(tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    path.write_text("data: {prompt_template: '求 {a} 的值'}\n", encoding="utf-8")
    config = load_config(path)
    assert config.data.prompt_template == "求 {a} 的值"
    assert "求 {a} 的值" in to_yaml(config)


def test_merge_keys_work(tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    path.write_text("warm_start: &w {steps: 5, lr: 0.1}\ntrain: {<<: {lr: 0.2}, eps: 1e-6}\n")
    config = load_config(path)
    assert (config.train.lr, config.train.eps, config.warm_start.steps) == (0.2, 1e-6, 5)


# -- refusing: the file ------------------------------------------------------------------------------


def test_a_missing_file_names_its_neighbour(tmp_path: Path) -> None:
    (tmp_path / "sums_tiny.yaml").write_text("steps: 1\n")
    with pytest.raises(QuintetError, match=r"sums_tny.yaml: no such recipe file; did you mean .*sums_tiny.yaml\?"):
        load_config(tmp_path / "sums_tny.yaml")


@pytest.mark.parametrize("text", ["", "# only a comment\n", "---\n"])
def test_an_empty_recipe_is_refused(tmp_path: Path, text: str) -> None:
    assert refusal(tmp_path, text).startswith("R")


def test_broken_yaml_names_the_line(tmp_path: Path) -> None:
    assert refusal(tmp_path, "steps: 3\ntrain: {lr: 1\nseed: 2\n").startswith("R:3: broken YAML:")
    assert "R:2: broken YAML" in refusal(tmp_path, "steps: 3\n\tseed: 2\n")


def test_a_list_is_not_a_recipe(tmp_path: Path) -> None:
    assert refusal(tmp_path, "\n- steps\n") == "R:2: a recipe is `key: value` lines, this is a list"


def test_a_key_given_twice_is_refused(tmp_path: Path) -> None:
    assert "R:3: key 'steps' is given twice (first on line 1)" in refusal(tmp_path, "steps: 1\nseed: 0\nsteps: 2\n")


# -- refusing: keys and types ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "steps: 1\nrollout:\n  group_sise: 4\n",
            "R:3: unknown key 'rollout.group_sise'; did you mean 'rollout.group_size'?",
        ),
        ("group_size: 4\n", "R:1: unknown key 'group_size'; did you mean 'rollout.group_size'?"),
        ("model: {lora: {rank: 4, rr: 3}}\n", "R:1: unknown key 'model.lora.rr'; did you mean 'model.lora.r'?"),
        (
            "reward:\n  functions:\n  - {fn: number, wieght: 2}\n",
            "R:3: unknown key 'reward.functions.0.wieght'; did you mean 'reward.functions.0.weight'?",
        ),
        ("stps: 1\n", "R:1: unknown key 'stps'; did you mean 'steps'?"),
    ],
)
def test_an_unknown_key_names_line_and_nearest_cfg03(tmp_path: Path, text: str, expected: str) -> None:
    assert expected in refusal(tmp_path, text).splitlines()


def test_an_unknown_parameter_of_a_cell_is_refused_cfg03(tmp_path: Path) -> None:
    message = refusal(tmp_path, "algorithm:\n  policy_loss: {clip_ratio_c: 3}\n")
    assert message.startswith("R:2: algorithm.policy_loss") and "'clip_ratio_c'" in message and "dual_clip" in message


def test_an_unknown_override_names_the_flag() -> None:
    with pytest.raises(QuintetError, match=r"--set train.lrr=3: unknown key 'train.lrr'; did you mean 'train.lr'\?"):
        load_config({}, ["train.lrr=3"])


@pytest.mark.parametrize("flag", ["train.lr", "=3", "train..lr=3"])
def test_a_malformed_override_is_refused(flag: str) -> None:
    with pytest.raises(QuintetError, match="expected KEY=VALUE"):
        load_config({}, [flag])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("seed: 1\nsteps: many\n", "R:2: 'steps' is \"many\": input should be a valid integer"),
        ("steps: true\n", "R:1: 'steps' wants a number, not true"),
        ("train:\n  lr: -1\n", "R:2: 'train.lr' is -1: input should be greater than or equal to 0"),
        ("train: {old: slf}\n", "R:1: 'train.old' is \"slf\": input should be 'self', 'trainer' or 'sampler'"),
        ("rollout: 3\n", "R:1: 'rollout' is 3: expected a section with keys of its own"),
        (
            "reward:\n  functions:\n  - {weight: 2}\n",
            "R:3: 'reward.functions.0' is {\"weight\": 2}: it needs the key 'fn'",
        ),
        ("model: {lora: {target_modules: 3}}\n", "input should be a valid list, or input should be 'all-linear'"),
    ],
)
def test_a_wrong_type_names_line_and_expectation(tmp_path: Path, text: str, expected: str) -> None:
    assert expected in refusal(tmp_path, text)


# -- refusing: combinations --------------------------------------------------------------------------


def test_group_size_one_with_a_group_relative_preset_cfg02(tmp_path: Path) -> None:
    message = refusal(tmp_path, "steps: 1\nrollout:\n  groups_per_step: 4\n  group_size: 1\n")
    assert message.startswith("R:4: rollout.group_size is 1, but group-relative methods need n>=2")
    assert "divisible" not in message and "divide" not in message


def test_group_size_one_is_fine_without_groups() -> None:
    assert load_config({"rollout": {"group_size": 1}, "algorithm": {"preset": "reinforce"}}).rollout.group_size == 1


def test_an_engine_that_sleeps_while_the_trainer_works_does_not_overlap_with_it(tmp_path: Path) -> None:
    text = "rollout: {engine: vllm, vllm: {url: 'http://h', sleep: true}}\nalgorithm: {max_staleness: 1}\n"
    assert refusal(tmp_path, text).startswith("R:1: rollout.vllm.sleep needs an engine that rests")
    load_config({"rollout": {"engine": "vllm", "vllm": {"url": "http://h", "sleep": True}}})


def test_mini_batches_must_divide_the_groups_cfg01(tmp_path: Path) -> None:
    text = "rollout: {groups_per_step: 8, group_size: 8}\ntrain:\n  old: trainer\n  mini_batches: 3\n"
    assert refusal(tmp_path, text) == (
        "R:4: train.mini_batches 3 does not divide rollout.groups_per_step 8.\n"
        "groups_per_step counts prompts: 8 x group_size 8 = 64 completions a step.\n"
        "Use train.mini_batches 1, 2, 4, 8, or rollout.groups_per_step 6 or 9"
    )


def test_one_prompt_a_step_of_many_completions_works_cfg01() -> None:
    """batch 1 with n 8: our batch counts prompts, so it is eight completions, not an empty list."""
    assert load_config({"rollout": {"groups_per_step": 1, "group_size": 8}}).rollout.groups_per_step == 1


@pytest.mark.parametrize(
    ("text", "where", "fragment"),
    [
        ("train:\n  epochs: 2\n", "R:1", "train.old: self allows one update per batch"),
        ("rollout:\n  temperature: 0\n", "R:2", "rollout.temperature 0 is greedy"),
        ("rollout:\n  top_p: 0.9\n", "R:2", "kept set of tokens, which is not stored yet"),
        ("rollout:\n  top_k: 5\n", "R:2", "set top_p 1.0, top_k 0 and min_p 0"),
        ("rollout: {numerics: reproducible}\nmodel: {dtype: bfloat16}\n", "R:1", "model.dtype is bfloat16"),
        ("rollout: {numerics: reproducible}\nmodel: {dtype: auto}\n", "R:1", "model.dtype is auto"),
        ("rollout: {numerics: reproducible, engine: transformers}\n", "R:1", "kept by rollout.engine: embedded only"),
        (
            "rollout: {numerics: reproducible}\nmodel:\n  lora: {dropout: 0.1}\n",
            "R:3",
            "another policy than the one that sampled",
        ),
        ("rollout:\n  engine: tgi\n", "R:2", "'tgi' is not an engine"),
        ("algorithm: {preset: gropo}\n", "R:1", "did you mean grpo?"),
        ("algorithm:\n  kl: {name: k1, coef: 0.1, placement: loss}\n", "R:2", "no restoring gradient"),
        ("algorithm:\n  kl: {coef: 0.1}\n", "R:2", "the preset has none, so coef has no effect"),
        ("algorithm:\n  correction: tis\ntrain: {old: sampler}\n", "R:2", "it does nothing"),
        ("algorithm: {correction: m2po}\ntrain: {lr: 1e-6}\n", "R:2", "set train.old to trainer"),
        ("algorithm:\n  filters: [{name: overlong_penalty, buffer: 999}]\n", "R:2", "longer than rollout.max_tokens"),
        ("data: {eval_size: 0}\neval:\n  every: 5\n", "R:3", "nothing is held out"),
        ("log:\n  wandb_project: mine\n", "R:2", "log.trackers has no wandb"),
        ("train: {min_lr_ratio: 0.1}\n", "R:1", "no effect with schedule: constant"),
        ("model: {name: x/y, tiny: {layers: 2}}\n", "R:1", "tiny has an effect only with name builtin:tiny"),
    ],
)
def test_contradictions_are_refused_where_they_stand(tmp_path: Path, text: str, where: str, fragment: str) -> None:
    message = refusal(tmp_path, text)
    assert message.startswith(where) and fragment in message


def test_an_uninstalled_tracker_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quintet.checks.find_spec", lambda name: None)
    with pytest.raises(QuintetError, match=r"pip install 'quintet\[wandb\]'"):
        load_config({"log": {"trackers": ["wandb"]}})


def test_generation_may_use_what_training_may_not() -> None:
    config = load_config({"rollout": {"temperature": 0, "top_p": 0.9, "group_size": 1}}, training=False)
    assert config.rollout.top_p == 0.9
    with pytest.raises(QuintetError, match="group-relative"):
        check(config)


def test_defaults_contradict_nothing() -> None:
    check(RunConfig())


# -- printing, comparing, folders --------------------------------------------------------------------


@pytest.mark.parametrize("path", RECIPES, ids=lambda p: p.name)
def test_a_saved_tree_loads_to_an_equal_one(tmp_path: Path, path: Path) -> None:
    config = load_config(path, ["seed=7"])
    save(config, tmp_path / "config.yaml")
    again = load_config(tmp_path / "config.yaml")
    assert again.model_dump() == config.model_dump()
    assert digest(again) == digest(config)
    assert diff(again, config) == []
    assert [p.name for p in tmp_path.iterdir()] == ["config.yaml"]


def test_defaults_are_all_printed_and_are_the_defaults() -> None:
    text = defaults_yaml()
    assert RunConfig.model_validate(yaml.safe_load(text)).model_dump() == RunConfig().model_dump()
    printed = {line.split(":")[0].strip("# ") for line in text.splitlines() if ":" in line}
    assert {key.rpartition(".")[2] for key, _ in walk()} <= printed
    assert "max_staleness: 0  # eta: how many versions old" in text


def test_diff_names_every_differing_key_and_digest_tells() -> None:
    a = load_config({"seed": 1})
    b = load_config({"seed": 2, "train": {"lr": 0.5}, "model": {"lora": {"r": 4}}})
    assert diff(a, b) == ["seed", "model.lora", "train.lr"]
    assert digest(a) != digest(b) and len(digest(a)) == 64


def test_run_folder_is_the_name_or_the_given_one() -> None:
    config = load_config({"name": "first"})
    assert run_folder(config) == Path("runs/first")
    assert run_folder(config, "elsewhere") == Path("elsewhere")


def test_an_unwritable_run_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(
        QuintetError, match=r"cannot write the run folder .*: Not a directory; choose another with --out"
    ):
        require_writable(tmp_path / "file" / "run")
    require_writable(tmp_path / "a" / "b")
    assert list((tmp_path / "a" / "b").iterdir()) == []
