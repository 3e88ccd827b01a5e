"""SamplingParams: how one request's tokens are chosen and when it ends, checked on construction."""

from dataclasses import dataclass

from nanovllm.utils.checks import check_bool, check_float, check_int, strict_keywords

GREEDY_TEMPERATURE = 1e-10  # at or under this a row is greedy


@strict_keywords
@dataclass(frozen=True)
class SamplingParams:
    """Sampling settings of one request.

    Args:
        temperature: 0 (or at most 1e-10) takes the likeliest token, exactly; else logits are divided by it.
        max_tokens: Tokens to generate at most; None: up to the engine's `max_model_len`.
        ignore_eos: True: end tokens do not end the request.
        seed: With it the request draws the same tokens whatever else runs beside it; None: from the engine's seed
            and the request's number.

    Raises:
        TypeError: Unknown keyword or a value of the wrong type.
        ValueError: A value out of range.
    """

    temperature: float = 1.0
    max_tokens: int | None = 64
    ignore_eos: bool = False
    seed: int | None = None

    def __post_init__(self) -> None:
        check_float("temperature", self.temperature, 0.0)
        if self.max_tokens is not None:
            check_int("max_tokens", self.max_tokens, 1)
        check_bool("ignore_eos", self.ignore_eos)
        if self.seed is not None:
            check_int("seed", self.seed, -(2**63), 2**64 - 1)

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is taken instead of a draw."""
        return self.temperature <= GREEDY_TEMPERATURE
