"""Every way to compute a model, against transformers' own forward; and the kernels against plain formulas."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ByteSize, ValidationError

from gearshift.platform.config import Model
from gearshift.platform.engine.kernels.rows import TERM, ZERO_POINT, add_norm, quantize, silu_mul
from gearshift.platform.engine.kv.cache import kv_bytes_per_token
from gearshift.platform.engine.kv.cpu import CpuCache, flat
from gearshift.platform.engine.kv.slots import SlotCache
from gearshift.platform.engine.rows import rows_of
from gearshift.platform.engine.runner import Loaded, TorchRunner
from gearshift.platform.engine.runners.fused import INT4_GROUP, FusedModel, why_not_fused
from gearshift.platform.engine.runners.linear import (
    Int4Linear,
    Int8Linear,
    PackedLinear,
    Scratch,
    int4_weights,
    int8_weights,
)
from gearshift.platform.engine.runners.rotation import Rotation
from gearshift.platform.engine.runners.transformers import TransformersModel
from gearshift.platform.engine.sequence import Chunk, Sequence
from gearshift.platform.engine.workers import Workers
from gearshift.platform.errors import ConfigError
from gearshift.platform.request import SamplingParams

VOCAB = 256
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 256, "eos_token_id": 2, "bos_token_id": 1,
    "pad_token_id": 0, "initializer_range": 0.3,
}  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama3 rope": ("Llama", {"rope_parameters": {
        "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64}}),
    "one kv head": ("Llama", {"num_key_value_heads": 1}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {}),
    "mistral, sliding": ("Mistral", {"sliding_window": 24}),
    "qwen2, some layers sliding": ("Qwen2", {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 2}),
    "gemma3, other family": ("Gemma3", {"sliding_window": 24}),
    "head of 24, no kernel": ("Llama", {"head_dim": 24}),
}  # fmt: skip
FUSED = {"llama", "llama3 rope", "one kv head", "qwen2", "qwen3", "mistral, sliding", "qwen2, some layers sliding"}


def save(kind: str, path: Path, **changes: Any) -> Path:
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}TextConfig" if kind == "Gemma3" else f"{kind}Config")(**{**SIZES, **changes})
    getattr(transformers, f"{kind}ForCausalLM")(config).save_pretrained(path)
    return path


def load(path: Path, blocks: int = 32, **changes: Any) -> TorchRunner:
    fields = {"source": "x", "dtype": "float32", "device": "cpu", "kv_cache_memory": ByteSize(1 << 30), **changes}
    return Loaded(path, Model(**fields), num_blocks=blocks).runner


@pytest.fixture(scope="module", params=MODELS)
def kind(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def folder(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    family, changes = MODELS[kind]
    return save(family, tmp_path_factory.mktemp("model"), **changes)


def reference(folder: Path, ids: list[int]) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    with torch.inference_mode():
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        logits: torch.Tensor = model(torch.tensor([ids])).logits[0]
    return logits


def sequence(name: str, ids: list[int], blocks: list[int]) -> Sequence:
    return Sequence(name, ids, SamplingParams(), 1, blocks=blocks)


def tokens(seed: int, count: int) -> list[int]:
    return torch.randint(3, VOCAB, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def logits(runner: TorchRunner, *chunks: Chunk) -> torch.Tensor:
    """Of every row of the step."""
    rows = rows_of(chunks, 16)
    with torch.inference_mode():
        return runner._model.logits(rows._replace(sampled=np.arange(len(rows.tokens)))).clone()


def close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    torch.testing.assert_close(ours, theirs, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("impl", ["auto", "transformers"])
def test_chunks_and_decodes_of_several_sequences_equal_a_plain_forward(folder: Path, kind: str, impl: str) -> None:
    runner = load(folder, model_impl=impl)
    assert isinstance(runner._model, FusedModel if impl == "auto" and kind in FUSED else TransformersModel)
    a, b = sequence("a", tokens(1, 70), [5, 1, 9, 3, 7]), sequence("b", tokens(2, 41), [0, 2, 4])
    one = logits(runner, Chunk(a, 0, 37), Chunk(b, 0, 40))
    two = logits(runner, Chunk(b, 40, 41), Chunk(a, 37, 69))
    three = logits(runner, Chunk(a, 69, 70))
    close(torch.cat([one[:37], two[1:], three]), reference(folder, a.prompt_ids))
    close(torch.cat([one[37:], two[:1]]), reference(folder, b.prompt_ids))


def test_int8_answers_have_the_same_bits_however_their_prompt_was_cut(kind: str, folder: Path) -> None:
    if kind not in FUSED:
        return  # only the fused path promises bits; the others are compared with a plain forward
    runner = load(folder, quantization="int8")
    whole, cut = sequence("a", tokens(1, 70), [5, 1, 9, 3, 7]), sequence("b", tokens(1, 70), [0, 2, 4, 6, 8])
    at_once = logits(runner, Chunk(whole, 0, 70))
    pieces = [logits(runner, Chunk(cut, start, end)) for start, end in ((0, 5), (5, 6), (6, 37), (37, 69), (69, 70))]
    assert torch.equal(torch.cat(pieces), at_once)


def rounded(weight: torch.Tensor, quantization: str) -> torch.Tensor:
    """The weights that the quantized ones stand for."""
    if quantization == "int8":
        values, scales = int8_weights(weight)
        return values * scales.unsqueeze(1)
    values, scales = int4_weights(weight, INT4_GROUP)
    scale, zero = (part.T.repeat_interleave(INT4_GROUP, dim=1) for part in scales.float().unbind(2))
    return (values - 8) * scale + zero


def turned(model: Any) -> None:
    rotation = Rotation(SIZES["hidden_size"], SIZES["head_dim"])
    model.model.embed_tokens.weight.data = rotation.embedding(model.model.embed_tokens.weight.data)
    rotation.reader(model.lm_head, model.model.norm)
    model.model.norm.weight.data.fill_(1.0)
    for layer in model.model.layers:
        rotation.layer(layer)


def untied(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    return model


@torch.inference_mode()
def test_a_rotation_changes_a_models_numbers_and_not_its_output(kind: str, folder: Path) -> None:
    if kind not in FUSED:
        return
    model, ids = untied(folder), torch.tensor([tokens(3, 50)])
    for name, parameter in model.named_parameters():  # norms of 1 and biases of 0 would hide that they were forgotten
        if "norm" in name or "bias" in name:
            parameter.copy_(torch.rand_like(parameter) + 0.5)
    before, old = model(ids).logits, model.model.layers[0].mlp.up_proj.weight.detach().clone()
    turned(model)
    torch.testing.assert_close(model(ids).logits, before, atol=2e-4, rtol=2e-4)
    assert not torch.allclose(model.model.layers[0].mlp.up_proj.weight, old, atol=0.1)


@pytest.mark.parametrize("quantization", ["int8", "int4"])
@pytest.mark.parametrize("impl", ["auto", "transformers"])
def test_quantized_weights_compute_what_they_stand_for(
    folder: Path, kind: str, impl: str, quantization: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = untied(folder)
    if rotated := impl == "auto" and kind in FUSED and quantization == "int8":
        turned(model)
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            module.weight.data = rounded(module.weight.data, "int8" if name == "lm_head" else quantization)
    ids = tokens(3, 50)
    with torch.inference_mode():
        theirs = model(torch.tensor([ids])).logits[0]

    def error() -> float:
        runner = load(folder, model_impl=impl, quantization=quantization)
        ours = logits(runner, Chunk(sequence("a", ids, [3, 2, 1, 0]), 0, 50))
        return float((ours - theirs).norm() / theirs.norm())

    if rotated:  # random weights make much of the little that one term leaves out; two terms leave nothing to hide in
        assert error() < 0.2
        monkeypatch.setattr(
            "gearshift.platform.engine.runners.fused.WIDE",
            {"qkv_proj", "o_proj", "gate_up_proj", "down_proj", "lm_head"},
        )
    assert error() < (0.1 if quantization == "int4" else 0.002)


def test_int8_answers_have_the_same_bits_alone_and_in_a_batch(tmp_path: Path) -> None:
    runner = load(save("Llama", tmp_path), quantization="int8")
    sequences = [sequence(str(n), tokens(n, 33), [n, n + 8, n + 16]) for n in range(6)]
    for each in sequences:
        logits(runner, Chunk(each, 0, 32))
    alone = logits(runner, Chunk(sequences[2], 32, 33))
    together = logits(runner, *(Chunk(each, 32, 33) for each in sequences))
    assert torch.equal(together[2], alone[0])


@pytest.mark.parametrize(("kv", "tolerance"), [(torch.bfloat16, 0.005), (torch.int8, 0.015)])
def test_narrow_keys_and_values_stay_near(kv: torch.dtype, tolerance: float, tmp_path: Path) -> None:
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(save("Llama", tmp_path))
    torch.manual_seed(0)
    rows = rows_of((Chunk(sequence("a", tokens(4, 60), [3, 2, 1, 0]), 0, 60),), 16)
    query, key, value = (torch.randn(60, heads, 32) for heads in (4, 2, 2))
    narrow, wide = (
        cache.attend(0, query, key, value, cache.prepare(rows), 0.2, 0)
        for cache in (CpuCache(config, 4, 16, kv, 1), CpuCache(config, 4, 16, torch.float32, 1))
    )
    assert float((narrow - wide).norm() / wide.norm()) < tolerance


def test_float16_keys_and_values_take_the_path_that_has_them(tmp_path: Path) -> None:
    ids = tokens(4, 60)
    runner = load(save("Llama", tmp_path), kv_cache_dtype="float16")
    assert isinstance(runner._model, TransformersModel)
    ours, theirs = logits(runner, Chunk(sequence("a", ids, [3, 2, 1, 0]), 0, 60)), reference(tmp_path, ids)
    assert float((ours - theirs).norm() / theirs.norm()) < 0.05


def test_int8_weights_of_a_width_that_no_vector_fits_are_refused(tmp_path: Path) -> None:
    folder = save("Llama", tmp_path, intermediate_size=90)
    with pytest.raises(ConfigError, match="down_proj of this source has 90"):
        load(folder, model_impl="transformers", quantization="int8")


def test_int8_keys_without_a_kernel_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="kv_cache_dtype"):
        load(save("Llama", tmp_path, head_dim=24), kv_cache_dtype="int8")


def test_threads_share_the_attention_and_change_nothing(tmp_path: Path) -> None:
    save("Llama", tmp_path)
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(tmp_path)
    caches = [CpuCache(config, 64, 16, torch.float32, threads) for threads in (1, 3)]
    a, b = sequence("a", tokens(1, 400), list(range(25))), sequence("b", tokens(1, 300), list(range(25, 45)))
    rows = rows_of((Chunk(a, 0, 400), Chunk(b, 0, 300)), 16)
    query, key, value = (torch.randn(700, heads, 32) for heads in (4, 2, 2))
    one, three = (cache.attend(0, query, key, value, cache.prepare(rows), 0.2, 0) for cache in caches)
    assert len(caches[1].prepare(rows).parts) == 3
    assert torch.equal(one, three)


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(0, 70), st.integers(1, 40)), min_size=1, max_size=5),
    window=st.sampled_from([0, 1, 7, 16, 40]),
    shape=st.sampled_from([(4, 1), (6, 2), (7, 7), (9, 3)]),
    block=st.sampled_from([16, 32]),
)  # fmt: skip
def test_paged_attention_equals_the_reference(
    lengths: list[tuple[int, int]], window: int, shape: tuple[int, int], block: int
) -> None:
    class Config:
        num_attention_heads, num_key_value_heads = shape
        num_hidden_layers, head_dim = 1, 16

    torch.manual_seed(0)
    caches = [
        CpuCache(Config, 64, block, torch.float32, 1),
        SlotCache(Config, 64, block, torch.float32, torch.device("cpu")),
    ]
    free = list(np.random.default_rng(0).permutation(64))
    sequences = [
        sequence(str(n), [3] * (before + new), [int(free.pop()) for _ in range(-(-(before + new) // block))])
        for n, (before, new) in enumerate(lengths)
    ]
    steps = [
        tuple(Chunk(each, 0, before) for each, (before, _) in zip(sequences, lengths, strict=True) if before),
        tuple(Chunk(each, before, before + new) for each, (before, new) in zip(sequences, lengths, strict=True)),
    ]
    for step in filter(None, steps):
        rows = rows_of(step, block)
        query, key, value = (torch.randn(len(rows.tokens), heads, 16) for heads in (shape[0], shape[1], shape[1]))
        ours, theirs = (cache.attend(0, query, key, value, cache.prepare(rows), 0.3, window) for cache in caches)  # type: ignore[attr-defined]
        torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=2e-5)


def test_the_passes_between_products_equal_their_formulas() -> None:
    torch.manual_seed(0)
    x, update, weight = torch.randn(5, 64), torch.randn(5, 64), torch.rand(64)
    residual, out = x.clone(), torch.empty(5, 64)
    add_norm(flat(residual), flat(update), flat(weight), np.float32(1e-5), 64, flat(out))
    torch.testing.assert_close(residual, x + update)
    torch.testing.assert_close(out, torch.nn.functional.rms_norm(x + update, (64,), weight, 1e-5))
    gate_up, mixed = torch.randn(5, 128) * 8, torch.empty(5, 64)
    silu_mul(flat(gate_up), 64, flat(mixed))
    torch.testing.assert_close(mixed, torch.nn.functional.silu(gate_up[:, :64]) * gate_up[:, 64:], atol=1e-5, rtol=1e-5)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(-1e4, 1e4, width=32), min_size=32, max_size=32))
def test_one_int8_term_holds_eight_bits_and_two_fifteen(values: list[float]) -> None:
    row = np.array(values, np.float32)
    out, scales = np.zeros(64, np.uint8), np.zeros(1, np.float32)
    quantize(row, 32, 1, out, scales)
    assert (
        np.abs(scales[0] * (out[:32].astype(np.int64) - ZERO_POINT) - row).max()
        <= np.abs(row).max() / 127 * 0.51 + 1e-20
    )
    assert not out[32:].any()
    quantize(row, 32, 2, out, scales)
    high, low = (out.astype(np.int64) - ZERO_POINT).reshape(2, 32)
    assert np.abs(scales[0] * (TERM * high + low) - row).max() <= np.abs(row).max() / (127 * TERM) * 0.51 + 1e-20


@pytest.mark.parametrize("count", [1, 2, 3, 4, 9])
@pytest.mark.parametrize("bias", [True, False])
def test_weight_formats_equal_a_plain_product_of_their_weights(count: int, bias: bool) -> None:
    torch.manual_seed(0)
    weight, shift = torch.randn(48, 64), torch.randn(48) if bias else None
    rows = torch.zeros(16, 64)
    rows[:count] = torch.randn(count, 64)
    odd, odd_shift = weight[:37], None if shift is None else shift[:37]
    for terms in (1, 2):
        ours = Int8Linear(odd, odd_shift, Scratch(16, Workers(1)), terms)(rows, count)[:count]
        theirs = Int8Linear(weight, shift, Scratch(16, Workers(1)), terms)(rows, count)[:count, :37]
        torch.testing.assert_close(ours, theirs)  # a width that no vector fits
    expected = torch.nn.functional.linear(rows[:count], weight, shift)
    for linear, tolerance in (
        (PackedLinear(weight, shift), 1e-5),
        (PackedLinear(weight.bfloat16(), None if shift is None else shift.bfloat16()), 0.02),
        (Int8Linear(weight, shift, Scratch(16, Workers(1)), terms=1), 0.03),
        (Int8Linear(weight, shift, Scratch(16, Workers(1))), 0.02),
        (Int4Linear(weight, None if shift is None else shift.bfloat16(), 32), 0.2),
    ):
        ours = linear(rows.to(linear.takes), count)[:count].float()
        assert float((ours - expected).norm() / expected.norm()) < tolerance


def test_threads_share_the_products_of_one_row_and_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gearshift.platform.engine.runners.linear.SHARED_WEIGHTS", 1)
    torch.manual_seed(0)
    weight, rows = torch.randn(100, 64), torch.randn(4, 64)
    for terms in (1, 2):
        one, three = (Int8Linear(weight, None, Scratch(4, Workers(threads)), terms)(rows, 1)[:1] for threads in (1, 3))
        assert torch.equal(one, three)


def test_int8_keys_and_values_take_little_more_than_half(tmp_path: Path) -> None:
    from transformers import AutoConfig

    save("Llama", tmp_path, head_dim=64)
    config = AutoConfig.from_pretrained(tmp_path)
    assert kv_bytes_per_token(config, torch.int8) / kv_bytes_per_token(config, torch.bfloat16) < 0.55


def test_what_the_fused_path_can_not_run_has_a_reason(tmp_path: Path) -> None:
    from transformers import LlamaConfig

    assert why_not_fused(LlamaConfig(**SIZES)) is None
    assert "rope type dynamic" in str(
        why_not_fused(LlamaConfig(**SIZES, rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}))
    )
    with pytest.raises(ConfigError, match="model_impl: fused does not serve this model: activation gelu"):
        load(save("Llama", tmp_path, hidden_act="gelu"), model_impl="fused")


def test_formats_that_do_not_go_together_name_both_keys(tmp_path: Path) -> None:
    with pytest.raises(ValidationError, match=r"quantization: .* dtype: "):
        Model(source="x", dtype="float16", device="cpu", quantization="int8")
    with pytest.raises(ValidationError, match="kv_cache_dtype: int8 needs device: cpu"):
        Model(source="x", device="cuda", kv_cache_dtype="int8")
    save("Llama", tmp_path, quantization_config={"quant_method": "gptq", "bits": 4, "group_size": 32})
    with pytest.raises(ConfigError, match=r"quantization: int8 can't be applied to source: .*\(gptq\)"):
        load(tmp_path, quantization="int8")


def test_a_checkpoint_that_is_quantized_already_loads_through_transformers(tmp_path: Path) -> None:
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import (
        QuantizationArgs,
        QuantizationConfig,
        QuantizationScheme,
        apply_quantization_config,
    )
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model: Any = LlamaForCausalLM(LlamaConfig(**SIZES))
    weights = QuantizationArgs(num_bits=8, symmetric=True, strategy="channel")
    groups = {"all": QuantizationScheme(targets=["Linear"], weights=weights)}
    apply_quantization_config(
        model,
        QuantizationConfig(
            config_groups=groups, ignore=["lm_head"], format="pack-quantized", quantization_status="frozen"
        ),
    )
    for module in model.modules():
        if hasattr(module, "weight_scale"):
            module.weight_scale.data = module.weight.abs().amax(1, keepdim=True) / 127
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(tmp_path)
    compressor.update_config(tmp_path)
    ids = tokens(3, 50)
    runner = load(tmp_path)
    assert isinstance(runner._model, TransformersModel)
    close(logits(runner, Chunk(sequence("a", ids, [3, 2, 1, 0]), 0, 50)), reference(tmp_path, ids))
    with pytest.raises(ConfigError, match=r"quantization: int4 can't be applied to source: .*\(compressed-tensors\)"):
        load(tmp_path, quantization="int4")


def test_capped_attention_is_refused(tmp_path: Path) -> None:
    from transformers import Gemma2Config

    Gemma2Config(**SIZES).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="caps attention logits"):
        load(tmp_path)


def varlen_by_its_documentation(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, starts: torch.Tensor, cu_seq_k: None, max_q: int,
    max_k: int, *, scale: float, window_size: tuple[int, int], enable_gqa: bool, seqused_k: torch.Tensor,
    block_table: torch.Tensor, num_splits: int,
) -> torch.Tensor:  # fmt: skip
    """What torch documents of `varlen_attn`, which runs on a GPU only, in plain torch."""
    out = torch.empty_like(query)
    for begin, end, used, blocks in zip(starts[:-1], starts[1:], seqused_k, block_table, strict=True):
        k, v = (pool[blocks.long()].flatten(0, 1)[:used].repeat_interleave(2, dim=1) for pool in (keys, values))
        at = torch.arange(int(used) - int(end - begin), int(used)).unsqueeze(1)
        seen = torch.arange(int(used))
        mask = seen <= at + window_size[1]
        if window_size[0] >= 0:
            mask &= seen >= at - window_size[0]
        q = query[begin:end].transpose(0, 1)
        mixed = torch.nn.functional.scaled_dot_product_attention(
            q[None], k.transpose(0, 1)[None], v.transpose(0, 1)[None], attn_mask=mask, scale=scale
        )
        out[begin:end] = mixed[0].transpose(0, 1)
    return out


@pytest.mark.parametrize("window", [0, 7])
def test_what_a_gpu_s_kernel_is_given_is_what_the_reference_computes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, window: int
) -> None:
    from transformers import AutoConfig

    from gearshift.platform.engine.kv import varlen

    monkeypatch.setattr(varlen, "varlen_attn", varlen_by_its_documentation)
    config = AutoConfig.from_pretrained(save("Llama", tmp_path))
    cpu = torch.device("cpu")
    caches: list[Any] = [kind(config, 16, 16, torch.float32, cpu) for kind in (varlen.VarlenCache, SlotCache)]
    a, b = sequence("a", tokens(1, 70), [5, 1, 9, 3, 7]), sequence("b", tokens(2, 41), [0, 2, 4])
    torch.manual_seed(0)
    for step in ((Chunk(a, 0, 37), Chunk(b, 0, 40)), (Chunk(b, 40, 41), Chunk(a, 37, 69)), (Chunk(a, 69, 70),)):
        rows = rows_of(step, 16)
        query, key, value = (torch.randn(len(rows.tokens), heads, 32) for heads in (4, 2, 2))
        ours, theirs = (cache.attend(0, query, key, value, cache.prepare(rows), 0.3, window) for cache in caches)
        torch.testing.assert_close(ours, theirs)


def test_a_gpu_that_refuses_the_block_size_is_told_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from transformers import AutoConfig

    from gearshift.platform.engine.kv import varlen

    def refuse(*_: Any, **__: Any) -> torch.Tensor:
        raise RuntimeError("page size must be divisible by 256")

    monkeypatch.setattr(varlen, "varlen_attn", refuse)
    config = AutoConfig.from_pretrained(save("Llama", tmp_path))
    with pytest.raises(ConfigError, match=r"block_size: .* blocks of 16 tokens .* try block_size: 256"):
        varlen.VarlenCache(config, 4, 16, torch.float32, torch.device("cpu"))
