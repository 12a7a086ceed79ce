"""Names that come and go in a store, and by how many bytes that changes what it occupies.

Everything here happens under the lock of the ledger: no name moves between the look at what it
stands for and the change.
"""

from __future__ import annotations

import errno
import os
from contextlib import suppress

from offload.block_file import BlockName
from offload.ledger import Account
from offload.store_scan import block_name, is_outdated_name, open_directory, parse_block_name
from offload.tier import StrangerFile

_PUBLISH_ATTEMPTS = 5


def rename_into_place(root: int, temporary: str, block: BlockName) -> tuple[int, int]:
    """Growth of the two-digit directory, and the bytes of a file that had the name before."""
    prefix, name = block_name(block)
    for _ in range(_PUBLISH_ATTEMPTS):
        made = True
        try:
            os.mkdir(prefix, 0o700, dir_fd=root)
        except FileExistsError:
            made = False
        try:
            folder = open_directory(prefix, root)
        except FileNotFoundError:
            continue
        try:
            before = 0 if made else directory_bytes(folder)
            replaced = file_bytes(name, folder)
            os.rename(temporary, name, src_dir_fd=root, dst_dir_fd=folder)
            grown = directory_bytes(folder) - before
        except FileNotFoundError:  # somebody dropped the directory just now
            continue
        finally:
            os.close(folder)
        return grown, replaced
    raise FileNotFoundError(errno.ENOENT, "the directory vanishes again and again", prefix)


def unlink_block(root: int, block: BlockName, account: Account) -> int:
    """Change in directory bytes: negative if the block was the last in its directory."""
    prefix, name = block_name(block)
    return unlink_in(root, prefix, name, account)


def unlink_in(root: int, prefix: str, name: str, account: Account) -> int:
    """The same for any file of the directory."""
    try:
        folder = open_directory(prefix, root)
    except FileNotFoundError:
        return 0
    try:
        num_bytes = file_bytes(name, folder)
        with suppress(FileNotFoundError):
            os.unlink(name, dir_fd=folder)
        account.release(num_bytes)
        folder_bytes = directory_bytes(folder)
    finally:
        os.close(folder)
    # Empty directories would add up to a page for each of the 256 prefixes.
    try:
        os.rmdir(prefix, dir_fd=root)
    except OSError:
        return 0
    account.release(folder_bytes)
    return -folder_bytes


def unlink_stranger(dir_fd: int, stranger: StrangerFile, account: Account) -> int:
    """Change in bytes. One that was used since the survey stays: its owner needs it."""
    prefix, name = stranger.name[:2], stranger.name
    if parse_block_name(prefix, name) is None and not is_outdated_name(prefix, name):
        raise OSError(errno.EINVAL, "no block file", name)
    try:
        root = open_directory(stranger.fingerprint, dir_fd)
    except FileNotFoundError:
        return -stranger.num_bytes
    try:
        status = os.stat(f"{prefix}/{name}", dir_fd=root, follow_symlinks=False)
        if status.st_mtime > stranger.mtime:
            return 0
        return unlink_in(root, prefix, name, account) - stranger.num_bytes
    except FileNotFoundError:
        return -stranger.num_bytes
    finally:
        os.close(root)


def directory_bytes(fd: int | None) -> int:
    """What a directory occupies; 0 if there is none."""
    return 0 if fd is None else os.fstat(fd).st_blocks * 512


def file_bytes(name: str, dir_fd: int) -> int:
    """What goes from the medium with this name; 0 if nothing does."""
    try:
        status = os.stat(name, dir_fd=dir_fd, follow_symlinks=False)
    except FileNotFoundError:
        return 0
    return status.st_blocks * 512 if status.st_nlink == 1 else 0
