"""Tags of tenants, as headers and the index keep them."""

import hashlib


def tenant_tag(tenant: str) -> int:
    """The u32 by which a tenant's blocks are found again; 0 for no tenant. It accounts, it does not isolate."""
    if not tenant:
        return 0
    return int.from_bytes(hashlib.sha256(tenant.encode()).digest()[:4], "big") or 1
