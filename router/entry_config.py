"""Section `entry`: how requests are read."""

from typing import Literal

from deepinfer_router.grammar_config import GrammarConfig
from deepinfer_router.recipe_config import RecipeConfig
from deepinfer_router.section import BaseModel, ConfigDict, Field


class Adapter(BaseModel):
    """A LoRA adapter, which clients ask for as a model."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str = Field(description="The model that it adapts.")
    path: str = Field(default="", description="Its path, as engines were told it: a part of the hashes of its prompts.")


class EntryConfig(BaseModel):
    """How requests are read."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    encoding: Literal["engine", "recipe"] = Field(
        default="engine",
        description="Who makes tokens of a conversation: the engine, from the body as it came; or deepseek-recipe "
        "here, as the official API does, and the engine is sent the token ids.",
    )
    recipe: RecipeConfig = Field(default=RecipeConfig(), description="For `encoding: recipe`.")
    grammar: GrammarConfig = Field(default=GrammarConfig(), description="Checks of structured outputs.")
    tokens_per_byte: float = Field(
        default=0.25,
        gt=0,
        le=2,
        description="Tokens that a byte of a body is, until answers have told it of a model.",
    )
    image_tokens: int = Field(default=1000, ge=0, description="Tokens that an image is, where they are not counted.")
    deadline_header: str = Field(
        default="x-request-timeout-ms",
        description="Header with the milliseconds after which the client needs no answer.",
    )
    unknown_routes: Literal["pass", "refuse"] = Field(
        default="pass",
        description="Paths of no API that the router knows: passed as they are, with what they say of salts and "
        "stores, or refused.",
    )
    adapters: dict[str, Adapter] = Field(default={}, description="LoRA adapters by the name that clients ask for.")
