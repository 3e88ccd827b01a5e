"""Two chat prompts, answered: `python example.py` or `python example.py MODEL` (a folder or a hub id)."""

import sys

from nanovllm import LLM, SamplingParams


def main() -> None:
    """Answer two prompts through the model's chat template and print them."""
    model = sys.argv[1] if len(sys.argv) > 1 else "embedded"
    questions = ["What is twenty-three plus forty-five?", "What is 58 + 67?"]
    if model != "embedded":
        questions = ["Introduce yourself.", "List all prime numbers below 100."]
    with LLM(model) as llm:
        params = SamplingParams(temperature=0 if model == "embedded" else 0.6, max_tokens=256)
        outputs = llm.chat([[{"role": "user", "content": question}] for question in questions], params, use_tqdm=False)
    for question, output in zip(questions, outputs, strict=True):
        print(f"Prompt: {question}\nAnswer: {output['text']}\n")


if __name__ == "__main__":
    main()
