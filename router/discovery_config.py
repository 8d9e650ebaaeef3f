"""Where engines are found besides the list in the configuration."""

from pathlib import Path
from typing import Annotated

from deepinfer_router.roles import Role
from deepinfer_router.section import BaseModel, ConfigDict, Field

_Port = Annotated[int, Field(ge=1, le=65535)]


class _Found(BaseModel):
    """What is said of every engine that one source finds."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    roles: tuple[Role, ...] = Field(
        default=(Role.PREFILL, Role.DECODE), min_length=1, description="What these engines do: prefill, decode, encode."
    )
    models: tuple[str, ...] = Field(default=(), description="Names of models that they serve. Empty: any.")
    ranks: int = Field(default=1, ge=1, le=1024, description="Data-parallel ranks of each.")
    engine_class: str = Field(default="", description="Their class: engines of one cost the same.")
    scheme: str = Field(default="http", pattern="^https?$", description="http or https.")


class FileConfig(BaseModel):
    """A YAML or JSON file with a list of engines, as `engines` has them."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    path: Path = Field(description="The file. A change is taken up; a broken one is told of, and the old list stays.")
    poll_s: float = Field(default=2.0, gt=0, description="How often to look for a change.")


class DnsConfig(_Found):
    """A name whose addresses are engines: of a headless service, for example."""

    name: str = Field(min_length=1, description="Host name, or with `srv` the name of SRV records.")
    port: _Port = Field(default=8000, description="The engines' port. SRV records bring their own.")
    srv: bool = Field(default=False, description="Ask for SRV records. Needs the extra `dns`.")
    nameservers: tuple[str, ...] = Field(
        default=(), description="IP addresses, with :PORT if not 53, to ask for SRV records. Default: the system's."
    )
    interval_s: float = Field(default=10.0, gt=0, description="Between two look-ups.")


class KubernetesConfig(_Found):
    """A service whose EndpointSlices are watched."""

    service: str = Field(min_length=1, description="Name of the service.")
    namespace: str = Field(default="", description="Its namespace. Default: the pod's own.")
    port: _Port | str = Field(default="", description="Name or number of its port. Default: the first one.")
    api: str = Field(default="", description="URL of the API server. Default: where pods find it.")
    token_file: Path = Field(
        default=Path("/var/run/secrets/kubernetes.io/serviceaccount/token"), description="Bearer token, read anew."
    )
    ca_file: Path = Field(
        default=Path("/var/run/secrets/kubernetes.io/serviceaccount/ca.crt"), description="The API server's CA, PEM."
    )
    timeout_s: float = Field(default=300.0, gt=0, description="How long one watch lasts before it is begun again.")


class DiscoveryConfig(BaseModel):
    """Sources that are asked for as long as the router runs. Their engines are added to each other."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    file: FileConfig | None = Field(default=None, description="A file with a list of engines.")
    dns: tuple[DnsConfig, ...] = Field(default=(), description="Names to look up.")
    kubernetes: tuple[KubernetesConfig, ...] = Field(default=(), description="Services to watch.")

    @property
    def any(self) -> bool:
        """Whether there is any."""
        return bool(self.file or self.dns or self.kubernetes)
