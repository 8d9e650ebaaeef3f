"""Goes on with a stream whose engine has failed."""

from collections.abc import Callable
from contextlib import suppress

import orjson

from deepinfer_router.api import Kind
from deepinfer_router.delivery import Delivery
from deepinfer_router.errors import Refusal
from deepinfer_router.failure_config import FailureConfig
from deepinfer_router.hop import HopFailed, ask
from deepinfer_router.http_client import UpstreamError
from deepinfer_router.http_headers import find
from deepinfer_router.journey import Journey
from deepinfer_router.lease import Lease
from deepinfer_router.metrics import counter
from deepinfer_router.placement import Placed
from deepinfer_router.replacement import Replacement
from deepinfer_router.request import Request
from deepinfer_router.resume import KINDS, TAIL_CHARS, held_after_tail, held_back, resumed_changes, why_not_now
from deepinfer_router.transcript import Transcript
from deepinfer_router.upstreams import Upstreams

RESUMES = counter("resumes", "Streams that lost their engine, by how they went on: resumed, or why not.", "outcome")
_WISH = b"x-resume"
_DETOKENIZE_S = 5.0


class Resuming:
    """Decides which streams are recorded, and finds them another engine."""

    def __init__(
        self,
        replacement: Replacement,
        upstreams: Upstreams,
        delivery: Delivery,
        config: FailureConfig,
        clock: Callable[[], float],
    ) -> None:
        self._replacement = replacement
        self._upstreams = upstreams
        self._delivery = delivery
        self._config = config
        self._clock = clock

    def wanted(self, request: Request) -> bool:
        """Whether a stream is to be recorded: by the configuration, or the client's header."""
        if not request.stream or request.api.kind not in KINDS:
            return False
        wish = find(request.headers, _WISH)
        asked = self._config.resume if wish is None else wish.lower() == b"true"
        return asked and request.resumable

    def transcript(self, request: Request) -> Transcript:
        """Empty."""
        shows_ids = bool(request.fields.get("return_token_ids"))
        prompt = request.fields.get("token_ids") if request.api.kind is Kind.GENERATE else None
        return Transcript(request.api.kind, shows_ids=shows_ids, prompt_ids=prompt)

    async def again(self, journey: Journey, failure: HopFailed) -> Placed | None:
        """Where the rest comes from; None: the client has been told the end, or that there is none."""
        request, transcript = journey.request, journey.transcript
        if transcript is not None and transcript.finished:
            options = request.fields.get("stream_options") or {}
            journey.exchange.end(transcript.ending(include_usage=bool(options.get("include_usage"))))
            journey.outcome = "served"
            RESUMES.labels("finished").inc()
            return None
        why = "rejected" if failure.kind == "rejected" else self._why_not(journey)
        placed = None
        if not why:
            with suppress(Refusal):
                placed = await self._replacement.find(journey)
            why = "" if placed is not None else "no_other"
        if placed is not None:
            try:
                why = await self._rejoin(journey, placed)
            except BaseException:
                placed.release("cancelled")
                raise
        if why or placed is None:
            if placed is not None:
                placed.release("unused")
            RESUMES.labels(why).inc()
            journey.outcome = failure.kind
            code = "upstream_timeout" if failure.kind == "stalled" else "upstream_lost"
            self._delivery.break_off(journey, code, _said(failure, why))
            return None
        journey.resumes += 1
        RESUMES.labels("resumed").inc()
        return placed

    def _why_not(self, journey: Journey) -> str:
        request, transcript = journey.request, journey.transcript
        if transcript is None:
            return request.why_not_resumable or ("off" if request.api.kind in KINDS else "api")
        if journey.resumes >= self._config.max_resumes:
            return "too_often"
        shows_ids = bool(request.fields.get("return_token_ids"))
        return why_not_now(request.api.kind, transcript, shows_ids=shows_ids)

    async def _rejoin(self, journey: Journey, placed: Placed) -> str:
        """Prepare the body for the rest. Why it cannot be, a fixed word; empty: it can."""
        request, transcript = journey.request, journey.transcript
        assert transcript is not None
        told = transcript.told
        if request.api.kind is Kind.CHAT and told:
            held = await self._held(journey, transcript, placed.decode)
            if held is None:
                return "parser"
            transcript.held = held
        most = request.work.max_tokens
        if most is not None and most <= told:
            return "at_its_end"
        transcript.rewind()
        journey.changes = {
            **journey.changes,
            **resumed_changes(request.api.kind, request.fields, transcript, most),
        }
        request.work.prompt_tokens = len(transcript.prompt_ids or ()) + told
        return ""

    async def _held(self, journey: Journey, transcript: Transcript, lease: Lease) -> str | None:
        """What the lost engine's parser held back; None: it cannot be told."""
        told = transcript.ids[: transcript.told]
        tail = transcript.tail(TAIL_CHARS)
        if tail is not None:
            before, text, reasoning = tail
            raw = await self._text(journey, lease, told[before:])
            held = None if raw is None else held_after_tail(raw, text, reasoning)
            if held is not None:
                return held
        raw = await self._text(journey, lease, told)
        return None if raw is None else held_back(raw, *transcript.said())

    async def _text(self, journey: Journey, lease: Lease, ids: list[int]) -> str | None:
        """The text of token ids, as the engine that will go on writes it; None: it does not say."""
        body = orjson.dumps({"model": journey.request.fields.get("model"), "tokens": ids})
        headers = [*journey.headers, (b"content-type", b"application/json")]
        try:
            response = await ask(self._upstreams, lease, b"POST", b"/detokenize", headers, body, _DETOKENIZE_S)
            if response.status != 200:
                response.cancel()
                return None
            text = orjson.loads(await response.read(1 << 26, stall_s=_DETOKENIZE_S)).get("prompt")
        except (HopFailed, UpstreamError, orjson.JSONDecodeError, AttributeError):
            return None
        return text if isinstance(text, str) else None


def _said(failure: HopFailed, why: str) -> str:
    what = "fell silent" if failure.kind == "stalled" else "was lost"
    so = "resuming is off, which x-resume: true asks for" if why == "off" else f"it cannot be resumed ({why})"
    return f"the engine of this answer {what}, and {so}; ask again"
