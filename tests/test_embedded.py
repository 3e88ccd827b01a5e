"""The embedded model: what is in its folder, that it answers, and that we answer as transformers does."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tiny_models import assert_greedy

import nanovllm.embedded
from nanovllm import LLM, SamplingParams
from nanovllm.embedded.questions import held_out_questions, is_held_out

FOLDER = Path(nanovllm.embedded.__file__).parent
ROOT = FOLDER.parent.parent
GREEDY = SamplingParams(temperature=0, max_tokens=40)


def as_conversations(questions):
    return [[{"role": "user", "content": question}] for question, _ in questions]


@pytest.fixture(scope="module")
def reference():
    from safetensors.torch import load_file
    from transformers import Qwen3Config, Qwen3ForCausalLM

    model = Qwen3ForCausalLM(Qwen3Config.from_pretrained(FOLDER)).float().eval()
    missing, unexpected = model.load_state_dict(
        {name: tensor.float() for name, tensor in load_file(FOLDER / "model.safetensors").items()}, strict=False
    )
    assert missing == ["lm_head.weight"] and not unexpected
    model.tie_weights()
    return model


def test_the_folder_is_small_enough_for_a_package():
    files = [path for path in FOLDER.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    assert sum(path.stat().st_size for path in files) <= 3_000_000
    assert {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    } <= {path.name for path in files}


def test_held_out_pairs_are_held_out_in_both_orders():
    pairs = [(a, b) for a in range(100) for b in range(100)]
    assert all(is_held_out(a, b) == is_held_out(b, a) for a, b in pairs)
    assert 800 < sum(is_held_out(a, b) for a, b in pairs) < 1200


@pytest.mark.parametrize(("plain", "least"), [(False, 0.99), (True, 0.96)])
def test_held_out_questions_are_answered_right(plain, least):
    """Measured 0.998 in chat and 0.972 as plain prompts; whole answers, ended by the model itself."""
    questions = held_out_questions(plain=plain)
    with LLM("embedded") as llm:
        if plain:
            outputs = llm.generate([question for question, _ in questions], GREEDY, use_tqdm=False)
        else:
            outputs = llm.chat(as_conversations(questions), GREEDY, use_tqdm=False)
    right = sum(
        output.text == answer and output.finish_reason == "stop"
        for output, (_, answer) in zip(outputs, questions, strict=True)
    )
    assert right / len(questions) >= least


@pytest.mark.parametrize(
    "knobs",
    [
        {"kvcache_block_size": 1},
        {"kvcache_block_size": 16, "max_num_batched_tokens": 11},
        {"kvcache_block_size": 16, "num_kvcache_blocks": 7, "lookahead": 0, "greedy_admission": True},
        {"kvcache_block_size": 16, "num_kvcache_blocks": 7, "max_num_seqs": 64},
        {"kvcache_block_size": 256},
        {"kvcache_block_size": 4, "num_kvcache_blocks": 24, "max_num_batched_tokens": 30, "greedy_admission": True},
    ],
)
def test_greedy_answers_equal_transformers_whatever_the_knobs(reference, knobs):
    questions = held_out_questions()[:30] + held_out_questions()[:3]
    with LLM("embedded", **knobs) as llm:
        outputs = llm.chat(as_conversations(questions), GREEDY, use_tqdm=False)
        assert (llm.stats()["num_preemptions"] > 0) == ("greedy_admission" in knobs)
    assert all(output.error is None for output in outputs)
    assert_greedy(reference, outputs)


def test_bfloat16_answers_as_well():
    questions = held_out_questions()[:60]
    with LLM("embedded", dtype="bfloat16") as llm:
        assert llm.engine.model_runner.kv_cache.dtype == torch.bfloat16
        outputs = llm.chat(as_conversations(questions), GREEDY, use_tqdm=False)
    assert sum(o.text == answer for o, (_, answer) in zip(outputs, questions, strict=True)) >= 57


def run_example(*args):
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, str(ROOT / "example.py"), *args], capture_output=True, text=True, timeout=120, env=env
    )


def test_the_example_answers_from_the_embedded_model():
    result = run_example()
    assert "Answer: 23 + 45 = 68, sixty-eight." in result.stdout
    assert "Answer: 58 + 67 = 125, one hundred and twenty-five." in result.stdout
    assert result.returncode == 0 and not result.stderr


def test_the_example_runs_a_folder_through_its_chat_template():
    result = run_example(str(FOLDER))
    assert result.returncode == 0
    assert "Prompt: Introduce yourself.\nAnswer: I am a tiny model" in result.stdout


def test_the_example_says_what_to_do_without_a_network():
    result = run_example("Qwen/Qwen3-0.6B")
    assert result.returncode != 0
    assert "could not be fetched from the hub" in result.stderr and "'embedded'" in result.stderr
