"""The checkpoint's tokenizer and the end tokens that its files name."""

import os
from pathlib import Path
from typing import Any

from nanovllm.models.config import ModelConfig, read_json
from nanovllm.sampling_params import SamplingParams

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "vocab.json", "tokenizer.model")


def has_tokenizer(folder: Path) -> bool:
    """Return whether the folder has tokenizer files."""
    return any(os.path.lexists(folder / name) for name in _TOKENIZER_FILES)


def load_tokenizer(folder: Path) -> Any:
    """Return the folder's tokenizer (a transformers tokenizer), or None if the folder has no tokenizer files.

    Raises:
        ValueError: The files cannot be read as a tokenizer.
    """
    if not has_tokenizer(folder):
        return None
    read_json(folder / "tokenizer_config.json")  # transformers passes over one that it cannot read
    try:
        if os.path.lexists(folder / "tokenizer.json"):
            from transformers import PreTrainedTokenizerFast

            return PreTrainedTokenizerFast.from_pretrained(folder)
        from transformers import AutoTokenizer  # imports for seconds, so only where the fast form is absent

        return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # the tokenizers library raises bare Exceptions
        read_json(folder / "tokenizer.json")  # names the file, if that is what is broken
        raise ValueError(f"The tokenizer in {str(folder)!r} cannot be loaded: {error}") from error


def decode(tokenizer: Any, token_ids: list[int], skip_special_tokens: bool = True) -> str:
    """Return the text of a completion, without a character that its end cuts through; "" without a tokenizer."""
    if tokenizer is None:
        return ""
    return tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens).rstrip("\ufffd")


class StopStringFinder:
    """Decodes one completion as it grows and looks for stop strings, at a cost that does not grow with it.

    Args:
        tokenizer: The model's tokenizer.
        params: Names the stop strings, and how they and special tokens show in the text.
    """

    def __init__(self, tokenizer: Any, params: SamplingParams) -> None:
        self.tokenizer = tokenizer
        self.params = params
        self.text = ""  # up to the last token that completes a character
        self.end: int | None = None  # where the text ends, once a stop string is found
        self._prefix = self._read = 0  # tokens decoded for context; tokens whose text is in `text`

    def find(self, token_ids: list[int], start: int) -> str | None:
        """Take in a completion that has grown by one token; return the stop string that this completed, if any.

        Args:
            token_ids: Prompt and completion.
            start: Where the completion starts in it.
        """
        old_len = len(self.text)
        self._read_text(token_ids, start)
        if len(token_ids) - start < self.params.min_tokens:
            return None
        found = []
        for order, stop in enumerate(self.params.stop or ()):
            at = self.text.find(stop, max(0, old_len - len(stop) + 1))
            if at >= 0:
                found.append((at, order, stop))
        if not found:
            return None
        at, _, stop = min(found)
        self.end = at + len(stop) if self.params.include_stop_str_in_output else at
        return stop

    def _read_text(self, token_ids: list[int], start: int) -> None:
        prefix, end = start + self._prefix, len(token_ids) - start
        before = self._decode(token_ids[prefix : start + self._read])
        text = self._decode(token_ids[prefix:])
        if text.endswith("\ufffd"):
            # Perhaps the middle of a character. None has more than four bytes, so older tokens cannot be part of it.
            if end - self._read < 4:
                return
            end = self._read + 1
            self.text += self._decode(token_ids[prefix : start + end])[len(before) :]
            # A broken character has at most three bytes: with so many for context it is not counted again.
            self._prefix, self._read = max(self._prefix, end - 3), end
            return
        self.text += text[len(before) :]
        self._prefix, self._read = self._read, end

    def _decode(self, token_ids: list[int]) -> str:
        return self.tokenizer.decode(token_ids, skip_special_tokens=self.params.skip_special_tokens)


def split_reasoning(text: str, starts_open: bool) -> tuple[str | None, str]:
    """Return a thinking model's text before ``</think>`` (None if it did not think) and its answer.

    Args:
        text: The completion.
        starts_open: Whether the prompt ends with an open ``<think>``.
    """
    stripped = text.lstrip()
    if not starts_open and not stripped.startswith("<think>"):
        return None, text
    reasoning, _, answer = stripped.removeprefix("<think>").partition("</think>")
    return reasoning.strip("\n"), answer.lstrip("\n")


def end_token_ids(tokenizer: Any, model_config: ModelConfig) -> frozenset[int]:
    """Return every token that ends a completion: those of tokenizer, config and generation config together."""
    own_id = None if tokenizer is None else tokenizer.eos_token_id
    # A tokenizer may know more tokens than the model; one that has no logit can never come, nor be held back.
    own_ids = {own_id} if own_id is not None and own_id < model_config.vocab_size else set()
    return frozenset(model_config.eos_token_ids) | own_ids
