"""What policies know of a request: sizes and who asks, never its text."""

from dataclasses import dataclass


@dataclass(slots=True)
class Work:
    """One request, as large as it is known to be. Made at the entry; hits are filled in by CHECK."""

    model: str = ""
    prompt_tokens: int = 0
    """All tokens of the prompt: counted where they are known, else estimated from bytes."""
    hit_tokens: int = 0
    """How many of them the store has."""
    max_tokens: int | None = None
    expected_output: int = 256
    """Tokens that an answer is likely to have."""
    images: int = 0
    pixels: int = 0
    """Of its images; 0: not known."""
    tenant: str = ""
    priority: int = 0
    """Smaller is sooner, as in vLLM."""
    deadline: float | None = None
    """On the event loop's clock, seconds."""
    lora: str = ""
    session: str = ""
    """Name of the conversation, where the client gives one."""
    excluded: tuple[str, ...] = ()
    """Ids of engines that have failed it."""

    @property
    def uncached_tokens(self) -> int:
        """q of cost(q, c): what has to be computed, at least one token."""
        tokens = self.prompt_tokens - self.hit_tokens
        return tokens if tokens > 1 else 1

    @property
    def kv_tokens(self) -> int:
        """What its decode is expected to hold."""
        return self.prompt_tokens + self.expected_output
