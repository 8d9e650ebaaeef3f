"""Whether what this process writes can be read by those who made a directory: files are their user's alone."""

import secrets
from pathlib import Path

from deepinfer_kvstore.errors import StoreConfigError


def owner_of(path: Path) -> int:
    """User id. Raises OSError."""
    return path.stat().st_uid


def require_same_owner(directory: Path) -> None:
    """By a new file, for what a file system makes of a user (a network's root is often nobody) only it knows.

    Raises:
        StoreConfigError: `directory` is another user's.
        OSError: it cannot be written.
    """
    probe = directory / f".owner-{secrets.token_hex(8)}"
    probe.touch(0o600)
    try:
        owner, own = owner_of(directory), owner_of(probe)
    finally:
        probe.unlink(missing_ok=True)
    if owner != own:
        raise StoreConfigError(
            f"{directory} belongs to user {owner}, whose engines cannot read what user {own} writes:"
            f" run this as user {owner}"
        )
