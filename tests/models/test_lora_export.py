"""Adapters, their merge in float32, and the exported folder."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from peft import LoraConfig as PeftLoraConfig
from peft import get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from quintet.models.config import LoraConfig
from quintet.models.export import save_hf_folder
from quintet.models.loader import load_model, load_tokenizer
from quintet.models.lora import apply_lora, base_model, merged_state_dict
from quintet.types import QuintetError
from tests.models.helpers import load_cases, small_config

CASES = load_cases()
IDS = torch.tensor([[3, 4, 5, 6, 7]])


def trained(model: PreTrainedModel, **options: object) -> nn.Module:
    """An adapted model whose adapters are no longer zero."""
    adapted = apply_lora(model, LoraConfig(r=2, alpha=8.0, **options), seed=3)
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    return adapted


def test_adapters_start_equal_to_the_base_and_follow_the_seed() -> None:
    expected = load_model(small_config())(IDS).logits
    a, b, c = (apply_lora(load_model(small_config()), LoraConfig(r=2), seed=seed) for seed in (3, 3, 4))
    torch.testing.assert_close(a(IDS).logits, expected, rtol=0, atol=0)
    name = next(n for n, _ in a.named_parameters() if "lora_A" in n)
    weights = [dict(m.named_parameters())[name] for m in (a, b, c)]
    assert torch.equal(weights[0], weights[1]) and not torch.equal(weights[0], weights[2])
    assert all(("lora_" in n) == p.requires_grad for n, p in a.named_parameters())


def test_merged_weights_have_the_plain_names_and_reproduce_the_adapted_model() -> None:
    model = trained(load_model(small_config()))
    before = {n: t.clone() for n, t in model.state_dict().items()}
    merged = merged_state_dict(model)
    plain = load_model(small_config(), seed=9)
    assert set(plain.state_dict()) - set(merged) == {"lm_head.weight"}  # tied
    plain.load_state_dict(merged, strict=False)
    torch.testing.assert_close(plain(IDS).logits, model(IDS).logits, rtol=0, atol=2e-6)
    assert all(torch.equal(t, before[n]) for n, t in model.state_dict().items())


def test_merge_is_w_plus_scaled_product() -> None:
    model = trained(load_model(small_config()))
    layer = base_model(model).model.layers[0].mlp.up_proj
    expected = layer.base_layer.weight + 8.0 / 2 * layer.lora_B["default"].weight @ layer.lora_A["default"].weight
    torch.testing.assert_close(merged_state_dict(model)["model.layers.0.mlp.up_proj.weight"], expected.detach())


def test_merge_into_a_bfloat16_base_keeps_an_update_below_its_spacing() -> None:
    """WSY05."""
    case = CASES["WSY05"]["input"]
    model = apply_lora(load_model(small_config()).to(torch.bfloat16), LoraConfig(r=1, alpha=1.0), seed=0)
    layer = base_model(model).model.layers[0].mlp.up_proj
    nn.init.constant_(layer.base_layer.weight, case["bf16_weight"])
    nn.init.ones_(layer.lora_A["default"].weight)
    nn.init.constant_(layer.lora_B["default"].weight, case["lora_delta"])
    merged = merged_state_dict(model)["model.layers.0.mlp.up_proj.weight"]
    assert merged.dtype == torch.float32
    torch.testing.assert_close(merged, torch.full_like(merged, 1.001), rtol=0, atol=1e-6)


def test_plain_model_gives_its_own_storage_without_the_tied_head() -> None:
    model = load_model(small_config())
    weights = merged_state_dict(model)
    assert "lm_head.weight" not in weights
    assert weights["model.embed_tokens.weight"].data_ptr() == model.model.embed_tokens.weight.data_ptr()
    assert not any(t.requires_grad for t in weights.values())


def test_untied_head_is_kept() -> None:
    tiny = small_config().tiny.model_copy(update={"tie_embeddings": False})
    assert "lm_head.weight" in merged_state_dict(load_model(small_config(tiny=tiny)))


def test_unknown_target_module_lists_the_present_ones() -> None:
    with pytest.raises(QuintetError, match=r"(?s)\['query'\] cannot be adapted.*k_proj.*q_proj"):
        apply_lora(load_model(small_config()), LoraConfig(target_modules=["query"]), seed=0)


@pytest.mark.parametrize("target", ["lm_head", "embed_tokens"])
def test_tied_weight_is_no_target(target: str) -> None:
    with pytest.raises(QuintetError, match="would untie them"):
        apply_lora(load_model(small_config()), LoraConfig(target_modules=["q_proj", target]), seed=0)


def test_packed_integer_weights_take_no_adapter() -> None:
    """WSY10: such a layer is refused even when the config carries no mark."""
    model = load_model(small_config())
    packed = nn.Parameter(torch.zeros(4, 1, dtype=torch.uint8), requires_grad=False)
    model.model.layers[1].mlp.up_proj.weight = packed
    with pytest.raises(QuintetError, match=r"model\.layers\.1\.mlp\.up_proj of the base model is quantised"):
        apply_lora(model, LoraConfig(), seed=0)


@pytest.mark.parametrize("extra", [{"use_dora": True}, {"modules_to_save": ["up_proj"]}])
def test_adapter_that_is_not_plain_lora_is_refused(extra: dict[str, object]) -> None:
    config = PeftLoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"], **extra)
    with pytest.raises(QuintetError, match="is not plain LoRA"):
        merged_state_dict(get_peft_model(load_model(small_config()), config))


@pytest.mark.parametrize("lora", [False, True])
def test_exported_folder_loads_with_the_auto_classes(tmp_path: Path, lora: bool) -> None:
    tokenizer = load_tokenizer(small_config())
    model = load_model(small_config())
    model = trained(model) if lora else model
    save_hf_folder(model, tokenizer, tmp_path / "final")
    assert (tmp_path / "final" / "model.safetensors").is_file()
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "final")
    torch.testing.assert_close(loaded(IDS).logits, model(IDS).logits, rtol=0, atol=2e-6)
    hf = AutoTokenizer.from_pretrained(tmp_path / "final")
    assert hf("37 + 58=")["input_ids"] == tokenizer.encode("37 + 58=")
    assert hf.decode(tokenizer.encode("37 + 58=")) == "37 + 58="
    assert (hf.pad_token_id, hf.eos_token_id, loaded.generation_config.eos_token_id) == (0, 1, 1)


def test_export_replaces_an_earlier_one_and_nothing_else(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(small_config())
    for seed in (1, 2):
        save_hf_folder(load_model(small_config(), seed=seed), tokenizer, tmp_path / "final")
    expected = load_model(small_config(), seed=2)(IDS).logits
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "final")
    torch.testing.assert_close(loaded(IDS).logits, expected, rtol=0, atol=0)
    assert [p.name for p in tmp_path.iterdir()] == ["final"]
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.txt").write_text("mine")
    with pytest.raises(QuintetError, match="is no Hugging Face folder"):
        save_hf_folder(load_model(small_config()), tokenizer, tmp_path / "thesis")
