"""From a config to the parts of a run: tokenizer, prompts, policy, supervised batches, rollout worker."""

from __future__ import annotations

import os
import random
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from quintet.config import RunConfig
from quintet.data.dataset import build_prompts, describe_skipped, load_rows
from quintet.models.config import ModelConfig
from quintet.models.decoder.numerics import Kernels
from quintet.models.device import resolve_device, resolve_dtype
from quintet.models.loader import load_hf_config, load_model, load_tokenizer
from quintet.models.lora import apply_lora, merged_state_dict
from quintet.models.tokenizer import PromptEncoder, Tokenizer
from quintet.protocols import RolloutWorker
from quintet.rollout.agent_loop import AgentLoopWorker
from quintet.rollout.environments import AGENT, VERIFIERS, EnvironmentFactory, check_environment, is_agent, load
from quintet.rollout.factory import check_device, check_rollout_config, make_rollout_worker
from quintet.train.exact import trainer_kernels
from quintet.train.offline import Example, sft, warm_start_config
from quintet.types import Prompt, QuintetError, SamplingParams
from quintet.weights.file import FileStore
from quintet.weights.memory import MemoryStore


@dataclass
class Data:
    """The run's prompts, and what was said of rows left out."""

    train: list[Prompt]
    held_out: list[Prompt]
    notes: list[str]


@dataclass
class Base:
    """What is known of the model before its weights load."""

    tokenizer: Tokenizer
    hf_config: PretrainedConfig
    device: torch.device
    dtype: torch.dtype

    @classmethod
    def of(cls, config: RunConfig) -> Base:
        check_rollout_config(config.rollout)
        check_environment(config.environment)
        use_threads(config)
        device = resolve_device(config.model.device)
        check_device(config.rollout, device.type)
        hf_config, tokenizer = load_hf_config(config.model), load_tokenizer(config.model)
        if is_agent(config.environment) and not PromptEncoder(tokenizer, config.model).uses_chat_template:
            raise QuintetError(
                f"environment.kind: an agent speaks in chat messages, but {config.model.name} uses no chat template.\n"
                "Use an instruct model, or environment.kind: tools with args: {format: tags}."
            )
        return cls(tokenizer, hf_config, device, resolve_dtype(config.model.dtype, device))


def use_threads(config: RunConfig) -> None:
    """`cluster.threads`, for the calling thread: OpenMP keeps the number per thread."""
    if config.cluster.threads is not None:
        torch.set_num_threads(config.cluster.threads)


def load_data(config: RunConfig, base: Base) -> Data:
    """Raises QuintetError for data that cannot be used, see `data/dataset.py`."""
    encode = PromptEncoder(base.tokenizer, config.model)
    room = base.hf_config.get_text_config().max_position_embeddings - config.rollout.max_tokens
    notes: list[str] = []
    sides: list[list[Prompt]] = []
    for rows in load_rows(config.data, config.seed):
        prompts, skipped = build_prompts(rows, config.data, encode, prompt_limit=room)
        notes += describe_skipped(skipped)
        sides.append(prompts)
    return Data(sides[0], sides[1][: config.eval.max_prompts], notes)


def load_policy(config: ModelConfig, *, start: Path | None = None) -> PreTrainedModel:
    """The starting policy with float32 weights, without adapters; `start` is a folder that replaces `config.name`."""
    if start is not None:
        config = config.model_copy(update={"name": str(start)})
    return load_model(config, seed=config.tiny.init_seed)


def with_adapters(model: PreTrainedModel, config: ModelConfig, seed: int) -> nn.Module:
    return model if config.lora is None else apply_lora(model, config.lora, seed)


def rollout_worker(config: RunConfig, base: Base, model: nn.Module, version: int) -> RolloutWorker:
    """The configured engine, loaded with the model's weights as they are now, in the configured environment."""
    return in_environment(config, base, engine_worker(config, base, model, version))


def engine_worker(config: RunConfig, base: Base, model: nn.Module, version: int) -> RolloutWorker:
    """The engine alone."""
    return make_rollout_worker(
        config.rollout,
        hf_config=base.hf_config,
        weights=merged_state_dict(model),
        eos_ids=base.tokenizer.eos_ids,
        decode=base.tokenizer.decode,
        device=base.device,
        dtype=base.dtype,
        version=version,
        trust_remote_code=config.model.trust_remote_code,
    )


def shared_kernels(config: RunConfig, policy: nn.Module) -> Kernels | None:
    """The arithmetic of the reproducible engine, for a train worker whose log-probabilities are to be the sampler's."""
    reproducible = config.rollout.numerics == "reproducible"
    return trainer_kernels(policy, config.rollout.page_size) if reproducible else None


def in_environment(config: RunConfig, base: Base, engine: RolloutWorker) -> RolloutWorker:
    """`engine` playing the episodes of `environment`; `engine` itself where there is none."""
    environment = config.environment
    if environment.kind is None:
        return engine
    encoder = PromptEncoder(base.tokenizer, config.model)
    context = base.hf_config.get_text_config().max_position_embeddings
    if is_agent(environment):
        return _agents(config, base, engine, encoder, context)
    factory = EnvironmentFactory(environment)
    return AgentLoopWorker(
        engine,
        factory,
        tokenizer=base.tokenizer,
        encoder=encoder,
        config=environment,
        context=context,
        on_close=factory.close,
    )


def _agents(
    config: RunConfig, base: Base, engine: RolloutWorker, encoder: PromptEncoder, context: int
) -> RolloutWorker:
    from quintet.rollout.agents import AgentRolloutWorker  # needs the extra `serve`
    from quintet.rollout.verifiers_agent import VerifiersAgent

    environment, kind = config.environment, config.environment.kind or ""
    foreign = None
    if kind.startswith(VERIFIERS):
        foreign = VerifiersAgent(kind.removeprefix(VERIFIERS), environment.args)
    return AgentRolloutWorker(
        engine,  # type: ignore[arg-type]
        foreign.run if foreign else load(kind.removeprefix(AGENT), "environment.kind"),
        tokenizer=base.tokenizer,
        encoder=encoder,
        config=environment,
        context=context,
        template_kwargs=config.model.chat_template_kwargs,
        on_start=foreign.start if foreign else None,
        on_close=foreign.close if foreign else None,
    )


def before_training(config: RunConfig, rollout: RolloutWorker) -> Callable[[], Awaitable[None]] | None:
    """What makes room for the trainer on a GPU that it shares with the engine."""
    if config.rollout.engine != "vllm" or not config.rollout.vllm.sleep:
        return None
    from quintet.rollout.vllm import VllmRolloutWorker

    engine = rollout if config.environment.kind is None else rollout.worker  # type: ignore[attr-defined]
    assert isinstance(engine, VllmRolloutWorker)
    return engine.sleep


def weight_store(config: RunConfig) -> MemoryStore | FileStore:
    """Where the trainer publishes: in the folder that rollout servers read, or in memory."""
    if config.rollout.weights_dir is None:
        return MemoryStore()
    return FileStore(os.path.abspath(config.rollout.weights_dir))


def sampling_params(config: RunConfig) -> SamplingParams:
    rollout = config.rollout
    return SamplingParams(
        n=rollout.group_size,
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        min_p=rollout.min_p,
        max_tokens=rollout.max_tokens,
        stop=tuple(rollout.stop),
        stop_token_ids=tuple(rollout.stop_token_ids),
        seed=config.seed,
    )


def warm_start(
    config: RunConfig,
    base: Base,
    model: nn.Module,
    prompts: list[Prompt],
    progress: Callable[[int, dict[str, float]], None],
) -> dict[str, float]:
    """Supervised steps on the reference answers, in place. Blocks; meant for a thread."""
    warm = config.warm_start
    use_threads(config)
    learning = _UntilLoss(warm.until_loss, progress)
    return sft(
        model,
        learning.batches(supervised_batches(prompts, base.tokenizer, warm.batch_size, config.seed)),
        config=warm_start_config(config.train, warm),
        total_steps=warm.steps,
        dtype=base.dtype,
        progress=learning.note,
    )


class _UntilLoss:
    """Ends a stream of batches once the mean loss of the last few is at most `bound` (None: never)."""

    def __init__(self, bound: float | None, progress: Callable[[int, dict[str, float]], None]) -> None:
        self._bound = bound
        self._progress = progress
        self._losses: deque[float] = deque(maxlen=5)

    def note(self, step: int, values: dict[str, float]) -> None:
        self._losses.append(values["sft/loss"])
        self._progress(step, values)

    def batches(self, batches: Iterable[list[Example]]) -> Iterator[list[Example]]:
        for batch in batches:
            if self._bound is not None and len(self._losses) == 5 and fmean(self._losses) <= self._bound:
                return
            yield batch


def supervised_batches(
    prompts: list[Prompt], tokenizer: Tokenizer, batch_size: int, seed: int
) -> Iterator[list[Example]]:
    """Batches of (prompt ids, answer ids with the end id), epoch after epoch in an order keyed by `seed`.

    A prompt with a `demonstration` (texts of the policy and of its environment by turns) gives one example per turn of
    the policy; what came before is its prompt, so that the environment's words are not learned. Raises QuintetError
    when a prompt has no reference answer.
    """
    end = tokenizer.eos_ids[0]
    examples: list[Example] = []
    for prompt in prompts:
        if "demonstration" in prompt.metadata:
            examples += _demonstrated(prompt, tokenizer)
            continue
        if prompt.answer is None:
            raise QuintetError(f"warm_start: the prompt {prompt.id} has no reference answer (data.columns.answer)")
        examples.append((prompt.token_ids, [*tokenizer.encode(prompt.answer), end]))
    return epochs_of(examples, batch_size, seed)


def _demonstrated(prompt: Prompt, tokenizer: Tokenizer) -> list[Example]:
    turns = [tokenizer.encode(text) for text in prompt.metadata["demonstration"]]
    turns[-1].append(tokenizer.eos_ids[0])
    before = [[*prompt.token_ids, *(i for turn in turns[:n] for i in turn)] for n in range(0, len(turns), 2)]
    return list(zip(before, turns[::2], strict=True))


def epochs_of(examples: list[Example], batch_size: int, seed: int) -> Iterator[list[Example]]:
    """Batches without end, epoch after epoch in an order keyed by `seed`."""
    rng = random.Random(f"warm-start/{seed}")
    queue: list[Example] = []
    while True:
        while len(queue) < batch_size:
            epoch = list(examples)
            rng.shuffle(epoch)
            queue += epoch
        yield queue[:batch_size]
        queue = queue[batch_size:]
