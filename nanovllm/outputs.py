"""RequestOutput: what a caller gets back for one prompt."""

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any


@dataclass(frozen=True)
class RequestOutput:
    """One finished request. Reads like a dataclass and like a dict (``out["text"]``, ``dict(out)``).

    Attributes:
        index: Position of the prompt in its call (0 for requests added by `add_request`).
        request_id: The number that `add_request` returned.
        text: The completion without special tokens.
        token_ids: The completion's token ids, an end token included.
        prompt_token_ids: The prompt's token ids.
        finish_reason: "stop" (end token), "length" (`max_tokens` or `max_model_len` reached) or "error".
        num_cached_tokens: Prompt tokens found in the prefix cache.
        error: What went wrong when `finish_reason` is "error", else None.
    """

    index: int
    request_id: int
    text: str
    token_ids: list[int]
    prompt_token_ids: list[int]
    finish_reason: str
    num_cached_tokens: int = 0
    error: str | None = None

    def keys(self) -> list[str]:
        """Return the field names, so that ``dict(output)`` works."""
        return [f.name for f in fields(self)]

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as a plain dict, ready for JSON."""
        return {name: getattr(self, name) for name in self.keys()}

    def __getitem__(self, name: str) -> Any:
        if name not in self.keys():
            raise KeyError(name)
        return getattr(self, name)

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys())

    def __contains__(self, name: object) -> bool:
        return name in self.keys()
