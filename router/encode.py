"""Images computed by encoder engines before their prompt is: contract of vLLM 0.32's encoder-cache connectors.

Each image alone, as a request for one token, to the encoder with the least to do; what it says in
`ec_transfer_params` goes with the prompt. Images stay in the prompt's body, so an encoder that fails costs time and no
request: the prefill engine encodes what it does not find.
"""

import asyncio
from collections.abc import Callable
from random import Random
from typing import Any

import orjson

from deepinfer_router.encoder import EncoderPolicy
from deepinfer_router.fleet import Fleet
from deepinfer_router.hop import HopFailed, ask
from deepinfer_router.http_client import UpstreamError
from deepinfer_router.http_headers import uncoded
from deepinfer_router.image_size import pixels
from deepinfer_router.journey import Journey
from deepinfer_router.lease import Lease
from deepinfer_router.media import Encoded, encoder_body, media_parts
from deepinfer_router.metrics import counter
from deepinfer_router.roles import Role
from deepinfer_router.upstreams import Upstreams
from deepinfer_router.work import Work

IMAGES = counter("encoded_images", "Images that encoders were asked for, by how that ended.", "outcome")
_MAX_BYTES = 64 << 20


class Encoding:
    """The encoder stage. The event loop's thread only."""

    def __init__(
        self,
        fleet: Fleet,
        policy: EncoderPolicy,
        upstreams: Upstreams,
        encoded: Encoded,
        patience_s: float,
        clock: Callable[[], float],
        rng: Random,
    ) -> None:
        """`patience_s`: an image that takes longer is left to the prefill engine."""
        self._fleet = fleet
        self._policy = policy
        self._upstreams = upstreams
        self._encoded = encoded
        self._patience_s = patience_s
        self._clock = clock
        self._rng = rng

    def wanted(self, work: Work) -> bool:
        """Whether there is anything to encode, and somebody who does."""
        return bool(work.images) and bool(self._fleet.targets(Role.ENCODE, work.model))

    async def run(self, journey: Journey) -> None:
        """Have all images of a request encoded; what the prompt's engine needs for that goes into its body."""
        request = journey.request
        parts = media_parts(request.api, request.fields)
        params: dict[str, Any] = {}
        if len(parts) == 1:
            params = await self._encode(journey, parts[0], 0)
        else:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._encode(journey, part, n)) for n, part in enumerate(parts)]
            for task in tasks:
                params |= task.result()
        if params:
            journey.changes = {**journey.changes, "ec_transfer_params": params}

    async def _encode(self, journey: Journey, part: dict[str, Any], number: int) -> dict[str, Any]:
        """What an encoder says of one image, the `number`th; empty where none does."""
        body = encoder_body(journey.request.api, journey.request.fields, part)
        known = self._encoded.find(body, self._clock())
        if known is not None:
            IMAGES.labels("known").inc()
            return known
        whole = journey.request.work
        work = Work(model=whole.model, images=1, pixels=pixels(part), tenant=whole.tenant)
        tries = 2
        while tries:
            pick = self._policy.pick(work, self._fleet.targets(Role.ENCODE, work.model), self._clock(), self._rng)
            if pick is None:
                break
            engine = pick.target.engine
            with self._fleet.book(pick.target, work, Role.ENCODE, self._policy.seconds(work)) as lease:
                try:
                    return await self._ask(journey, lease, body, number)
                except HopFailed as failure:
                    IMAGES.labels(failure.kind).inc()
                    if failure.kind == "pressure":
                        self._fleet.pressured(engine)
                    else:
                        self._fleet.failed(engine, failure.kind, unreachable=failure.kind == "connect")
                    work.excluded += (engine.id,)
                    tries -= failure.sent  # one that is not there has cost nothing
        return {}

    async def _ask(self, journey: Journey, lease: Lease, body: bytes, number: int) -> dict[str, Any]:
        """Raises HopFailed."""
        exchange, engine = journey.exchange, lease.target.engine
        headers = [header for header in uncoded(journey.headers) if header[0] not in (b"content-type", b"x-request-id")]
        headers.append((b"content-type", b"application/json"))
        # Images of one request may meet at one engine, which tells requests apart by their ids.
        headers.append((b"x-request-id", b"%b-image-%d" % (journey.request.request_id, number)))
        response = await ask(self._upstreams, lease, exchange.method, exchange.path, headers, body, self._patience_s)
        try:
            said = await response.read(_MAX_BYTES, stall_s=self._patience_s)
        except UpstreamError as error:
            raise HopFailed(engine, error.kind, error.message) from error
        if response.status >= 400:  # an image that no engine can read: the prompt's engine says so
            IMAGES.labels("rejected").inc()
            return {}
        self._fleet.succeeded(engine)
        IMAGES.labels("done").inc()
        try:
            params = orjson.loads(said).get("ec_transfer_params")
        except (orjson.JSONDecodeError, AttributeError):
            params = None
        params = params if isinstance(params, dict) else {}
        self._encoded.keep(body, params, self._clock())
        return params
