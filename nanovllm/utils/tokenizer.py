"""The checkpoint's tokenizer and the end tokens that its files name."""

from pathlib import Path
from typing import Any

from nanovllm.models.config import ModelConfig

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "vocab.json", "tokenizer.model")


def load_tokenizer(folder: Path) -> Any:
    """Return the folder's tokenizer (a transformers tokenizer), or None if the folder has no tokenizer files.

    Raises:
        ValueError: The files cannot be read as a tokenizer.
    """
    if not any((folder / name).exists() for name in _TOKENIZER_FILES):
        return None
    try:
        if (folder / "tokenizer.json").exists():
            from transformers import PreTrainedTokenizerFast

            return PreTrainedTokenizerFast.from_pretrained(folder)
        from transformers import AutoTokenizer  # imports for seconds, so only where the fast form is absent

        return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # the tokenizers library raises bare Exceptions
        raise ValueError(f"The tokenizer in {str(folder)!r} cannot be loaded: {error}") from error


def end_token_ids(tokenizer: Any, model_config: ModelConfig) -> frozenset[int]:
    """Return every token that ends a completion: those of tokenizer, config and generation config together."""
    ids = set(model_config.eos_token_ids)
    if tokenizer is not None and tokenizer.eos_token_id is not None:
        ids.add(tokenizer.eos_token_id)
    return frozenset(ids)
