"""What a CHECK client says, whichever way its bytes travel: hashes prompts, remembers conversations, reads answers."""

from array import array
from collections import OrderedDict
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from threading import Lock
from time import monotonic

import xxhash

from deepinfer_kvstore.chain import Chain, ChainHasher, Tokens, as_tokens
from deepinfer_kvstore.extra_keys import NOTHING_EXTRA, ExtraKeys
from deepinfer_kvstore.keys import HASH_BYTES
from deepinfer_kvstore.protocol import (
    MAX_FRAME_BYTES,
    MAX_REQUESTS,
    CheckReply,
    CheckRequest,
    Code,
    Message,
    ProtocolError,
    read_reply,
)

CONVERSATION_BYTES = 16 << 20
"""Hashes that a client keeps,"""
MAX_TURNS = 1 << 14
"""of so many conversations."""
NAMESPACES_SECONDS = 1.0
"""A namespace that is not there is not asked for again for so long."""
ONLY_ONE_SECONDS = 10.0
"""The only namespace is asked for again after so long."""

Dialogue = Generator[Message, Message, list["Answer"]]
"""Yields what to send, gets what came back."""


@dataclass(frozen=True)
class Question:
    """How much of this prompt is stored?"""

    namespace: str
    """Name of its directory, or of its model where that has one only. Empty: the only one that the store has."""
    tokens: Tokens = ()
    hashes: Sequence[bytes] | None = None
    """Block hashes, where the caller has them: tokens are then not looked at."""
    extra: ExtraKeys = NOTHING_EXTRA
    conversation: str | None = None
    """A name of the caller's, under which the next turn hashes and sends its new tokens only."""
    ticket_seconds: float = 0.0
    """Hold what is found for so long (at most an hour)."""
    tenant: str = ""


@dataclass(frozen=True)
class Answer:
    """The answer; where there is none, no tokens and the reason."""

    hit_tokens: int = 0
    load_bytes: int = 0
    tier: str = "none"
    ticket: bytes = b""
    reason: str = ""
    """Empty: it was answered. Else a `Code`, or timeout, unreachable."""


UNANSWERED = (ProtocolError, OSError, EOFError)
"""What becomes an answer with a reason: the server refuses, is gone, is late."""


def unanswered(error: BaseException, questions: int) -> list[Answer]:
    """The answers to questions of which that became."""
    if isinstance(error, ProtocolError):
        reason = str(error.code)
    else:
        reason = "timeout" if isinstance(error, TimeoutError) else "unreachable"
    return [Answer(reason=reason)] * questions


@dataclass(frozen=True)
class _Turn:
    """What is known of a conversation: the whole blocks so far."""

    extra: ExtraKeys
    tokens: int
    digest: bytes
    """xxh3_128 of the tokens: whether the next turn begins with them."""
    packed: bytes
    """Root and hashes."""


@dataclass
class _Asked:
    """A question on its way."""

    question: Question
    packed: bytes = b""
    """Root and hashes."""
    length: int | None = None
    turn: _Turn | None = None
    """To be remembered once the server has the chain."""
    after: int = 0
    """Hashes that the server is believed to have."""
    answer: Answer = field(default_factory=Answer)
    name: str = ""

    def request(self) -> Message:
        end = HASH_BYTES * (1 + self.after)
        return CheckRequest(
            self.name,
            hashes=self.packed[end:],
            length=self.length,
            after=self.packed[end - HASH_BYTES : end] if self.after else b"",
            keep=self.question.conversation is not None,
            ticket_seconds=self.question.ticket_seconds,
            tenant=self.question.tenant,
        ).message()


class Questions:
    """The memory of one client. Thread-safe."""

    def __init__(self, *, compiled: bool = True) -> None:
        self._compiled = compiled
        self._hashers: dict[str, tuple[str, ChainHasher]] = {}
        self._asked_at = -NAMESPACES_SECONDS
        self._turns: OrderedDict[tuple[str, str], _Turn] = OrderedDict()
        self._turn_bytes = 0
        self._lock = Lock()

    def ask(self, questions: Sequence[Question]) -> Dialogue:
        """The dialogue that answers `questions`, in their order.

        Raises:
            ValueError: token ids that are none, or too many questions at once.
            ProtocolError: the server says something else than an answer.
        """
        if len(questions) > MAX_REQUESTS:
            raise ValueError(f"{len(questions)} questions at once: at most {MAX_REQUESTS}")
        age = monotonic() - self._asked_at
        unknown = any(question.namespace not in self._hashers for question in questions)
        # Another may have come, and there is no only one any more.
        unsure = age >= ONLY_ONE_SECONDS and any(not question.namespace for question in questions)
        if unsure or (unknown and age >= NAMESPACES_SECONDS):
            self._learn((yield {"op": "namespaces"}))
            self._asked_at = monotonic()
        asked = [self._hash(question) for question in questions]
        left = [one for one in asked if one.name]
        for _ in range(2):  # once more for chains that the server has forgotten
            again: list[_Asked] = []
            for batch in _batches(left):
                again += self._settle(batch, (yield {"op": "check", "requests": [one.request() for one in batch]}))
            left = again
        return [one.answer for one in asked]

    def _learn(self, message: Message) -> None:
        found = message.get("namespaces")
        if not isinstance(found, list):
            raise ProtocolError(Code.MALFORMED, "namespaces must be a list")
        by_name: dict[str, tuple[str, ChainHasher]] = {}
        models: list[str] = []
        for one in found:
            match one:
                case {
                    "name": str(name),
                    "model": str(model),
                    "hash_tokens": int(hash_tokens),
                    "none_hash": bytes(root),
                } if hash_tokens > 0 and len(root) == HASH_BYTES:
                    by_name[name] = by_name[model] = name, ChainHasher(hash_tokens, root, compiled=self._compiled)
                    models.append(model)
        for model in models:
            if models.count(model) > 1:
                by_name.pop(model, None)
        if len(models) == 1:
            by_name[""] = by_name[models[0]]
        self._hashers = by_name

    def _hash(self, question: Question) -> _Asked:
        known = self._hashers.get(question.namespace)
        if known is None:
            return _Asked(question, answer=Answer(reason=str(Code.NAMESPACE)))
        name, hasher = known
        if question.hashes is not None:
            return _Asked(question, hasher.root + b"".join(question.hashes), name=name)
        tokens = as_tokens(question.tokens)
        if question.conversation is None:
            chain = Chain(hasher, question.extra)
            chain.extend(tokens)
            return _Asked(question, bytes(chain.packed), len(tokens), name=name)
        before = self._last_turn(name, question, tokens)
        start, packed = (before.tokens, before.packed) if before else (0, hasher.root)
        chain = Chain(hasher, question.extra, bytearray(packed))
        chain.extend(tokens[start:])
        whole = len(chain.packed) // HASH_BYTES * hasher.hash_tokens - hasher.hash_tokens
        turn = _Turn(question.extra, whole, _digest(tokens, whole), bytes(chain.packed))
        return _Asked(question, turn.packed, len(tokens), turn, start // hasher.hash_tokens, name=name)

    def _last_turn(self, name: str, question: Question, tokens: "array[int]") -> _Turn | None:
        """What the prompt goes on from: the conversation's last turn, if the prompt begins as it did."""
        assert question.conversation is not None
        with self._lock:
            turn = self._turns.get((name, question.conversation))
        if turn is None or len(tokens) < turn.tokens or _digest(tokens, turn.tokens) != turn.digest:
            return None
        return turn if _start(turn.extra, turn.tokens) == _start(question.extra, turn.tokens) else None

    def _settle(self, asked: list[_Asked], message: Message) -> list[_Asked]:
        """Read the replies; the questions whose chain has to be sent whole."""
        replies = [message] * len(asked) if "error" in message else message.get("replies")
        if not isinstance(replies, list) or len(replies) != len(asked):
            raise ProtocolError(Code.MALFORMED, f"{len(asked)} requests need as many replies")
        again = []
        for one, message in zip(asked, replies, strict=True):
            try:
                reply = read_reply(message)
            except ProtocolError as error:
                one.answer = Answer(reason=str(error.code))
                if error.code is Code.NAMESPACE:
                    self._hashers.pop(one.question.namespace, None)
                if error.code is Code.RESEND and one.after:
                    one.after = 0
                    again.append(one)
            else:
                one.answer = Answer(reply.hit_tokens, reply.load_bytes, reply.tier, reply.ticket)
                self._remember(one, reply)
        return again

    def _remember(self, one: _Asked, reply: CheckReply) -> None:
        if one.turn is None or one.question.conversation is None:
            return
        place = one.name, one.question.conversation
        with self._lock:
            if before := self._turns.pop(place, None):
                self._turn_bytes -= len(before.packed)
            if (
                reply.tail != one.packed[-HASH_BYTES:]
            ):  # the server keeps no chain, or the prompt is shorter than a block
                return
            self._turns[place] = one.turn
            self._turn_bytes += len(one.packed)
            while self._turn_bytes > CONVERSATION_BYTES or len(self._turns) > MAX_TURNS:
                _, oldest = self._turns.popitem(last=False)
                self._turn_bytes -= len(oldest.packed)


def _batches(asked: Iterable[_Asked]) -> Iterator[list[_Asked]]:
    """What fits into frames together."""
    batch: list[_Asked] = []
    for one in asked:
        if batch and sum(len(each.packed) for each in batch) + len(one.packed) > MAX_FRAME_BYTES // 2:
            yield batch
            batch = []
        batch.append(one)
    if batch:
        yield batch


def _digest(tokens: "array[int]", count: int) -> bytes:
    digest: bytes = xxhash.xxh3_128_digest(memoryview(tokens)[:count])
    return digest


def _start(extra: ExtraKeys, tokens: int) -> tuple[object, ...]:
    """What of the extra keys decides the hashes of the first `tokens` tokens."""
    return extra.salt, extra.lora, [item for item in extra.mm if item.offset < tokens]
