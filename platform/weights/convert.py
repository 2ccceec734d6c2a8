"""GGUF to a Hugging Face folder in bfloat16. Run as a process: `python -m gearshift.platform.weights.convert`."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any


def convert(gguf: Path, out: Path, eos_token_ids: list[int] | None, tie_embeddings: bool) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.quantization_config import GgufConfig

    folder, name = str(gguf.parent), gguf.name
    tokenizer: Any = AutoTokenizer.from_pretrained(folder, gguf_file=name)
    model: Any = AutoModelForCausalLM.from_pretrained(
        folder, gguf_file=name, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
    )
    # save_pretrained refuses a model that still looks quantized
    model.hf_quantizer = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    if tie_embeddings:
        _tie_to_better_copy(model, gguf)
    if eos_token_ids:
        model.config.eos_token_id = model.generation_config.eos_token_id = list(eos_token_ids)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)


def _tie_to_better_copy(model: Any, gguf: Path) -> None:
    """Embedding and head are one matrix, stored in two quantizations: keep the one with more bits a weight."""
    from gguf import GGUFReader

    tensors = {tensor.name: tensor for tensor in GGUFReader(str(gguf)).tensors}
    embedding, head = tensors["token_embd.weight"], tensors.get("output.weight")
    if head is not None and head.n_bytes > embedding.n_bytes:
        model.get_input_embeddings().weight = model.get_output_embeddings().weight
    model.config.tie_word_embeddings = True
    model.tie_weights()


if __name__ == "__main__":
    os.environ["HF_HUB_OFFLINE"] = "1"
    convert(Path(sys.argv[1]), Path(sys.argv[2]), **json.loads(sys.argv[3]))
