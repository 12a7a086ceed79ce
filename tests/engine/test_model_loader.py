"""Every family loads, computes what transformers computes, and what does not fit is refused."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AttentionInterface, AttentionMaskInterface

from engine.config import EngineConfig
from engine.errors import StartupError
from engine.model_info import ModelInfo
from engine.model_loader import LoadedModel, has_native_bfloat16, load_model, resolve_dtype
from tests.smollm2 import smollm2_config, smollm2_gguf
from tests.tiny_models import FAMILIES, make_tiny_model


def config_for(directory: Path, **changes: Any) -> EngineConfig:
    options: dict[str, Any] = {"device": "cpu", "dtype": "float32", **changes}
    return EngineConfig(model=str(directory), cache_dir=directory.parent / "cache", **options)


def load(directory: Path, attention: str = "eager", **changes: Any) -> LoadedModel:
    return load_model(config_for(directory, **changes), lambda *_: None, attention=attention)


@torch.no_grad()
def logits(model: Any, length: int = 40) -> torch.Tensor:
    ids = torch.arange(3, 3 + length)[None]
    result: torch.Tensor = model(ids, use_cache=False).logits[0]
    return result


def reference(directory: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(
        str(directory), dtype=torch.float32, attn_implementation="eager"
    ).eval()


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_family_equals_transformers_own_forward(family: str, tmp_path: Path) -> None:
    directory = make_tiny_model(tmp_path / "model", family)
    loaded = load(directory)
    expected = logits(reference(directory))
    assert torch.equal(logits(loaded.model), expected)
    assert expected.std() > 0.5  # weights that make a difference
    assert not loaded.model.training
    assert not any(parameter.requires_grad for parameter in loaded.model.parameters())


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_family_runs_through_a_registered_attention(family: str, tmp_path: Path) -> None:
    calls: list[dict[str, Any]] = []

    def stand_in(
        module: Any, query: Any, key: Any, value: Any, mask: Any, **options: Any
    ) -> tuple[torch.Tensor, None]:
        assert mask is None
        calls.append({"kv": (key.shape[1], key.shape[3]), **options})
        return torch.zeros_like(query).transpose(1, 2), None

    AttentionInterface.register("stand_in", stand_in)
    AttentionMaskInterface.register("stand_in", lambda *_, **__: None)
    loaded = load(make_tiny_model(tmp_path / "model", family), attention="stand_in")
    loaded.model(torch.arange(5)[None], use_cache=False, marker=7)
    info = loaded.info
    assert [call["kv"] for call in calls] == [(info.num_kv_heads, info.head_dim)] * info.num_layers
    assert tuple(call.get("sliding_window") for call in calls) == info.sliding_windows
    assert all(call["marker"] == 7 for call in calls)


def test_info_of_a_plain_model(tmp_path: Path) -> None:
    info = load(make_tiny_model(tmp_path / "model")).info
    assert info == ModelInfo(
        name=str(tmp_path / "model"),
        path=str(tmp_path / "model"),
        architecture="LlamaForCausalLM",
        max_model_len=2048,
        vocab_size=384,
        num_layers=3,
        num_kv_heads=2,
        head_dim=16,
        num_heads=4,
        dtype="float32",
        eos_token_ids=(2,),
        sliding_windows=(None, None, None),
        fingerprint=info.fingerprint,
    )
    assert len(info.fingerprint) == 32


@pytest.mark.parametrize(
    ("family", "windows"),
    [
        ("qwen2", (None, None, None)),
        ("mistral", (24, 24, 24)),
        ("gemma2", (24, None, 24)),
        ("gemma3_text", (24, 24, None)),
        ("gpt_neox", (None, None, None)),
    ],
)
def test_windows_per_layer(family: str, windows: tuple[int | None, ...], tmp_path: Path) -> None:
    assert load(make_tiny_model(tmp_path / "model", family)).info.sliding_windows == windows


def test_tied_embeddings_stay_one_tensor(tmp_path: Path) -> None:
    model: Any = load(make_tiny_model(tmp_path / "model", "llama")).model
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    untied: Any = load(make_tiny_model(tmp_path / "other", "qwen2")).model
    assert untied.lm_head.weight.data_ptr() != untied.model.embed_tokens.weight.data_ptr()


def test_generation_config_supplies_every_stop_id(tmp_path: Path) -> None:
    directory = make_tiny_model(tmp_path / "model")
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 0]}))
    assert load(directory).info.eos_token_ids == (2, 0)


def test_fingerprint_is_the_content_not_the_place(tmp_path: Path) -> None:
    prints = {
        name: load(make_tiny_model(tmp_path / name, seed=seed, **changes), **options)
        .info.fingerprint.hex()
        for name, seed, changes, options in [
            ("a", 0, {}, {}),
            ("b", 0, {}, {}),
            ("seed", 1, {}, {}),
            ("eps", 0, {"rms_norm_eps": 1e-3}, {}),
            ("theta", 0, {"rope_parameters": {"rope_type": "default", "rope_theta": 5e3}}, {}),
            ("dtype", 0, {}, {"dtype": "bfloat16"}),
            ("shorter", 0, {}, {"max_model_len": 512}),
            ("bos", 0, {"bos_token_id": 0}, {}),
        ]
    }  # fmt: skip
    # Neither the place, nor a cap on the length, nor a token's role changes a key or value.
    assert prints["a"] == prints["b"] == prints["shorter"] == prints["bos"]
    assert len(set(prints.values())) == 5


def test_fingerprint_covers_window_softcap_and_scale(tmp_path: Path) -> None:
    changes: list[dict[str, Any]] = [
        {},
        {"sliding_window": 25},
        {"attn_logit_softcapping": 6.0},
        {"query_pre_attn_scalar": 17},
    ]
    prints = {
        load(make_tiny_model(tmp_path / str(n), "gemma2", **change)).info.fingerprint
        for n, change in enumerate(changes)
    }
    assert len(prints) == len(changes)


LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 8,
    "long_factor": [4.0] * 8,
    "original_max_position_embeddings": 32,
    "factor": 8.0,
}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}


@pytest.mark.parametrize(("max_model_len", "factor"), [(32, 1.0), (33, 4.0), (256, 4.0)])
def test_longrope_is_pinned_by_the_longest_request(
    max_model_len: int, factor: float, tmp_path: Path
) -> None:
    directory = make_tiny_model(
        tmp_path / "model",
        "phi3",
        rope_parameters=LONGROPE,
        max_position_embeddings=256,
        original_max_position_embeddings=32,
    )
    model: Any = load(directory, max_model_len=max_model_len).model
    expected = 1.0 / (factor * 10000.0 ** (torch.arange(0, 16, 2).float() / 16))
    assert torch.allclose(model.model.rotary_emb.inv_freq, expected, rtol=1e-6)
    # A short forward and one beyond the switch leave the choice alone.
    for length in (8, 40):
        alone = logits(model, length)
        assert torch.allclose(model.model.rotary_emb.inv_freq, expected, rtol=1e-6)
        assert torch.allclose(alone[:8], logits(model, 8), atol=1e-5)


def test_dynamic_rope_is_pinned_by_the_longest_request(tmp_path: Path) -> None:
    directory = make_tiny_model(
        tmp_path / "model", rope_parameters=DYNAMIC, max_position_embeddings=32
    )
    model: Any = load(directory, max_model_len=64).model
    base = 10000.0 * (4.0 * 64 / 32 - 3.0) ** (16 / 14)
    expected = 1.0 / base ** (torch.arange(0, 16, 2).float() / 16)
    for length in (8, 60, 8):
        logits(model, length)
        assert torch.allclose(model.model.rotary_emb.inv_freq, expected, rtol=1e-5)


def test_pinned_rope_is_in_the_fingerprint(tmp_path: Path) -> None:
    phi3 = {"max_position_embeddings": 256, "original_max_position_embeddings": 32}

    def fingerprint(rope: dict[str, Any], max_model_len: int) -> bytes:
        family, fields = ("phi3", phi3) if rope is LONGROPE else ("llama", {})
        directory = make_tiny_model(
            tmp_path / f"{family}{max_model_len}", family, rope_parameters=rope, **fields
        )
        return load(directory, max_model_len=max_model_len).info.fingerprint

    assert fingerprint(LONGROPE, 32) != fingerprint(LONGROPE, 33)
    assert fingerprint(LONGROPE, 64) == fingerprint(LONGROPE, 128)  # both use the long factors
    assert fingerprint(DYNAMIC, 3000) != fingerprint(DYNAMIC, 3001)


def test_max_model_len_beyond_the_positions_is_refused(tmp_path: Path) -> None:
    directory = make_tiny_model(tmp_path / "model")
    with pytest.raises(StartupError, match="4096 exceeds the model's 2048"):
        load(directory, max_model_len=4096)
    assert load(directory, max_model_len=100).info.max_model_len == 100


def test_missing_tensor_is_refused(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    directory = make_tiny_model(tmp_path / "model")
    path = directory / "model.safetensors"
    tensors = load_file(path)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(StartupError, match=r"model\.layers\.1\.mlp\.up_proj\.weight"):
        load(directory)


def test_misshapen_tensor_is_refused(tmp_path: Path) -> None:
    directory = make_tiny_model(tmp_path / "model")
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "intermediate_size": 97}))
    with pytest.raises(StartupError):
        load(directory)


def test_truncated_weights_are_refused(tmp_path: Path) -> None:
    directory = make_tiny_model(tmp_path / "model")
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(StartupError, match="cut off"):
        load(directory)


def test_unknown_architecture_is_refused(tmp_path: Path) -> None:
    directory = make_tiny_model(tmp_path / "model")
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "model_type": "newfangled"}))
    with pytest.raises(StartupError, match=r"config\.json is not usable") as caught:
        load(directory)
    assert "\n" not in str(caught.value)


def test_missing_tokenizer_is_refused(tmp_path: Path) -> None:
    directory = make_tiny_model(tmp_path / "model")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (directory / name).unlink()
    with pytest.raises(StartupError, match="no usable tokenizer"):
        load(directory)


def test_learned_sinks_are_refused_by_name(tmp_path: Path) -> None:
    directory = tmp_path / "model"
    model_config = transformers.GptOssConfig(
        num_hidden_layers=1, hidden_size=32, num_attention_heads=2, num_key_value_heads=1,
        head_dim=16, num_local_experts=2, num_experts_per_tok=1, intermediate_size=16,
        vocab_size=64,
    )  # fmt: skip
    directory.mkdir()
    model_config.save_pretrained(directory)
    with pytest.raises(StartupError, match=r"'gpt_oss' is not supported.*sinks"):
        load(directory)


def test_progress_reaches_the_end_of_loading(tmp_path: Path) -> None:
    directory = make_tiny_model(tmp_path / "model")
    seen: list[tuple[str, float]] = []
    load_model(
        config_for(directory),
        lambda phase, percent: seen.append((phase, percent)),
        attention="eager",
    )
    assert seen[0] == ("resolving", 0.0)
    assert seen[-1] == ("loading", 100.0)
    assert ("hashing", 100.0) in seen
    assert all(0 <= percent <= 100 for _, percent in seen)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [("fpu avx512_bf16 sse", True), ("amx_bf16", True), ("fpu avx2 avx512f", False), ("", False)],
)
def test_native_bfloat16_is_read_from_the_flags(
    flags: str, expected: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(f"model name\t: avx512_bf16 in a name does not count\nflags\t\t: {flags}\n")
    assert has_native_bfloat16(cpuinfo) is expected
    assert has_native_bfloat16(tmp_path / "absent") is False


def test_dtype_is_taken_as_given_or_resolved(tmp_path: Path) -> None:
    assert resolve_dtype(config_for(tmp_path, dtype="float16")) == "float16"
    expected = "bfloat16" if has_native_bfloat16() else "float32"
    assert resolve_dtype(config_for(tmp_path, dtype="auto")) == expected


def test_smollm2_answers_like_generate_and_loads_only_the_conversion() -> None:
    phases: set[str] = set()
    loaded = load_model(smollm2_config(), lambda phase, _: phases.add(phase), attention="eager")
    assert "converting" not in phases
    info = loaded.info
    assert info.name == "SmolLM2-135M-Instruct"
    assert (info.max_model_len, info.eos_token_ids, info.dtype) == (8192, (2,), "float32")
    assert (info.num_layers, info.num_heads, info.num_kv_heads, info.head_dim) == (30, 9, 3, 64)
    assert Path(info.path) != smollm2_gguf().parent
    model: Any = loaded.model
    assert model.config.rms_norm_eps == 1e-05
    assert model.config.rope_parameters["rope_theta"] == 100000.0
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    ids = loaded.tokenizer.encode_chat(
        [{"role": "user", "content": "What is the capital of France?"}]
    )
    output = model.generate(torch.tensor([ids]), max_new_tokens=12, do_sample=False)
    assert loaded.tokenizer.decode(output[0].tolist()[len(ids) :]) == (
        "The capital of France is Paris."
    )


@torch.no_grad()
def test_two_loads_compute_the_same_bits(tmp_path: Path) -> None:
    directory = make_tiny_model(tmp_path / "model")
    assert torch.equal(logits(load(directory).model), logits(load(directory).model))
    assert math.isfinite(logits(load(directory).model).sum().item())
