"""A tokenizer.json with V4.1's special tokens, and entries that encode with it."""

from pathlib import Path
from typing import Any

from deepinfer_router.entry import Entry
from deepinfer_router.entry_config import EntryConfig
from deepinfer_router.recipe_config import RecipeConfig
from deepinfer_vllm.checkpoint.tokenizer import build_tokenizer


def write_tokenizer(directory: Path) -> Path:
    """A small one: 1024 tokens."""
    path = directory / "tokenizer.json"
    build_tokenizer(1024).save(str(path))
    return path


def recipe_entry(tokenizer: Path, recipe: dict[str, Any] | None = None, **sections: Any) -> Entry:
    """An entry with `encoding: recipe`; `sections` are the other sections of the configuration."""
    return Entry(EntryConfig(encoding="recipe", recipe=RecipeConfig(tokenizer=tokenizer, **(recipe or {}))), **sections)
