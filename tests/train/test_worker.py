"""The train worker through its protocol: optimizer steps, the old policy, metrics, reference, LoRA, publication."""

from __future__ import annotations

import asyncio
import logging
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from quintet.algorithms.config import AlgorithmConfig
from quintet.algorithms.presets import resolve
from quintet.models.config import LoraConfig, ModelConfig
from quintet.models.loader import load_model, load_tokenizer
from quintet.models.lora import apply_lora
from quintet.protocols import TrainWorker
from quintet.train.batching import token_sample
from quintet.train.config import TrainConfig
from quintet.train.worker import LocalTrainWorker
from quintet.types import Experience, ExperienceBatch, QuintetError, StepAbandoned, TrainMetrics, VersionRun
from quintet.weights import open_weights
from quintet.weights.memory import MemoryStore
from tests.train.helpers import exact_logprobs, experiences, make_worker, plain_logprobs, tiny_model

GROUPS = [(6, [4, 9, 2]), (5, [3, 1, 7]), (4, [8, 2, 6]), (7, [5, 5, 5])]
KL = {"preset": "grpo", "kl": {"name": "k3", "coef": 0.1}}


def batch_of(samples: list[Experience]) -> ExperienceBatch:
    return ExperienceBatch(step=0, version=3, experiences=samples)


def update(worker: LocalTrainWorker, samples: list[Experience], prepare: bool = False) -> TrainMetrics:
    async def main() -> TrainMetrics:
        batch = batch_of(samples)
        if prepare:
            batch = await worker.prepare(batch)
        return await worker.update(batch)

    return asyncio.run(main())


def sampled_by(model: PreTrainedModel, samples: list[Experience], temperature: float = 0.7) -> list[Experience]:
    """The samples with the log-probabilities that the model itself gives them."""
    with torch.no_grad():
        for e in samples:
            e.logprobs = plain_logprobs(model, token_sample(e), temperature).tolist()
    return samples


def weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def test_it_is_a_train_worker() -> None:
    worker: TrainWorker = make_worker(tiny_model())
    assert isinstance(worker, LocalTrainWorker)


@pytest.mark.parametrize(("epochs", "mini_batches"), [(1, 2), (1, 4), (2, 1), (3, 2)])
def test_the_optimizer_steps_once_per_mini_batch(epochs: int, mini_batches: int) -> None:
    worker = make_worker(
        tiny_model(),
        old="trainer",
        epochs=epochs,
        mini_batches=mini_batches,
        micro_batch_tokens=10,
        lr=1e-3,
        schedule="linear",
    )
    metrics = update(worker, experiences(1, GROUPS), prepare=True)
    assert metrics.optimizer_steps == epochs * mini_batches
    # linear over total_steps 10 x epochs x mini_batches; the mean of the rates that were used
    n = epochs * mini_batches
    assert metrics.values["actor/lr"] == pytest.approx(sum(1e-3 * (1 - s / (10 * n)) for s in range(n)) / n)


def test_two_mini_batches_equal_two_updates_of_their_halves() -> None:
    samples = experiences(1, GROUPS)
    whole, halves = tiny_model(), tiny_model()
    update(make_worker(whole, old="trainer", mini_batches=2, lr=1e-2), samples)
    worker = make_worker(halves, old="trainer", lr=1e-2)
    update(worker, samples[:6])
    update(worker, samples[6:])
    found, expected = weights(whole), weights(halves)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_self_means_ratio_exactly_one() -> None:
    """ALG20: the ratio of an unchanged policy is 1. CFG07: the loss is about 0, the gradient is not."""
    metrics = update(make_worker(tiny_model()), experiences(1, GROUPS)).values
    assert metrics["actor/ratio_mean"] == metrics["actor/ratio_max"] == 1.0
    assert metrics["actor/clip_frac"] == 0.0 and metrics["kl/approx"] == 0.0
    assert metrics["actor/grad_norm"] > 0.0


def worker_with(config: TrainConfig) -> LocalTrainWorker:
    return LocalTrainWorker(
        tiny_model(),
        tokenizer=load_tokenizer(ModelConfig()),
        config=config,
        algorithm=resolve(AlgorithmConfig()),
        temperature=1.0,
        total_steps=1,
        dtype=torch.float32,
        store=MemoryStore(),
    )


def test_self_allows_one_update_per_batch_only() -> None:
    config = TrainConfig(old="trainer", epochs=2).model_copy(update={"old": "self"})
    with pytest.raises(QuintetError, match="use old: trainer"):
        worker_with(config)


def test_greedy_sampling_cannot_be_trained() -> None:
    with pytest.raises(QuintetError, match=r"rollout\.temperature: 0 cannot be trained"):
        make_worker(tiny_model(), temperature=0.0)


def test_a_correction_between_two_policies_needs_the_trainers() -> None:
    with pytest.raises(QuintetError, match=r"set train\.old: trainer"):
        make_worker(tiny_model(), {"preset": "grpo", "correction": "m2po"})


def test_the_trainers_old_policy_is_recomputed_before_the_update_and_only_then() -> None:
    model = tiny_model()
    expected = [exact_logprobs(model, token_sample(e), 0.7) for e in experiences(1, GROUPS)]
    samples = experiences(1, GROUPS)
    metrics = update(make_worker(model, old="trainer", mini_batches=2, lr=0.05), samples, prepare=True).values
    for e, logprobs in zip(samples, expected, strict=True):
        torch.testing.assert_close(torch.tensor(e.proximal_logprobs).double(), logprobs, rtol=0, atol=1e-5)
    assert abs(metrics["actor/ratio_mean"] - 1.0) > 1e-4, "the second mini-batch meets a changed policy"
    untouched = experiences(1, GROUPS)
    for e in untouched:
        e.proximal_logprobs = e.ref_logprobs = None
    asyncio.run(make_worker(tiny_model(), old="sampler").prepare(batch_of(untouched)))
    assert all(e.proximal_logprobs is None and e.ref_logprobs is None for e in untouched)


def test_the_sampler_as_old_policy() -> None:
    model, samples = tiny_model(), experiences(1, GROUPS)
    ratios = [
        torch.exp(plain_logprobs(model, token_sample(e), 0.7) - torch.tensor(e.logprobs))[torch.tensor(e.loss_mask) > 0]
        for e in samples
    ]
    metrics = update(make_worker(model, old="sampler"), samples).values
    assert metrics["actor/ratio_mean"] == pytest.approx(float(torch.cat(ratios).mean()), rel=1e-4)


def test_the_mismatch_is_engine_against_trainer_on_tokens_of_the_current_version() -> None:
    model = tiny_model()
    samples = sampled_by(model, experiences(1, [(6, [4, 9, 2]), (5, [3, 1, 7])]))
    for e in samples:
        e.loss_mask = [1] * len(e.response_ids)
    sampled_by(model, samples)
    metrics = update(make_worker(model), samples).values
    assert metrics["mismatch/max_abs_logprob"] < 1e-5
    samples[0].logprobs[1] += 0.5
    samples[1].logprobs[0] += 9.0  # sampled by an older version: not the engine's error
    samples[1].weight_versions = [VersionRun(2, 1), VersionRun(3, len(samples[1].response_ids) - 1)]
    fresh = tiny_model()
    metrics = update(make_worker(fresh), samples).values
    tokens = sum(len(e.response_ids) for e in samples) - 1
    assert metrics["mismatch/max_abs_logprob"] == pytest.approx(0.5, abs=1e-4)
    assert metrics["mismatch/mean_abs_logprob"] == pytest.approx(0.5 / tokens, abs=1e-5)


def test_the_mismatch_is_measured_before_the_first_optimizer_step() -> None:
    model = tiny_model()
    samples = sampled_by(model, experiences(1, GROUPS))
    for old in ("sampler", "trainer"):
        worker = make_worker(tiny_model(), old=old, mini_batches=4, epochs=2, lr=0.1)
        metrics = update(worker, samples, prepare=True).values
        assert metrics["mismatch/max_abs_logprob"] < 1e-5


def test_the_reported_loss_and_counts_do_not_depend_on_micro_batches() -> None:
    runs = [
        update(make_worker(tiny_model(), KL, micro_batch_tokens=n), experiences(1, GROUPS)).values for n in (1, 9999)
    ]
    for name in ("actor/loss", "actor/entropy", "kl/ref", "actor/grad_norm", "actor/tokens"):
        assert runs[0][name] == pytest.approx(runs[1][name], rel=1e-4), name
    assert {"time/forward_s", "time/backward_s", "time/optimizer_s", "actor/tokens_per_s"} <= runs[0].keys()


def test_untrainable_samples_change_neither_gradient_nor_counts() -> None:
    clean, dirty = experiences(1, GROUPS), experiences(1, GROUPS)
    unscored, masked = experiences(9, [(3, [5, 6])])
    unscored.reward, unscored.advantages = None, None
    masked.loss_mask = [0] * 6
    models = [tiny_model(), tiny_model()]
    update(make_worker(models[0], lr=1e-2), clean)
    metrics = update(make_worker(models[1], lr=1e-2), [unscored, *dirty, masked], prepare=True).values
    assert metrics["actor/untrainable_samples"] == 2 and metrics["actor/samples"] == 12
    found, expected = weights(models[1]), weights(models[0])
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_batch_without_a_trainable_sample_takes_no_step_and_says_so() -> None:
    model = tiny_model()
    before, samples = weights(model), experiences(1, GROUPS)
    for e in samples:
        e.reward = None
    metrics = update(make_worker(model, lr=1.0), samples, prepare=True)
    assert metrics.optimizer_steps == 0 and metrics.values["actor/no_trainable_sample"] == 1.0
    assert all(torch.equal(p, before[name]) for name, p in weights(model).items())


def test_a_non_finite_gradient_is_counted_and_leaves_the_weights(caplog: pytest.LogCaptureFixture) -> None:
    model, samples = tiny_model(), experiences(1, GROUPS)
    samples[0].advantages = [float("nan")] * len(samples[0].response_ids)
    before = weights(model)
    with caplog.at_level(logging.WARNING):
        metrics = update(make_worker(model, lr=1.0), samples)
    assert metrics.optimizer_steps == 0 and metrics.values["actor/skipped_nonfinite"] == 1.0
    assert "skipped" in caplog.text
    assert all(torch.equal(p, before[name]) for name, p in weights(model).items())


def test_an_update_that_raised_leaves_no_gradient_behind() -> None:
    models, samples = [tiny_model(), tiny_model()], experiences(1, GROUPS)
    broken, good = (make_worker(m, lr=1e-2, micro_batch_tokens=20) for m in models)
    advantages, samples[-1].advantages = samples[-1].advantages, None
    with pytest.raises(ValueError, match="no advantages"):
        update(broken, samples)
    samples[-1].advantages = advantages
    update(broken, samples)
    update(good, samples)
    found, expected = weights(models[0]), weights(models[1])
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_rate_zero_leaves_every_bit() -> None:
    model = tiny_model()
    before = weights(model)
    metrics = update(make_worker(model, KL, lr=0.0), experiences(1, GROUPS))
    assert metrics.optimizer_steps == 1
    assert all(torch.equal(p, before[name]) for name, p in weights(model).items())


def test_the_reference_is_the_model_as_it_was_at_the_start() -> None:
    model = tiny_model()
    expected = [plain_logprobs(model, token_sample(e), 0.7) for e in experiences(1, GROUPS)]
    worker, samples = make_worker(model, KL, lr=0.05), experiences(1, GROUPS)
    first = update(worker, samples, prepare=True).values
    assert first["kl/ref"] == pytest.approx(0.0, abs=1e-6)
    again = experiences(1, GROUPS)
    later = update(worker, again, prepare=True).values
    assert later["kl/ref"] > 1e-3
    for e, logprobs in zip(again, expected, strict=True):
        torch.testing.assert_close(torch.tensor(e.ref_logprobs), logprobs, rtol=0, atol=1e-5)


def test_another_model_can_be_the_reference() -> None:
    other = tiny_model(seed=4)
    expected = [plain_logprobs(other, token_sample(e), 0.7) for e in experiences(1, GROUPS)]
    worker, samples = make_worker(tiny_model(), KL, ref_model=other), experiences(1, GROUPS)
    asyncio.run(worker.prepare(batch_of(samples)))
    for e, logprobs in zip(samples, expected, strict=True):
        torch.testing.assert_close(torch.tensor(e.ref_logprobs), logprobs, rtol=0, atol=1e-5)


def adapted_model() -> Any:
    """LoRA with adapters that already differ from the base."""
    model = apply_lora(tiny_model(), LoraConfig(r=4, alpha=8.0), seed=0)
    torch.manual_seed(1)
    for name, p in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(p, std=0.1)
    return model


def test_under_lora_the_reference_is_the_base_with_adapters_off() -> None:
    base = [plain_logprobs(tiny_model(), token_sample(e), 0.7).detach() for e in experiences(1, GROUPS)]
    worker, samples = make_worker(adapted_model(), KL, old="trainer"), experiences(1, GROUPS)
    asyncio.run(worker.prepare(batch_of(samples)))
    for e, logprobs in zip(samples, base, strict=True):
        torch.testing.assert_close(torch.tensor(e.ref_logprobs), logprobs, rtol=0, atol=1e-5)
    gap = max(abs(a - b) for e in samples for a, b in zip(e.ref_logprobs or [], e.proximal_logprobs or [], strict=True))
    assert gap > 0.05, "the policy itself has its adapters on"


def test_lora_trains_only_adapters_and_publishes_them_merged() -> None:
    """WSY01, WSY03: after every update the published plain weights are the policy, tied head included."""
    model = apply_lora(tiny_model(tie_word_embeddings=True), LoraConfig(r=4), seed=0)
    worker, before, samples = make_worker(model, old="trainer", lr=0.05), weights(model), experiences(1, GROUPS)
    for version in (4, 5):
        update(worker, samples)
        published = open_weights(asyncio.run(worker.publish(version)))
        plain = tiny_model(seed=99, tie_word_embeddings=True)
        missing, unexpected = plain.load_state_dict(dict(published), strict=False)
        plain.tie_weights()
        assert not unexpected and set(missing) <= {"lm_head.weight"}
        with torch.no_grad():
            asyncio.run(worker.prepare(batch_of(samples)))  # the policy's own log-probabilities
            for e in samples:
                row = plain_logprobs(plain, token_sample(e), 0.7)
                torch.testing.assert_close(torch.tensor(e.proximal_logprobs), row, rtol=0, atol=5e-5)
    changed = {name for name, p in weights(model).items() if not torch.equal(p, before[name])}
    assert changed == {name for name in before if "lora_" in name}


def test_export_is_a_folder_that_transformers_loads(tmp_path: Path) -> None:
    model = load_model(ModelConfig())
    worker = make_worker(model)
    asyncio.run(worker.export(str(tmp_path / "final")))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "final")
    expected = weights(model)
    assert all(torch.equal(p, expected[name]) for name, p in loaded.named_parameters())
    asyncio.run(worker.close())
    ids = torch.arange(1, 7)[None]
    torch.testing.assert_close(loaded(input_ids=ids).logits, model(input_ids=ids).logits, rtol=0, atol=1e-6)


def test_the_event_loop_is_free_while_the_worker_works(monkeypatch: pytest.MonkeyPatch) -> None:
    released = threading.Event()
    monkeypatch.setattr("quintet.train.update.PolicyUpdate.run", lambda self, batch: released.wait(20))
    worker = make_worker(tiny_model())

    async def main() -> bool:
        running = asyncio.create_task(worker.update(batch_of([])))
        await asyncio.sleep(0)
        released.set()  # never reached in time if update held the loop
        return bool(await running)

    assert asyncio.run(main())


def test_an_update_is_given_up_without_a_trace_until_its_first_optimizer_step() -> None:
    """Dropout draws from the global generator: an update that is given up gives its draws back."""

    def adapted() -> torch.nn.Module:
        return apply_lora(tiny_model(), LoraConfig(r=4, alpha=8, dropout=0.5), seed=0)

    answers: list[bool] = []  # to `stopping`, in order; False from then on
    options: dict[str, Any] = {"old": "sampler", "mini_batches": 4, "micro_batch_tokens": 16, "lr": 1e-3}
    samples, straight, stopped = experiences(1, GROUPS), adapted(), adapted()
    update(make_worker(straight, **options), samples)
    worker = make_worker(stopped, stopping=lambda: answers.pop(0) if answers else False, **options)
    before, drawn = weights(stopped), torch.get_rng_state()
    for answers in ([True], [False, True], [False, False, True]):
        with pytest.raises(StepAbandoned):
            update(worker, samples)
        assert answers == [] and torch.equal(torch.get_rng_state(), drawn)
        assert all(torch.equal(before[name], w) for name, w in weights(stopped).items())
    answers = [False, False, False, True, True, True]  # three: before the update and after two micro-batches
    assert update(worker, samples).optimizer_steps == 4
    assert answers == [True, True, True], "a step that has begun to change the weights is finished"
    assert all(torch.equal(w, weights(straight)[name]) for name, w in weights(stopped).items())
