"""The cost of calls of language models, by the price list that the operator keeps in the home's `model_prices.json`.

    {"currency": "USD", "models": {"anthropic:claude-sonnet-5": {"input": 3, "output": 15, "cache_read": 0.3}}}

A price is for a million tokens. A model is named as `provider:name`, or by its name alone. Tokens that were read from a
provider's cache, or written to it, cost as much as other input unless the list says otherwise. Decoding is strict: an
unknown key or a wrong value is refused with a JSON pointer to it.
"""

from __future__ import annotations

from typing import Annotated, Final, NamedTuple

import msgspec

from covenant.model.agent_definition import explain_invalid
from covenant.model.errors import Invalid

MODELS_MAX: Final = 1_000
PER: Final = 1_000_000
"""The number of tokens that a price is for."""

Amount = Annotated[float, msgspec.Meta(ge=0, le=1_000_000)]
Currency = Annotated[str, msgspec.Meta(pattern=r"\A[A-Z]{3}\Z")]
ModelKey = Annotated[str, msgspec.Meta(min_length=1, max_length=200)]


class ModelTokens(NamedTuple):
    """Tokens that one model call used. Cached tokens are part of the input."""

    input: int = 0
    output: int = 0
    cache_read: int = 0
    cache_write: int = 0


class ModelCall(NamedTuple):
    """A finished call of a language model."""

    agent: str
    model: str
    """`provider:name`."""
    outcome: str
    """`completed`, `canceled`, `stopped`, or the reason of a failure from a closed list."""
    seconds: float
    tokens: ModelTokens
    cost: float | None
    """None: the price list has no price for this model."""
    currency: str


class ToolCall(NamedTuple):
    """A finished call of a tool by a model."""

    agent: str
    tool: str
    outcome: str
    """`completed`, `failed` or `canceled`."""
    seconds: float


class ModelPrice(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    input: Amount
    output: Amount
    cache_read: Amount | None = None
    cache_write: Amount | None = None


class ModelPrices(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    currency: Currency = "USD"
    models: Annotated[dict[ModelKey, ModelPrice], msgspec.Meta(max_length=MODELS_MAX)] = {}

    def cost(self, model: str, tokens: ModelTokens) -> float | None:
        """The cost of a call of `model`, which is `provider:name`. None: the list has no price for it."""
        price = self.models.get(model) or self.models.get(model.partition(":")[2])
        if price is None:
            return None
        read, written = tokens.cache_read, tokens.cache_write
        parts = (
            (max(0, tokens.input - read - written), price.input),
            (read, price.input if price.cache_read is None else price.cache_read),
            (written, price.input if price.cache_write is None else price.cache_write),
            (tokens.output, price.output),
        )
        return sum(count * amount for count, amount in parts) / PER


NO_PRICES: Final = ModelPrices()


def read_model_prices(given: object) -> ModelPrices:
    """Returns the price list from decoded JSON."""
    try:
        return msgspec.convert(given, ModelPrices)
    except msgspec.ValidationError as wrong:
        raise Invalid("invalid_model_prices", explain_invalid(str(wrong), ModelPrices)) from None
