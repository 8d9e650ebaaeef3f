"""From what the operator gave to what the supervisor is started with, and what is said of it before."""

import asyncio
import pickle

from deepinfer_kvstore.errors import StoreConfigError
from deepinfer_kvstore.host_port import host_port
from deepinfer_router.boot import Boot
from deepinfer_router.config import RouterConfig
from deepinfer_router.config_source import ConfigSource, checked
from deepinfer_router.engine_costs import EngineCosts
from deepinfer_router.entry import Entry
from deepinfer_router.errors import RouterConfigError
from deepinfer_router.process_config import AdminConfig
from deepinfer_router.roles import Role


def prepare(source: ConfigSource) -> tuple[RouterConfig, Boot]:
    """The configuration, and what to start with it.

    Raises:
        RouterConfigError: it cannot work, or a file that it names cannot be used.
    """
    config = checked(source.read(), source.where)
    token = config.admin.token
    try:
        listen = host_port("listen", config.listen)
        admin = host_port("admin.listen", config.admin.listen) if config.admin.listen else None
    except StoreConfigError as error:
        raise RouterConfigError(f"{source.where}: {error}") from None
    try:
        asyncio.run(_try_out(config))
    except RouterConfigError as error:
        raise RouterConfigError(f"{source.where}: {error}") from None
    return config, Boot(
        config=pickle.dumps(config.model_copy(update={"admin": AdminConfig(listen=config.admin.listen)})),
        source=source.plain(),
        listen=listen,
        engines=config.plain_engines(),
        workers=config.process.workers,
        drain_s=config.process.drain_s,
        unready_s=config.process.unready_s,
        hung_s=config.process.hung_s,
        admin=admin,
        admin_token=token.get_secret_value() if token else None,
        autoscale=config.autoscale.model_dump(),
        discovery=config.discovery.model_dump(mode="json"),
    )


async def _try_out(config: RouterConfig) -> None:
    """Make once what each worker makes of files, keys and variables: what cannot be had is said before anything runs.

    Raises:
        RouterConfigError: something cannot.
    """
    http = config.http
    if http.tls:
        http.tls.context()
    if http.engine_tls.ca or http.engine_tls.certificate:
        http.engine_tls.context()
    EngineCosts.from_config(config.prefill)
    await Entry(config.entry, config.identity, config.store).close()


def summary(config: RouterConfig) -> str:
    """One line on what will run: nobody should learn from a request which mode a router is in."""
    counts = {role: sum(role in engine.roles for engine in config.engines) for role in Role}
    engines = ", ".join(f"{count} {role}" for role, count in counts.items() if count) or "none listed"
    split = any(Role.PREFILL not in engine.roles or Role.DECODE not in engine.roles for engine in config.engines)
    sources = [name for name, found in config.discovery if found]
    mode = "prefill and decode apart" if split else "each request on one engine"
    if sources and not split:
        mode = "each request on one engine, or apart where engines of one role are found"
    return (
        f"{len(config.engines)} engines ({engines}){', discovery by ' + ', '.join(sources) if sources else ''}; "
        f"{mode}; "
        f"{len(config.identity.keys) or 'no'} API keys; encoding by {config.entry.encoding}"
    )
