"""Low-rank adapters through peft (an extra), and the plain weights that an engine needs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from quintet.models.config import LoraConfig
from quintet.models.device import seeded
from quintet.models.quiet import quiet_peft
from quintet.types import QuintetError

if TYPE_CHECKING:
    from peft import PeftModel

_HEAD_AND_EMBEDDING = ("lm_head", "embed_tokens")


def apply_lora(model: PreTrainedModel, config: LoraConfig, seed: int) -> PeftModel:
    """Wrap `model` with adapters drawn from `seed`; the base is frozen, and the policy starts equal to it (B = 0).

    Raises QuintetError when peft is missing, for target modules that do not exist, for a tied head or embedding as a
    target (a merge would untie them), and for a quantised base (a merge would round the update away).
    """
    require_peft()
    from peft import LoraConfig as PeftLoraConfig
    from peft import get_peft_model

    _refuse_quantised_base(model)
    _refuse_tied_target(model, config)
    peft_config = PeftLoraConfig(
        task_type="CAUSAL_LM",
        r=config.r,
        lora_alpha=config.alpha,  # type: ignore[arg-type]  # peft scales by any number
        lora_dropout=config.dropout,
        target_modules=config.target_modules,
    )
    try:
        with seeded(seed, model.device), quiet_peft():
            return cast("PeftModel", get_peft_model(model, peft_config))
    except ValueError as error:
        linear = sorted({name.rpartition(".")[2] for name, m in model.named_modules() if isinstance(m, nn.Linear)})
        raise QuintetError(
            f"model.lora.target_modules: {config.target_modules} cannot be adapted: {str(error)[:200]}\n"
            f"The model's linear layers are {', '.join(linear)}; 'all-linear' takes all but the head."
        ) from error


def require_peft() -> None:
    """Raises QuintetError naming the pip command when peft is not installed."""
    if find_spec("peft") is None:
        raise QuintetError(
            "model.lora: adapters need peft, not installed here.\nInstall with: pip install 'quintet[lora]'"
        )


class PlainWeights(Mapping[str, Tensor]):
    """A model's weights as they are now under the plain names of the Hugging Face model; tied copies (the head's) are
    left out. The tensors are the model's own parameters, through which gradients flow.

    Adapted weights (unless adapters are disabled just then) are new tensors W + (alpha / r) B A, formed when asked for,
    in float32 and kept so, whatever dtype the base has (at 1.0 bfloat16 is spaced by 2^-7, so a merge there would lose
    most updates). The model itself is not touched. LoRA: arXiv 2106.09685.

    Raises QuintetError for a quantised base and for adapters that are not plain LoRA.
    """

    def __init__(self, model: nn.Module) -> None:
        base = base_model(model)
        tied = set(base.all_tied_weights_keys)
        if base is not model:
            _refuse_quantised_base(base)
        self._layers = {} if base is model else _adapted_layers(base)
        self._tensors = {
            name.replace(".base_layer.", "."): tensor
            for name, tensor in base.state_dict(keep_vars=True).items()
            if ".lora_" not in name and name not in tied
        }

    def __getitem__(self, name: str) -> Tensor:
        owner, _, leaf = name.rpartition(".")
        return _merge(self._layers[owner]) if leaf == "weight" and owner in self._layers else self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


@torch.no_grad()
def merged_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """`PlainWeights`, detached; what is not adapted shares storage with the model."""
    return {name: tensor.detach() for name, tensor in PlainWeights(model).items()}


def base_model(model: nn.Module) -> PreTrainedModel:
    """The Hugging Face model itself, adapters inside or not."""
    if isinstance(model, PreTrainedModel):
        return model
    return cast(PreTrainedModel, cast("PeftModel", model).get_base_model())


class Adapter(NamedTuple):
    """output += scale * up @ down @ input; `down` [r, in], `up` [out, r]."""

    down: Tensor
    up: Tensor
    scale: float


class LinearParts(NamedTuple):
    """A linear layer, and the low-rank adapters that act on it now."""

    base: nn.Linear
    adapters: tuple[Adapter, ...]


def linear_parts(module: nn.Module) -> LinearParts | None:
    """None for what is neither a plain linear layer nor plain LoRA without dropout around one."""
    if type(module) is nn.Linear:
        return LinearParts(module, ())
    layer: Any = module
    if type(module).__module__.partition(".")[0] != "peft" or not _is_undropped_lora(layer):
        return None
    base = layer.get_base_layer()
    names = () if layer.disable_adapters or layer.merged else layer.active_adapters
    adapters = tuple(
        Adapter(layer.lora_A[n].weight, layer.lora_B[n].weight, layer.scaling[n]) for n in names if n in layer.lora_A
    )
    return LinearParts(base, adapters)


def _is_undropped_lora(layer: Any) -> bool:
    from peft.tuners.lora import Linear

    if not _is_plain_lora(layer, Linear) or type(layer.get_base_layer()) is not nn.Linear:
        return False
    return all(isinstance(dropout, nn.Identity) for dropout in layer.lora_dropout.values())


def _adapted_layers(base: nn.Module) -> dict[str, Any]:
    from peft.tuners.lora import Linear
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils import AuxiliaryTrainingWrapper

    adapted = {n: m for n, m in base.named_modules() if isinstance(m, BaseTunerLayer | AuxiliaryTrainingWrapper)}
    for name, layer in adapted.items():
        if not _is_plain_lora(layer, Linear):
            raise QuintetError(
                f"model.lora: the adapter on {name} is not plain LoRA (DoRA, a bias, a saved module ...).\n"
                "It cannot be merged exactly; make it with model.lora."
            )
    return adapted


def _is_plain_lora(layer: Any, linear_class: type) -> bool:
    """A linear layer whose adapters are the product B A alone."""
    return isinstance(layer, linear_class) and not _extras(layer)


def _extras(layer: Any) -> bool:
    return layer.fan_in_fan_out or any(layer.lora_variant.values()) or any(layer.lora_bias.values())


def _merge(layer: Any) -> Tensor:
    weight: Tensor = layer.get_base_layer().weight.to(torch.float32)
    for adapter in [] if layer.disable_adapters else layer.active_adapters:
        down_RI, up_OR = (part[adapter].weight.float() for part in (layer.lora_A, layer.lora_B))
        weight = weight + layer.scaling[adapter] * (up_OR @ down_RI)
    return weight


def _refuse_quantised_base(model: nn.Module) -> None:
    name = next(_quantised_layers(model), None)
    if name is not None:
        raise QuintetError(
            f"model.lora: {name} of the base model is quantised; a merge would round the adapter's update away.\n"
            "Load the full-precision model that it was made from."
        )


def _quantised_layers(model: nn.Module) -> Iterator[str]:
    """Linear layers whose weight is packed integers."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and not module.weight.is_floating_point():
            yield name


def _refuse_tied_target(model: PreTrainedModel, config: LoraConfig) -> None:
    targets = [] if config.target_modules == "all-linear" else config.target_modules
    hit = [t for t in targets if t.rpartition(".")[2] in _HEAD_AND_EMBEDDING]
    if hit and model.config.tie_word_embeddings:
        raise QuintetError(
            f"model.lora.target_modules: head and embedding of this model are one weight; an adapter on {hit[0]!r} "
            "would untie them.\nLeave it out; 'all-linear' takes every other linear layer."
        )
