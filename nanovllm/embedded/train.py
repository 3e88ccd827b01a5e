"""Trains the embedded model: makes the tokenizer, the configuration and the weights of a checkpoint folder.

    python -m nanovllm.embedded.train --out DIR               # train, write the folder, evaluate it
    python -m nanovllm.embedded.train --out DIR --eval-only   # evaluate an existing folder

The model is a Qwen3 of about one million parameters; what it learns is in `questions.py`. The run takes about 15
minutes on one CPU core and gives the same files every time on the same machine with the same library versions.
More `--threads` help only on an idle machine, and change the weights slightly.

The JSON files are written by hand, not with `save_pretrained`: transformers 5 reads the files of transformers 4,
but not the other way round, so the older form is the one that every version loads.
"""

import argparse
import json
import math
import random
import time
from pathlib import Path

from nanovllm.embedded.questions import held_out_questions, training_example

SEED, STEPS = 0, 2200
ROWS, ROW_LENGTH = 16, 192  # one batch; every row is packed with several short examples
PEAK_LR, WARMUP_STEPS, WEIGHT_DECAY = 2e-3, 200, 0.5

VOCAB_SIZE, MAX_LENGTH = 448, 4096
PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"

# Qwen's split: words with the space before them, and every digit on its own, so that numbers are read digit by digit.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

# fmt: off
MODEL_SHAPE = {
    "vocab_size": VOCAB_SIZE, "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4,
    # As in Qwen3, head_dim is not hidden_size / heads; GPU attention kernels want 64 or 128.
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
    "hidden_act": "silu", "max_position_embeddings": MAX_LENGTH, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
    "attention_bias": False, "attention_dropout": 0.0, "initializer_range": 0.02, "tie_word_embeddings": True,
    "use_cache": True, "use_sliding_window": False, "sliding_window": None, "max_window_layers": 4,
}
# fmt: on


def build_tokenizer():
    """Byte-level BPE: any text can be encoded, as every byte is a token; the merges come from the training text."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[PAD, START, END],
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    rng = random.Random(SEED)
    pieces = [text for _ in range(20_000) for text, _ in segments(training_example(rng))]
    # The special tokens are cut out before the merges apply, so their letters must not earn merges of their own.
    tokenizer.train_from_iterator([text.replace(START, "").replace(END, "") for text in pieces], trainer)
    assert tokenizer.get_vocab_size() == VOCAB_SIZE
    return tokenizer


def segments(example) -> list[tuple[str, bool]]:
    """The text of an example in pieces; True marks what the model must learn to say."""
    if isinstance(example, tuple):
        prompt, completion = example
        return [(prompt, False), (completion + END, True)]
    pieces = []
    for message in example:
        role, content = message["role"], message["content"]
        pieces += [(f"{START}{role}\n", False), (content + END, role == "assistant"), ("\n", False)]
    return pieces


def encode(tokenizer, example) -> tuple[list[int], list[int]]:
    """The tokens and the labels of an example; a label of -100 means no loss."""
    tokens: list[int] = []
    labels: list[int] = []
    for text, learn in segments(example):
        ids = tokenizer.encode(text).ids
        tokens += ids
        labels += ids if learn else [-100] * len(ids)
    return tokens, labels


def batches(tokenizer, rng: random.Random):
    """Endless batches of tokens, labels and attention masks; each row is packed with as many examples as fit.

    In half of the rows an example cannot see the ones before it, so it is read as it will be asked: from an empty
    context. In the other half it can, which teaches the model to find the question at the end of a long context.
    """
    import torch

    pad = tokenizer.token_to_id(PAD)
    causal = torch.ones(ROW_LENGTH, ROW_LENGTH, dtype=torch.bool).tril()
    waiting = encode(tokenizer, training_example(rng))
    while True:
        rows = []
        for row in range(ROWS):
            cells: list[tuple[int, int, int]] = []  # (token, label, number of the example)
            example = 0
            while not cells or len(cells) + len(waiting[0]) <= ROW_LENGTH:
                cells += [(token, label, example) for token, label in zip(*waiting, strict=True)]
                example += row % 2
                waiting = encode(tokenizer, training_example(rng))
            rows.append((cells + [(pad, -100, -1)] * ROW_LENGTH)[:ROW_LENGTH])
        tokens, labels, examples = torch.tensor(rows).unbind(2)
        yield tokens, labels, (causal & (examples[:, :, None] == examples[:, None, :]))[:, None]


def learning_rate(step: int, steps: int) -> float:
    """Linear warm-up, then half a cosine down to zero."""
    if step < WARMUP_STEPS:
        return PEAK_LR * (step + 1) / WARMUP_STEPS
    return PEAK_LR * 0.5 * (1 + math.cos(math.pi * (step - WARMUP_STEPS) / (steps - WARMUP_STEPS)))


def train(tokenizer, steps: int):
    """Trains a fresh model in float32."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(SEED)
    model = Qwen3ForCausalLM(Qwen3Config(**MODEL_SHAPE))
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters")
    # Only matrices decay: shrinking the norm weights would just fight the layers around them.
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": WEIGHT_DECAY},
            {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0},
        ],
        betas=(0.9, 0.98),
    )
    started, mean_loss = time.perf_counter(), 0.0
    stream = batches(tokenizer, random.Random(SEED + 1))
    for step in range(steps):
        tokens, labels, mask = next(stream)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, steps)
        loss = model(input_ids=tokens, attention_mask=mask, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        mean_loss += loss.item() / 100
        if (step + 1) % 100 == 0:
            print(f"step {step + 1:5d}  loss {mean_loss:.4f}  {time.perf_counter() - started:.0f} s", flush=True)
            mean_loss = 0.0
    return model


def save(out: Path, tokenizer, model):
    """Writes the checkpoint folder, its weights rounded to bfloat16."""
    import torch
    from safetensors.torch import save_file

    def write_json(name, content):
        (out / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")

    out.mkdir(parents=True, exist_ok=True)
    ids = {token: tokenizer.token_to_id(token) for token in (PAD, START, END)}
    # fmt: off
    write_json("config.json", {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", **MODEL_SHAPE, "rope_scaling": None,
        "torch_dtype": "bfloat16", "bos_token_id": None, "eos_token_id": ids[END], "pad_token_id": ids[PAD]})
    write_json("generation_config.json",
               {"do_sample": False, "eos_token_id": [ids[END], ids[PAD]], "pad_token_id": ids[PAD]})
    flags = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True}
    write_json("tokenizer_config.json", {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "added_tokens_decoder": {str(i): {"content": token, **flags} for token, i in ids.items()},
        "additional_special_tokens": [START, END],
        "bos_token": None, "eos_token": END, "pad_token": PAD, "unk_token": None,
        "model_input_names": ["input_ids", "attention_mask"],
        "model_max_length": MAX_LENGTH, "clean_up_tokenization_spaces": False, "split_special_tokens": False,
        "chat_template": CHAT_TEMPLATE})
    # fmt: on
    tokenizer.save(str(out / "tokenizer.json"))
    # The output layer shares the embedding's weights, so it is not stored.
    weights = {
        name: tensor.detach().to(torch.bfloat16).contiguous()
        for name, tensor in model.state_dict().items()
        if name != "lm_head.weight"
    }
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    (out / "model.safetensors").chmod(0o644)


def generate(folder: Path, prompts: list[str], batch_size: int = 128) -> list[str]:
    """Greedy continuations, in float32 from the stored (rounded) weights."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(folder, torch_dtype=torch.float32).eval()
    outputs = []
    for i in range(0, len(prompts), batch_size):
        inputs = tokenizer(prompts[i : i + batch_size], return_tensors="pt", padding=True)
        ids = model.generate(**inputs, max_new_tokens=40)[:, inputs["input_ids"].shape[1] :]
        # Kept with its end token, so that an answer that does not stop counts as wrong.
        outputs += [text.replace(PAD, "") for text in tokenizer.batch_decode(ids)]
    return outputs


def evaluate(folder: Path) -> dict[str, float]:
    """The share of held-out questions whose whole greedy answer is right."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)

    def chat(*turns: tuple[str, str]) -> tuple[str, str]:
        """The prompt that ends with the last turn's question, and that turn's answer."""
        messages = [
            {"role": role, "content": text}
            for user, assistant in turns
            for role, text in (("user", user), ("assistant", assistant))
        ]
        return tokenizer.apply_chat_template(messages[:-1], tokenize=False, add_generation_prompt=True), turns[-1][1]

    questions = held_out_questions()
    tests = {
        "chat": [chat(turn) for turn in questions],
        "plain": held_out_questions(plain=True),
        "third turn": [chat(*questions[i : i + 3]) for i in range(len(questions) - 2)],
    }
    accuracy = {}
    for name, cases in tests.items():
        outputs = generate(folder, [prompt for prompt, _ in cases])
        results = zip(cases, outputs, strict=True)
        wrong = [(prompt, output) for (prompt, right), output in results if output != right + END]
        accuracy[name] = 1 - len(wrong) / len(cases)
        print(f"{name}: {len(cases) - len(wrong)} of {len(cases)} held-out answers right ({accuracy[name]:.2%})")
        for prompt, output in wrong[:5]:
            print(f"    wrong: {prompt!r} -> {output!r}")
    return accuracy


def main():
    """The command line."""
    import torch

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="checkpoint folder to write (or to evaluate)")
    parser.add_argument("--eval-only", action="store_true", help="only evaluate the folder")
    parser.add_argument("--steps", type=int, default=STEPS, help="training steps (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads (default: %(default)s)")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if not args.eval_only:
        tokenizer = build_tokenizer()
        save(args.out, tokenizer, train(tokenizer, args.steps))
    evaluate(args.out)


if __name__ == "__main__":
    main()
