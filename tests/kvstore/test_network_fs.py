"""Which file system a directory is on."""

from pathlib import Path

import pytest

from deepinfer_kvstore.errors import StoreConfigError
from deepinfer_kvstore.network_fs import file_system_type, is_network, require_local

MOUNTS = r"""21 1 252:0 / / rw,relatime shared:1 - ext4 /dev/vda rw
22 21 0:21 / /mnt/nfs rw shared:2 master:1 - nfs4 host:/export rw
23 22 0:22 / /mnt/nfs/local rw - xfs /dev/vdb rw
24 21 0:23 / /mnt/with\040space rw - fuse.hf3fs hf3fs rw
25 21 0:24 / /mnt/twice rw - nfs host:/old rw
26 21 0:25 / /mnt/twice rw - tmpfs tmpfs rw
27 21 0:26 / /home rw - fuse.fuse-overlayfs overlay rw
"""


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/", "ext4"),
        ("/mnt", "ext4"),
        ("/mnt/nfs-not", "ext4"),
        ("/mnt/nfs", "nfs4"),
        ("/mnt/nfs/a/b", "nfs4"),
        ("/mnt/nfs/local/a", "xfs"),
        ("/mnt/with space/a", "fuse.hf3fs"),
        ("/mnt/twice", "tmpfs"),
        ("/home/a", "fuse.fuse-overlayfs"),
    ],
)
def test_the_innermost_and_last_mount_counts(tmp_path: Path, path: str, kind: str) -> None:
    mounts = tmp_path / "mountinfo"
    mounts.write_text(MOUNTS)
    assert file_system_type(Path(path), mounts) == kind
    if is_network(kind):
        with pytest.raises(StoreConfigError, match=r"is on a network file system .*: set index_dir to a local disk"):
            require_local(Path(path), mounts)
    else:
        require_local(Path(path), mounts)


def test_links_are_followed(tmp_path: Path) -> None:
    (tmp_path / "mountinfo").write_text(MOUNTS)
    (tmp_path / "link").symlink_to("/mnt/nfs")
    assert file_system_type(tmp_path / "link" / "index", tmp_path / "mountinfo") == "nfs4"


def test_where_the_system_cannot_say_it_is_taken_as_local(tmp_path: Path) -> None:
    require_local(tmp_path, tmp_path / "none")


@pytest.mark.parametrize(("kind", "network"), [("nfs", True), ("fuse.s3fs", True), ("fuseblk", False), ("ext4", False)])
def test_kinds(kind: str, network: bool) -> None:
    assert is_network(kind) is network


def test_here_it_has_a_name(tmp_path: Path) -> None:
    assert file_system_type(tmp_path)
