"""Whether a directory is on a file system of another machine, where LMDB must not be: its maps and locks are local."""

import os
import re
from pathlib import Path

from deepinfer_kvstore.errors import StoreConfigError

NETWORK = frozenset(
    ["9p", "afs", "beegfs", "ceph", "cifs", "gfs2", "glusterfs", "gpfs", "lustre", "nfs", "nfs4", "ocfs2"]
    + ["orangefs", "panfs", "pvfs2", "smb3", "smbfs", "wekafs"]
)
LOCAL_FUSE = frozenset(["fuse.fuse-overlayfs", "fuse.ntfs-3g"])
"""FUSE is what 3FS and most object stores are mounted with, so other kinds count as network file systems."""


def file_system_type(path: Path, mounts: Path = Path("/proc/self/mountinfo")) -> str:
    """Name of the file system that `path`, or its nearest existing ancestor, is on; "" where the system cannot say."""
    try:
        lines = mounts.read_text(errors="surrogateescape").splitlines()
    except OSError:
        return ""
    place = os.path.realpath(path)
    best, kind = "", ""
    for line in lines:
        fields, _, rest = line.partition(" - ")
        point = re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), fields.split(" ")[4])
        # The last of equals hides those mounted before it.
        if len(point) >= len(best) and (place + "/").startswith(point.rstrip("/") + "/"):
            best, kind = point, rest.split(" ")[0]
    return kind


def is_network(kind: str) -> bool:
    """Whether the file system of this name lies on other machines."""
    return kind in NETWORK or (kind.startswith("fuse.") and kind not in LOCAL_FUSE)


def require_local(path: Path, mounts: Path = Path("/proc/self/mountinfo")) -> None:
    """Raises:
    StoreConfigError: `path` is on a network file system.
    """
    kind = file_system_type(path, mounts)
    if is_network(kind):
        raise StoreConfigError(
            f"index directory {path} is on a network file system ({kind}), where an index would be corrupted: "
            "set index_dir to a local disk"
        )
