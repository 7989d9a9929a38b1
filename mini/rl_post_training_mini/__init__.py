"""RL post-training of a language model, whole and small: run it, single-step it, then read the big one.

Standard library only. The model is a bigram table and the gradient is exact, so everything really learns.
Start with `python -m rl_post_training_mini.demo`; then read in the order of this table.

    here              stands for                                   grown-up version in the main package
    model             70B Transformer; reward model                quintet/models/
    algorithms        the core algorithms of verl and others       quintet/algorithms/*
    rollout           vLLM, SGLang                                 quintet/rollout/engine/
    reward            answer checkers, unit tests, RM server       quintet/reward/
    buffer            experience buffer and its journal            quintet/buffer/buffer.py
    trainer           Megatron-LM, FSDP                            quintet/train/worker.py
    controller        verl's RayPPOTrainer                         quintet/controller/controller.py
    clock             wall clock and distributed trace             quintet/clock.py
    paging            PagedAttention                               quintet/rollout/engine/
    async_rollout     asynchronous RL                              quintet/controller/controller.py
    preference        reward-model training                        quintet/algorithms/*
    agent             tools and environments                       quintet/rollout/
"""

from .algorithms import compute_grpo_advantage, ppo_clip_loss
from .buffer import Experience, ExperienceBuffer
from .clock import Clock, FakeClock, RealClock
from .controller import Controller
from .model import TinyPolicy, TinyReward
from .reward import RewardService
from .rollout import Rollout, RolloutWorker, StaleRolloutError
from .trainer import TrainConfig, TrainWorker

__version__ = "0.1.0"

__all__ = [
    "Clock",
    "Controller",
    "Experience",
    "ExperienceBuffer",
    "FakeClock",
    "RealClock",
    "RewardService",
    "Rollout",
    "RolloutWorker",
    "StaleRolloutError",
    "TinyPolicy",
    "TinyReward",
    "TrainConfig",
    "TrainWorker",
    "compute_grpo_advantage",
    "ppo_clip_loss",
]
