"""CHECK: how much of a prompt is stored. Answers from the local index; touches no other disk and starts no I/O."""

from collections.abc import Callable
from time import monotonic, time

from deepinfer_kvstore.chain import Chain, HashRow
from deepinfer_kvstore.conversations import Conversations
from deepinfer_kvstore.hit import hit_tokens
from deepinfer_kvstore.keys import HASH_BYTES
from deepinfer_kvstore.metrics import Metrics
from deepinfer_kvstore.namespaces import Namespace, Namespaces
from deepinfer_kvstore.protocol import CheckReply, CheckRequest, Code, ProtocolError
from deepinfer_kvstore.tickets import Ticket, Tickets

CONVERSATION_BYTES = 8 << 20
TICKET_BYTES = 8 << 20


class Checker:
    """Answers CHECKs over some namespaces, in a daemon or inside an engine's process. Thread-safe."""

    def __init__(self, namespaces: Namespaces, metrics: Metrics, clock: Callable[[], float] = time) -> None:
        """`clock` is Unix time in seconds, as blocks are touched with."""
        self.namespaces = namespaces
        self._metrics = metrics
        self._clock = clock
        self._conversations = Conversations(CONVERSATION_BYTES)
        self._tickets = Tickets(TICKET_BYTES)
        metrics.conversations.set_function(lambda: self._conversations.bytes)
        metrics.tickets.set_function(lambda: len(self._tickets))

    def check(self, request: CheckRequest) -> CheckReply:
        """The answer to one question.

        Raises:
            ProtocolError: no such namespace, or a chain to go on from that is not kept.
        """
        began = monotonic()
        try:
            reply, tokens = self._check(request)
        except ProtocolError as error:
            self._metrics.checks.labels(str(error.code)).inc()
            raise
        self._metrics.check_seconds.observe(monotonic() - began)
        self._metrics.checks.labels("hit" if reply.hit_tokens else "miss").inc()
        self._metrics.count_tokens(request.tenant, tokens, reply.hit_tokens)
        return reply

    def redeem(self, ticket: bytes) -> Ticket:
        """What a ticket holds.

        Raises:
            ProtocolError: it is unknown, or over.
        """
        found = self._tickets.get(ticket)
        if found is None:
            raise ProtocolError(Code.TICKET, "the ticket is unknown, or its time is over")
        return found

    def release(self, ticket: bytes) -> None:
        """A ticket is needed no more. Its blocks age from when it would have ended."""
        self._tickets.release(ticket)

    def _check(self, request: CheckRequest) -> tuple[CheckReply, int]:
        namespace = self.find(request.namespace)
        packed, length = self._hashes(namespace, request)
        hit = hit_tokens(namespace.index, namespace.descriptor, HashRow(packed), length)
        ticket = b""
        if hit.tokens and request.ticket_seconds:
            ticket = self._tickets.issue(namespace.name, hit.keys, request.ticket_seconds)
            deepest = [row[-1] for row in hit.blocks]  # those before it are held with it
            namespace.pin(deepest, int(1000 * (self._clock() + request.ticket_seconds)))
        tail = self._conversations.keep(namespace.name, packed, request.after) if request.keep else b""
        return CheckReply(hit.tokens, hit.bytes, "store" if hit.tokens else "none", ticket, tail), length

    def _hashes(self, namespace: Namespace, request: CheckRequest) -> tuple[bytes, int]:
        """All hashes of the prompt, in a row, and how many tokens it has."""
        before = b""
        if request.after:
            kept = self._conversations.get(namespace.name, request.after)
            if kept is None:
                raise ProtocolError(Code.RESEND, "the chain to go on from is not kept: send it whole")
            before = kept
        if request.tokens is None:
            packed = before + (request.hashes or b"")
            covered = len(packed) // HASH_BYTES * namespace.descriptor.hash_tokens
            return packed, covered if request.length is None else max(covered, request.length)
        chain = Chain(namespace.hasher, request.extra, bytearray(namespace.hasher.root + before))
        chain.extend(request.tokens)
        return bytes(memoryview(chain.packed)[HASH_BYTES:]), chain.tokens

    def find(self, name: str) -> Namespace:
        """A namespace by the name of its directory, or of its model.

        Raises:
            ProtocolError: none, or several of that model.
        """
        if found := self.namespaces.get(name):
            return found
        of_model = [namespace for namespace in self.namespaces.all() if namespace.descriptor.model == name]
        if len(of_model) == 1:
            return of_model[0]
        names = ", ".join(sorted(namespace.name for namespace in of_model))
        raise ProtocolError(
            Code.NAMESPACE, f"{name!r} has several namespaces, name one: {names}" if names else f"{name!r} is not here"
        )
