"""Token log-probabilities of a causal language model on its own samples, for any Hugging Face architecture.

The decoder runs on a packed row (or on padded rows where its attention cannot be packed), the output
embedding only on the rows that a loss token needs, chunk by chunk. Which form a model gets is decided
once: from its config, then verified on a few tokens against the model's own plain forward.

Left out: attention-weight dropout and the pretrained model's other dropouts. The policy that is trained
is the one that sampled; only LoRA's own dropout acts in training mode.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from quintet.models.decoder.numerics import Kernels
from quintet.models.lora import base_model
from quintet.train import attention, fused
from quintet.train.config import KernelChoice
from quintet.train.exact import ExactDecoder
from quintet.train.head import (
    Head,
    HeadConfig,
    HeadMemory,
    LogitTransform,
    distribution_kl,
    logprobs_from_logits,
    token_logprobs,
)
from quintet.train.native.library import choose_library
from quintet.train.packing import LossRows, TokenSample, pack, pad
from quintet.train.workspace import Gradients, WorkspacePool
from quintet.types import QuintetError

log = logging.getLogger(__name__)

# Largest difference of a float32 log-probability between two correct ways of computing it.
PROBE_TOLERANCE = 1e-4


class Layout(StrEnum):
    """How samples are laid out for the decoder."""

    SHARED = "shared"  # packed, a prompt once for all samples that have it
    PACKED = "packed"  # packed, every sample whole
    PADDED = "padded"  # one right-padded row per sample


@dataclass(frozen=True)
class TokenLogprobs:
    """float32 [B, T] each, T the longest response; 0 where the loss mask is 0."""

    logprobs_BT: Tensor
    entropy_BT: Tensor
    rows: int  # tokens that went through the decoder, padding included
    kl_BT: Tensor | None = None  # of whole distributions, where a reference was given


@dataclass(frozen=True)
class ReferenceRows:
    """What the reference says of the same N loss tokens: hidden states and the head over them."""

    hidden_ND: Tensor
    head: Head
    direction: str


class PolicyForward:
    """Computes log-probabilities of `model`'s policy at a temperature.

    The model's attention is replaced while this object is in use; `release()` gives it back. `dtype`
    bfloat16 means autocast over the float32 weights. With `kernels`, those of the reproducible engine, the model is
    left alone and the log-probabilities are the engine's, bit for bit. `fused_kernels`: what a
    written-out decoder does between matrix products, in C++ or in torch. Raises QuintetError for `native` where it
    cannot run.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        temperature: float = 1.0,
        dtype: torch.dtype = torch.float32,
        shared_prompt: bool = True,
        head_chunk_tokens: int = 1024,
        activation_checkpointing: bool = False,
        kernels: Kernels | None = None,
        fused_kernels: KernelChoice = "auto",
    ) -> None:
        self.model = model
        self._fused_kernels = fused_kernels
        self._base = base_model(model)
        self._dtype = dtype
        self._temperature = temperature
        self.device = next(model.parameters()).device
        transform = LogitTransform.from_config(self._base.config)
        self._head_config = HeadConfig(temperature, head_chunk_tokens, dtype, transform, kernels)
        self._kernel: attention.Kernel | None = None
        self._head: nn.Linear | None = None
        self._exact: ExactDecoder | None = None
        self._recomputed: list[nn.Module] = []
        self.layout = Layout.PADDED
        self._fused: fused.FusedDecoder | None = None
        self._memory: HeadMemory | None = None
        wanted = Layout.SHARED if shared_prompt else Layout.PACKED
        if kernels is not None:
            self._use(ExactDecoder(model, kernels, recompute=activation_checkpointing), wanted)
            return
        self._choose(wanted, activation_checkpointing)
        if activation_checkpointing and self._fused is None:
            self._recomputed = _recompute_layers(self._base)

    def __call__(self, samples: Sequence[TokenSample], reference: ReferenceRows | None = None) -> TokenLogprobs:
        """Log-probabilities and entropies at the loss tokens of B samples, and with `reference` the KL of the whole
        distributions there. Differentiable under grad mode."""
        enabled = self._dtype == torch.bfloat16
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=enabled):
            if reference is None:
                logprobs_N, entropy_N, loss, rows = self._loss_tokens(samples, self.layout, self._head_config)
                return TokenLogprobs(loss.scatter(logprobs_N), loss.scatter(entropy_N), rows)
            hidden_ND, loss, rows = self.hidden_states(samples)
            head, config = self.plain_head, self._head_config
            logprobs_N, entropy_N = token_logprobs(hidden_ND, head, loss.target_N, config, self._memory)
            kl_N = distribution_kl(
                hidden_ND, head, reference.hidden_ND, reference.head, config, direction=reference.direction
            )
        return TokenLogprobs(loss.scatter(logprobs_N), loss.scatter(entropy_N), rows, loss.scatter(kl_N))

    @property
    def plain_head(self) -> Head:
        """Raises QuintetError for a model whose logits are no linear map of its hidden states."""
        if self._exact is not None:
            return self._exact.head
        if self._head is None:
            raise QuintetError(
                f"algorithm.kl full needs a model with a plain output head; {type(self._base).__name__} has none\n"
                "Use k2 or k3, which need only the sampled token's log-probability"
            )
        return self._head

    def hidden_states(self, samples: Sequence[TokenSample]) -> tuple[Tensor, LossRows, int]:
        """The decoder's last hidden states [N, D] of the rows that predict the N loss tokens, where these are, and
        the tokens that went through the decoder: for a head that is not the language model's."""
        enabled = self._dtype == torch.bfloat16
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=enabled):
            return self._decoded(samples, self.layout, self._dtype)

    def _decoded(
        self, samples: Sequence[TokenSample], layout: Layout, dtype: torch.dtype
    ) -> tuple[Tensor, LossRows, int]:
        """As `hidden_states`, within the caller's autocast."""
        if layout is not Layout.PADDED and (self._exact is not None or self._fused is not None):
            row = pack(samples, shared_prompt=layout is Layout.SHARED, device=self.device)
            if self._exact is not None:
                hidden_ND = self._exact.hidden(row, row.loss.source_N)
            else:
                assert self._fused is not None
                hidden_ND = self._fused(row, dtype)
            return hidden_ND, row.loss, row.input_ids_1T.numel()
        inputs, loss = self._laid_out(samples, layout)
        hidden = self._base.get_decoder()(use_cache=False, **inputs).last_hidden_state.flatten(0, 1)
        return hidden[loss.source_N], loss, inputs["input_ids"].numel()

    def training_mode(self) -> None:
        """LoRA's dropout on, every other dropout off."""
        self.model.eval()
        for name, module in self.model.named_modules():
            if "lora_dropout" in name:
                module.training = True

    def release(self) -> None:
        """Give the model its own attention back. The object cannot be used afterwards."""
        if self._kernel is not None:
            attention.uninstall(self._base, self._kernel)
            self._kernel = None
        for layer in self._recomputed:
            del layer.forward
        self._recomputed = []

    def _loss_tokens(
        self, samples: Sequence[TokenSample], layout: Layout, head_config: HeadConfig
    ) -> tuple[Tensor, Tensor, LossRows, int]:
        if self._head is None and self._exact is None:
            inputs, loss = self._laid_out(samples, layout)
            logits = self._base(use_cache=False, **inputs).logits.flatten(0, 1)
            values = logprobs_from_logits(logits[loss.source_N], loss.target_N, head_config.temperature)
            return *values, loss, inputs["input_ids"].numel()
        hidden_ND, loss, rows = self._decoded(samples, layout, head_config.dtype)
        return *token_logprobs(hidden_ND, self.plain_head, loss.target_N, head_config, self._memory), loss, rows

    def _laid_out(self, samples: Sequence[TokenSample], layout: Layout) -> tuple[dict[str, Any], LossRows]:
        """Keyword arguments of the decoder, and where the loss tokens are."""
        if layout is Layout.PADDED:
            padded = pad(samples, device=self.device)
            masks = {"attention_mask": padded.attention_mask_BL, "position_ids": padded.position_ids_BL}
            return {"input_ids": padded.input_ids_BL, **masks}, padded.loss
        row = pack(samples, shared_prompt=layout is Layout.SHARED, device=self.device)
        assert self._kernel is not None
        plan = attention.AttentionPlan(row, self._kernel)
        return {"input_ids": row.input_ids_1T, "position_ids": row.position_ids_1T, "attention_plan": plan}, row.loss

    def _use(self, decoder: ExactDecoder, wanted: Layout) -> None:
        """Raises QuintetError for a model whose own forward says something else."""
        was_training = [module for module in self.model.modules() if module.training]
        self.model.eval()
        probe = _probe_samples(self._base.config.get_text_config().vocab_size)
        expected_N = self._probe(probe, Layout.PADDED)
        self._exact, self.layout = decoder, wanted
        if not _agree(self._probe(probe, wanted), expected_N):
            raise QuintetError(
                f"rollout.numerics: reproducible computes another model than {type(self._base).__name__} does.\n"
                "Set rollout.numerics: fast."
            )
        for module in was_training:
            module.training = True

    def _choose(self, wanted: Layout, activation_checkpointing: bool) -> None:
        """Set layout and head: the model's config proposes, a comparison with its plain forward decides."""
        was_training = [module for module in self.model.modules() if module.training]
        self.model.eval()
        probe = _probe_samples(self._base.config.get_text_config().vocab_size)
        expected_N = self._probe(probe, Layout.PADDED)
        output = self._base.get_output_embeddings()
        if type(output) is nn.Linear:
            self._head = output
            if not _agree(self._probe(probe, Layout.PADDED), expected_N):
                self._head = None
        if self._head is None:
            log.warning("%s: its logits are no plain head; full logits are held", type(self._base).__name__)
        reason = attention.unsupported_reason(self._base)
        if reason is None:
            self._kernel = attention.install(self._base)
            if _agree(self._probe(probe, wanted), expected_N):
                self.layout = wanted
            else:
                attention.uninstall(self._base, self._kernel)
                self._kernel = None
                reason = "its packed forward differs from its plain one"
        if self._kernel == "sdpa" and self._head is not None and fused.supports(self._base):
            self._fuse(activation_checkpointing)
            if not _agree(self._probe(probe, wanted), expected_N):
                self._fused = self._memory = None
                log.warning("%s: its fused forward differs from its plain one", type(self._base).__name__)
        if reason is not None:
            log.warning("%s: samples are padded, not packed: %s", type(self._base).__name__, reason)
        for module in was_training:
            module.training = True

    def _fuse(self, activation_checkpointing: bool) -> None:
        gradients = Gradients()
        native = choose_library(self._fused_kernels, self._dtype)
        self._fused = fused.FusedDecoder(self._base, gradients, recompute=activation_checkpointing, native=native)
        self._memory = HeadMemory(gradients, WorkspacePool(), native)
        log.info("train worker: written-out decoder, %s", "plain torch" if native is None else "C++ kernels")

    @torch.no_grad()
    def _probe(self, samples: Sequence[TokenSample], layout: Layout) -> Tensor:
        exact = replace(self._head_config, temperature=1.0, dtype=torch.float32)
        with torch.autocast(self.device.type, enabled=False):
            return self._loss_tokens(samples, layout, exact)[0]


def _recompute_layers(model: PreTrainedModel) -> list[nn.Module]:
    """Keep only each decoder layer's input for the backward pass. (transformers' own switch needs training
    mode, which would turn on the layers' dropout.)"""
    layers: list[nn.Module] = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise QuintetError(
            f"train.activation_checkpointing: {type(model).__name__} has no decoder layers that can be recomputed\n"
            "set it to false, and lower train.micro_batch_tokens to save memory"
        )
    for layer in layers:
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
    return layers


def _probe_samples(vocab_size: int) -> list[TokenSample]:
    """Two samples of one prompt and one of another, spread over the vocabulary."""
    ids = [(7 + 31 * i) % vocab_size for i in range(18)]
    first, second = ids[:4], ids[4:6]
    pairs = [(first, ids[6:11]), (first, ids[11:14]), (second, ids[14:18])]
    return [TokenSample(prompt, response, [1] * len(response)) for prompt, response in pairs]


def _agree(found_N: Tensor, expected_N: Tensor) -> bool:
    return bool((found_N - expected_N).abs().max() <= PROBE_TOLERANCE)
