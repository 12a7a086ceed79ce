"""Every family we name, through the whole engine, against transformers' own eager forward."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.running_engine import LOGPROB_TOLERANCE, Answer, ask, greedy, running_engine
from tests.smollm2 import smollm2_cache_dir, smollm2_gguf
from tests.tiny_models import FAMILIES, make_tiny_model

NUM_OUTPUT = 10
PROMPT = [3 + (29 * i) % 370 for i in range(61)]  # longer than the tiny models' windows


@torch.inference_mode()
def eager_answer(directory: Path, prompt: list[int]) -> tuple[list[int], list[float]]:
    """Greedy tokens and their logprobs, the whole sequence computed anew for each token."""
    model = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager"
    )
    model.eval()
    token_ids, logprobs = list(prompt), []
    for _ in range(NUM_OUTPUT):
        logits = model(torch.tensor([token_ids]), use_cache=False).logits[0, -1]
        drawn = int(logits.argmax())
        logprobs.append(torch.log_softmax(logits.float(), dim=-1)[drawn].item())
        token_ids.append(drawn)
    return token_ids[len(prompt) :], logprobs


def assert_equal_to_eager(answer: Answer, expected: tuple[list[int], list[float]]) -> None:
    token_ids, logprobs = expected
    assert answer.token_ids == token_ids
    for ours, theirs in zip(answer.logprobs, logprobs, strict=True):
        assert abs(ours.logprob - theirs) <= LOGPROB_TOLERANCE


@pytest.mark.parametrize("family", FAMILIES)
async def test_a_family_answers_as_transformers_does(
    tmp_path: Path, kernel_cache: Path, family: str
) -> None:
    """Cold in chunks, then from the cache; windows and soft-caps included."""
    directory = make_tiny_model(tmp_path / family, family)
    expected = eager_answer(directory, PROMPT)
    async with running_engine(directory, kernel_cache, max_num_batched_tokens=24) as engine:
        assert_equal_to_eager(await ask(engine, PROMPT, greedy(NUM_OUTPUT)), expected)
        again = await ask(engine, PROMPT, greedy(NUM_OUTPUT))
        assert again.cached.device == 60
        assert_equal_to_eager(again, expected)


async def test_smollm2_answers_as_generate_does(tmp_path: Path) -> None:
    """The real model: transformers' `generate` on the converted weights."""
    async with running_engine(
        smollm2_gguf(), smollm2_cache_dir(), kv_blocks=64, block_size=16, max_num_batched_tokens=64
    ) as engine:
        messages = [{"role": "user", "content": "What is the capital of France?"}]
        prompt = engine.tokenizer.encode_chat(messages)
        answer = await ask(engine, prompt, greedy(24, ignore_eos=False))
        model = AutoModelForCausalLM.from_pretrained(
            engine.model.path, dtype=torch.float32, attn_implementation="eager"
        )
        with torch.inference_mode():
            generated = model.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                max_new_tokens=24,
                do_sample=False,
                return_dict_in_generate=True,
                output_logits=True,
            )
        token_ids = generated.sequences[0, len(prompt) :].tolist()
        assert answer.token_ids == token_ids
        for entry, logits in zip(answer.logprobs, generated.logits, strict=True):
            expected = torch.log_softmax(logits[0].float(), dim=-1)[entry.token_id].item()
            assert abs(entry.logprob - expected) <= LOGPROB_TOLERANCE
        assert "Paris" in answer.text
