"""The ids of prefill engines that are fetched from by id: Mooncake's bootstrap server tells them."""

import orjson

from deepinfer_router.handover_mooncake import Mooncake, bootstrap_url
from deepinfer_router.http_client import Upstream, UpstreamError
from deepinfer_router.http_config import Timeouts
from deepinfer_router.target import Engine

_MAX_BYTES = 1 << 20
_ANSWER_S = 5.0


class Bootstrap:
    """Asks once for each life of an engine. The event loop's thread only."""

    def __init__(self, mooncake: Mooncake, port: int, timeouts: Timeouts) -> None:
        self._mooncake = mooncake
        self._port = port
        self._timeouts = timeouts

    async def learn(self, engine: Engine) -> None:
        """Know the ids of an engine's ranks. Raises UpstreamError: it does not tell."""
        url = bootstrap_url(engine, self._port)
        if all((url, target.rank) in self._mooncake.engine_ids for target in engine.targets):
            return
        upstream = Upstream(url, self._timeouts)
        try:
            response = await upstream.send(b"GET", b"/query", [], b"", first_byte_s=_ANSWER_S)
            said = orjson.loads(await response.read(_MAX_BYTES, stall_s=_ANSWER_S))
            ids = {(url, int(rank)): str(entry["engine_id"]) for rank, entry in said.items()}
        except (orjson.JSONDecodeError, AttributeError, KeyError, TypeError, ValueError) as error:
            raise UpstreamError("protocol", True, f"{url}/query: not a Mooncake bootstrap server's answer") from error
        finally:
            await upstream.close()
        self._mooncake.engine_ids.update(ids)
        missing = [target.rank for target in engine.targets if (url, target.rank) not in self._mooncake.engine_ids]
        if missing:
            raise UpstreamError("protocol", True, f"{url}/query knows {len(ids)} ranks, and not {missing}")

    def forget(self, engine: Engine) -> None:
        """Ask again: it may have been started anew."""
        url = bootstrap_url(engine, self._port)
        for key in [key for key in self._mooncake.engine_ids if key[0] == url]:
            del self._mooncake.engine_ids[key]
