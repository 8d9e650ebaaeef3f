"""Tags of tenants, as headers and the index keep them."""

import hashlib


def tenant_tag(tenant: str) -> int:
    """The u32 by which a tenant's blocks are found again; 0 for no tenant. It accounts, it does not isolate.

    Any text has one, half of a surrogate pair too: a client may have sent it.
    """
    if not tenant:
        return 0
    return int.from_bytes(hashlib.sha256(tenant.encode("utf-8", "surrogatepass")).digest()[:4], "big") or 1
