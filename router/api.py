"""The HTTP interface of engines, as far as the router has to know it: which path is which API, where its fields are.

Paths and fields are those of vLLM 0.32. A path that is not here passes through untouched.
"""

from dataclasses import dataclass
from enum import StrEnum
from urllib.parse import unquote_to_bytes


class Kind(StrEnum):
    """What is asked for: a label of metrics."""

    CHAT = "chat"
    COMPLETION = "completion"
    RESPONSES = "responses"
    MESSAGES = "messages"
    GENERATE = "generate"
    """Token ids in, tokens out."""
    BATCH = "batch"
    """Several conversations at once."""
    EMBEDDING = "embedding"
    POOLING = "pooling"
    CLASSIFY = "classify"
    RERANK = "rerank"
    SCORE = "score"
    TOKENIZE = "tokenize"
    """Work of an API server alone: nothing reaches a GPU."""
    AUDIO = "audio"
    MODELS = "models"
    OTHER = "other"


class ErrorStyle(StrEnum):
    """Whose form errors have."""

    OPENAI = "openai"
    ANTHROPIC = "anthropic"


@dataclass(frozen=True, slots=True, eq=False)
class Api:
    """One API."""

    kind: Kind
    style: ErrorStyle = ErrorStyle.OPENAI
    json: bool = True
    """Its body is a JSON object, of which `model` and `stream` are read."""
    generates: bool = False
    """Answers with generated tokens of one prompt."""
    salted: bool = False
    """Its body may have a `cache_salt`."""
    prompt: str = ""
    """The field that holds the prompt."""
    max_tokens: tuple[str, ...] = ()
    """Fields that bound the answer; the first that is there decides."""
    in_sampling_params: bool = False
    """Those and the other sampling parameters are in an object `sampling_params`."""


OTHER = Api(Kind.OTHER, json=False)
CHAT = Api(
    Kind.CHAT, generates=True, salted=True, prompt="messages", max_tokens=("max_completion_tokens", "max_tokens")
)
COMPLETION = Api(Kind.COMPLETION, generates=True, salted=True, prompt="prompt", max_tokens=("max_tokens",))
RESPONSES = Api(Kind.RESPONSES, generates=True, salted=True, prompt="input", max_tokens=("max_output_tokens",))
MESSAGES = Api(
    Kind.MESSAGES,
    ErrorStyle.ANTHROPIC,
    generates=True,
    salted=True,
    prompt="messages",
    max_tokens=("max_tokens",),
)
GENERATE = Api(
    Kind.GENERATE,
    generates=True,
    salted=True,
    prompt="token_ids",
    max_tokens=("max_tokens",),
    in_sampling_params=True,
)
_BATCH = Api(Kind.BATCH, salted=True, max_tokens=CHAT.max_tokens)
_EMBEDDING = Api(Kind.EMBEDDING, salted=True)
_RERANK = Api(Kind.RERANK, salted=True)
_SCORE = Api(Kind.SCORE, salted=True)
_TOKENIZE = Api(Kind.TOKENIZE)
_MESSAGES_TOKENIZE = Api(Kind.TOKENIZE, ErrorStyle.ANTHROPIC)
_AUDIO = Api(Kind.AUDIO, json=False)

POSTED = {
    b"/v1/chat/completions": CHAT,
    b"/v1/chat/completions/batch": _BATCH,
    b"/v1/completions": COMPLETION,
    b"/v1/responses": RESPONSES,
    b"/v1/messages": MESSAGES,
    b"/inference/v1/generate": GENERATE,
    b"/v1/embeddings": _EMBEDDING,
    b"/v2/embed": _EMBEDDING,
    b"/pooling": Api(Kind.POOLING, salted=True),
    b"/classify": Api(Kind.CLASSIFY, salted=True),
    b"/rerank": _RERANK,
    b"/v1/rerank": _RERANK,
    b"/v2/rerank": _RERANK,
    b"/score": _SCORE,
    b"/v1/score": _SCORE,
    b"/tokenize": _TOKENIZE,
    b"/detokenize": _TOKENIZE,
    b"/v1/messages/count_tokens": _MESSAGES_TOKENIZE,
    b"/v1/chat/completions/render": _TOKENIZE,
    b"/v1/completions/render": _TOKENIZE,
    b"/v1/responses/render": _TOKENIZE,
    b"/v1/messages/render": _MESSAGES_TOKENIZE,
    b"/v1/audio/transcriptions": _AUDIO,
    b"/v1/audio/translations": _AUDIO,
}
"""By path, of POST requests."""

MODELS = Api(Kind.MODELS, json=False)


def api_of(method: bytes, route: bytes) -> Api:
    """The API that a request's method and path (without its query) ask for."""
    if method == b"POST":
        return POSTED.get(route) or POSTED.get(_as_engines_read(route), OTHER)
    return MODELS if route == b"/v1/models" and method == b"GET" else OTHER


def _as_engines_read(route: bytes) -> bytes:
    """The path as uvicorn and Starlette match it: else another spelling of it would pass what a key may not."""
    return unquote_to_bytes(route.partition(b"#")[0]).removesuffix(b"\n")
