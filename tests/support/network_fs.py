"""A network file system for tests: a FUSE mount of a folder that remembers names and attributes as NFS does.

Each mount is a host with a memory of its own. For `seconds` it answers from memory which names there are, which there
are not, and what they are like. A change that this mount makes in a folder makes it forget the names of that folder, as
an NFS client does when the folder's change attribute moves. Contents are asked for at every read: NFS asks when a file
is opened. Files that are unlinked while open keep an ugly name in their folder (NFS's "silly rename").

Faults: each file in the folder `faults` holds `OPERATION ERROR PATTERN`: as long as it is there, operations of this
mount on paths (relative, of the source or the target) that match fail. Every fault that was given is a line of
`faults/.given`.

It speaks the kernel's protocol (linux/fuse.h, version 7.31) itself, one request at a time, so that nothing has to be
installed. `python -m tests.support.network_fs SERVED MOUNT SECONDS FAULTS` as root mounts, prints `ready` and serves
until it is killed.
"""

from __future__ import annotations

import ctypes
import errno
import os
import queue
import stat
import struct
import sys
import threading
from collections import defaultdict
from contextlib import suppress
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

ROOT = 1  # FUSE_ROOT_ID
HEADER = struct.Struct("<IIQQIIIHH")
ANSWER = struct.Struct("<IiQ")
ATTRIBUTES = struct.Struct("<QQQQQQIIIIIIIIII")
FORGET, BATCH_FORGET, INTERRUPT, DESTROY = 2, 42, 36, 38
INVALIDATE_NAME = 3  # FUSE_NOTIFY_INVAL_ENTRY
DIRECT_IO = 1  # FOPEN_DIRECT_IO
WRITE_SIZE = 128 * 1024
MODE, USER, GROUP, SIZE, ATIME, MTIME, HANDLE = (1 << bit for bit in range(7))  # FATTR_MODE and so on

OPERATIONS = {
    1: "lookup", 3: "getattr", 4: "setattr", 5: "readlink", 6: "symlink", 8: "mknod", 9: "mkdir", 10: "unlink",
    11: "rmdir", 12: "rename", 13: "link", 14: "open", 15: "read", 16: "write", 17: "statfs", 18: "release",
    20: "fsync", 25: "flush", 26: "init", 27: "opendir", 28: "readdir", 29: "releasedir", 30: "fsyncdir", 35: "create",
    45: "rename2",
}  # fmt: skip
CHANGING = frozenset({"symlink", "mknod", "mkdir", "unlink", "rmdir", "rename", "rename2", "link", "create"})


def _key_of(found: os.stat_result) -> tuple[int, int]:
    return found.st_dev, found.st_ino


def names_of(data: bytes) -> list[str]:
    """Return the words of a request's tail, each ended by NUL."""
    return [os.fsdecode(word) for word in data.split(b"\0")[:-1]]


class Server:
    """Answers the requests of one mount. Nodes are numbered by what the served file system calls them, so that hard
    links are one file; a node keeps the last path by which it was found."""

    def __init__(self, served: str, device: int, seconds: float, faults: Path) -> None:
        self.served, self.device, self.faults = served, device, faults
        self.valid = (int(seconds), int(seconds % 1 * 1e9))
        self.paths: dict[int, str] = {ROOT: ""}
        self.numbers: dict[tuple[int, int], int] = {self._key(""): ROOT}
        self.known: defaultdict[int, set[str]] = defaultdict(set)
        self.handles: set[int] = set()
        self.lists: dict[int, list[str]] = {}
        self.silly: dict[tuple[int, int], str] = {}
        self.later: queue.Queue[bytes] = queue.Queue()
        threading.Thread(target=self._say_later, daemon=True).start()

    def serve(self) -> None:
        """Answer until the mount is gone."""
        while True:
            try:
                request = os.read(self.device, WRITE_SIZE + 4096)
            except OSError as error:
                if error.errno in (errno.ENOENT, errno.EINTR, errno.EAGAIN):
                    continue  # the request was taken back
                return
            _, code, unique, node, user, group, *_ = HEADER.unpack_from(request)
            if code in (FORGET, BATCH_FORGET, INTERRUPT):
                continue  # these get no answer
            if code == DESTROY:
                return
            name = OPERATIONS.get(code, "")
            body = request[HEADER.size :]
            failed, answer = 0, b""
            try:
                if not name:
                    raise OSError(errno.ENOSYS, "")
                answer = getattr(self, name)(node, body, (user, group))
            except OSError as error:
                failed = error.errno or errno.EIO
            whole = ANSWER.pack(ANSWER.size + len(answer), -failed, unique) + answer
            if name == "flush":
                self.later.put(whole)  # who closes a file that it made finds the names of its folder forgotten
            else:
                self._say(whole)
            if name in CHANGING:
                self._changed(node)

    # --- what is remembered ---------------------------------------------------------------------------------------

    def _say(self, message: bytes) -> None:
        with suppress(FileNotFoundError):  # who asked was interrupted, or the kernel had forgotten the name by itself
            os.write(self.device, message)

    def _say_later(self) -> None:
        while True:
            self._say(self.later.get())

    def _changed(self, folder: int) -> None:
        """Let the kernel forget the names of a folder. It waits there for whoever changes the folder right now, whose
        request is still to be answered: so another thread says it."""
        for name in self.known.pop(folder, ()):
            word = os.fsencode(name)
            body = struct.pack("<QII", folder, len(word), 0) + word + b"\0"
            self.later.put(ANSWER.pack(ANSWER.size + len(body), INVALIDATE_NAME, 0) + body)

    # --- paths ----------------------------------------------------------------------------------------------------

    def _real(self, path: str) -> str:
        return f"{self.served}/{path}" if path else self.served

    def _key(self, path: str) -> tuple[int, int]:
        return _key_of(os.lstat(self._real(path)))

    def _child(self, node: int, name: str) -> str:
        return f"{self._path(node)}/{name}".lstrip("/")

    def _path(self, node: int) -> str:
        """Return the path of a node; ESTALE where another file is there by now, or none."""
        path = self.paths[node]
        with suppress(OSError):
            if self.numbers.get(self._key(path)) == node:
                return path
        raise OSError(errno.ESTALE, path)

    def _node(self, path: str) -> int:
        key = self._key(path)
        node = self.numbers.setdefault(key, len(self.numbers) + 1)
        self.paths[node] = path
        return node

    def _check(self, operation: str, *paths: str) -> None:
        """Give the error that a test asked for."""
        for file in sorted(self.faults.glob("[!.]*")):
            try:
                wanted, error, pattern = file.read_text(encoding="utf-8").split()
            except (OSError, ValueError):
                continue  # it is being written or taken away
            if wanted == operation and any(fnmatch(path, pattern) for path in paths):
                with (self.faults / ".given").open("a", encoding="utf-8") as given:
                    given.write(f"{operation} {error} {' '.join(paths)}\n")
                raise OSError(getattr(errno, error), pattern)

    def _attributes(self, found: os.stat_result) -> bytes:
        times = (found.st_atime_ns, found.st_mtime_ns, found.st_ctime_ns)
        return ATTRIBUTES.pack(
            found.st_ino, found.st_size, found.st_blocks,
            *(time // 10**9 for time in times), *(time % 10**9 for time in times),
            found.st_mode, found.st_nlink, found.st_uid, found.st_gid, 0, 4096, 0,
        )  # fmt: skip

    def _entry(self, parent: int, path: str) -> bytes:
        seconds, rest = self.valid
        self.known[parent].add(os.path.basename(path))
        head = struct.pack("<QQQQII", self._node(path), 0, seconds, seconds, rest, rest)
        return head + self._attributes(os.lstat(self._real(path)))

    def _made(self, path: str, who: tuple[int, int]) -> None:
        os.lchown(self._real(path), *who)

    # --- requests: each returns the answer's body -----------------------------------------------------------------

    def init(self, _node: int, body: bytes, _who: Any) -> bytes:
        major, _, ahead, _ = struct.unpack_from("<IIII", body)
        big_writes = 1 << 5
        return struct.pack(
            "<IIIIHHIIHHI28x", major, 31, ahead, big_writes, 12, 10, WRITE_SIZE, 1, WRITE_SIZE // 4096, 0, 0
        )

    def lookup(self, node: int, body: bytes, _who: Any) -> bytes:
        path = self._child(node, names_of(body)[0])
        self._check("lookup", path)
        try:
            return self._entry(node, path)
        except FileNotFoundError:
            seconds, rest = self.valid
            self.known[node].add(os.path.basename(path))
            return struct.pack("<QQQQII", 0, 0, seconds, 0, rest, 0) + bytes(ATTRIBUTES.size)

    def _about(self, node: int, handle: int | None = None) -> bytes:
        found = os.fstat(handle) if handle in self.handles else os.lstat(self._real(self._path(node)))
        return struct.pack("<QII", self.valid[0], self.valid[1], 0) + self._attributes(found)

    def getattr(self, node: int, body: bytes, _who: Any) -> bytes:
        flags, _, handle = struct.unpack_from("<IIQ", body)
        self._check("getattr", self.paths[node])
        return self._about(node, handle if flags & 1 else None)

    def setattr(self, node: int, body: bytes, _who: Any) -> bytes:
        valid, _, handle, size, _, atime, mtime, _, anano, mnano, _, mode, _, user, group = struct.unpack_from(
            "<IIQQQQQQIIIIIII", body
        )
        path = self._path(node)
        self._check("setattr", path)
        real = self._real(path)
        now = os.lstat(real)
        if valid & SIZE:
            os.truncate(handle if valid & HANDLE and handle in self.handles else real, size)
        if valid & (USER | GROUP):
            os.lchown(real, user if valid & USER else -1, group if valid & GROUP else -1)
        if valid & MODE:
            os.chmod(real, stat.S_IMODE(mode))
        if valid & (ATIME | MTIME):
            times = (atime * 10**9 + anano, mtime * 10**9 + mnano)
            chosen = (times[0] if valid & ATIME else now.st_atime_ns, times[1] if valid & MTIME else now.st_mtime_ns)
            os.utime(real, ns=chosen, follow_symlinks=False)
        return self._about(node)

    def readlink(self, node: int, _body: bytes, _who: Any) -> bytes:
        path = self._path(node)
        self._check("readlink", path)
        return os.fsencode(os.readlink(self._real(path)))

    def symlink(self, node: int, body: bytes, who: tuple[int, int]) -> bytes:
        name, target = names_of(body)
        path = self._child(node, name)
        self._check("symlink", path)
        os.symlink(target, self._real(path))
        self._made(path, who)
        return self._entry(node, path)

    def mknod(self, node: int, body: bytes, who: tuple[int, int]) -> bytes:
        mode, device, umask, _ = struct.unpack_from("<IIII", body)
        path = self._child(node, names_of(body[16:])[0])
        os.mknod(self._real(path), mode & ~umask, device)
        self._made(path, who)
        return self._entry(node, path)

    def mkdir(self, node: int, body: bytes, who: tuple[int, int]) -> bytes:
        mode, umask = struct.unpack_from("<II", body)
        path = self._child(node, names_of(body[8:])[0])
        self._check("mkdir", path)
        os.mkdir(self._real(path))
        self._made(path, who)
        os.chmod(self._real(path), stat.S_IMODE(mode) & ~umask)
        return self._entry(node, path)

    def unlink(self, node: int, body: bytes, _who: Any) -> bytes:
        path = self._child(node, names_of(body)[0])
        self._check("unlink", path)
        key = self._key(path)
        if key in self.silly:
            raise OSError(errno.EBUSY, path)
        if key in map(_key_of, map(os.fstat, self.handles)):
            ugly = self._child(node, f".nfs{len(self.silly):012x}{key[1]:012x}")
            os.rename(self._real(path), self._real(ugly))
            self.silly[key] = self.paths[self.numbers[key]] = ugly
        else:
            os.unlink(self._real(path))
        return b""

    def rmdir(self, node: int, body: bytes, _who: Any) -> bytes:
        path = self._child(node, names_of(body)[0])
        self._check("rmdir", path)
        os.rmdir(self._real(path))
        return b""

    def _rename(self, node: int, target: int, names: list[str]) -> bytes:
        source, path = self._child(node, names[0]), self._child(target, names[1])
        self._check("rename", source, path)
        os.rename(self._real(source), self._real(path))
        moved = f"{source}/"
        for number, known in self.paths.items():
            if known == source or known.startswith(moved):
                self.paths[number] = path + known[len(source) :]
        if target != node:
            self._changed(target)
        return b""

    def rename(self, node: int, body: bytes, _who: Any) -> bytes:
        return self._rename(node, struct.unpack_from("<Q", body)[0], names_of(body[8:]))

    def rename2(self, node: int, body: bytes, _who: Any) -> bytes:
        target, flags, _ = struct.unpack_from("<QII", body)
        if flags:
            raise OSError(errno.EINVAL, "")  # as NFS
        return self._rename(node, target, names_of(body[16:]))

    def link(self, node: int, body: bytes, _who: Any) -> bytes:
        source = self._path(struct.unpack_from("<Q", body)[0])
        path = self._child(node, names_of(body[8:])[0])
        self._check("link", path)
        os.link(self._real(source), self._real(path), follow_symlinks=False)
        return self._entry(node, path)

    def _opened(self, descriptor: int) -> bytes:
        self.handles.add(descriptor)
        return struct.pack("<QII", descriptor, DIRECT_IO, 0)

    def create(self, node: int, body: bytes, who: tuple[int, int]) -> bytes:
        flags, mode, umask, _ = struct.unpack_from("<IIII", body)
        path = self._child(node, names_of(body[16:])[0])
        self._check("create", path)
        new = not os.path.lexists(self._real(path))
        descriptor = os.open(self._real(path), (flags & (os.O_ACCMODE | os.O_EXCL)) | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        if new:
            self._made(path, who)
            os.chmod(self._real(path), stat.S_IMODE(mode) & ~umask)
        return self._entry(node, path) + self._opened(descriptor)

    def open(self, node: int, body: bytes, _who: Any) -> bytes:
        flags = struct.unpack_from("<I", body)[0] & os.O_ACCMODE
        path = self._path(node)
        self._check("open", path)
        return self._opened(os.open(self._real(path), flags | os.O_NOFOLLOW))

    def read(self, node: int, body: bytes, _who: Any) -> bytes:
        handle, offset, size = struct.unpack_from("<QQI", body)
        self._check("read", self.paths[node])
        return os.pread(handle, size, offset)

    def write(self, node: int, body: bytes, _who: Any) -> bytes:
        handle, offset, size = struct.unpack_from("<QQI", body)
        self._check("write", self.paths[node])
        return struct.pack("<II", os.pwrite(handle, body[40 : 40 + size], offset), 0)

    def statfs(self, _node: int, _body: bytes, _who: Any) -> bytes:
        found = os.statvfs(self.served)
        counts = (found.f_blocks, found.f_bfree, found.f_bavail, found.f_files, found.f_ffree)
        return struct.pack("<QQQQQIIII24x", *counts, found.f_bsize, 255, found.f_frsize, 0)

    def release(self, _node: int, body: bytes, _who: Any) -> bytes:
        handle = struct.unpack_from("<Q", body)[0]
        key = _key_of(os.fstat(handle))
        os.close(handle)
        self.handles.discard(handle)
        self.lists.pop(handle, None)
        if key in self.silly and key not in map(_key_of, map(os.fstat, self.handles)):
            with suppress(FileNotFoundError):
                os.unlink(self._real(self.silly.pop(key)))
        return b""

    def flush(self, node: int, _body: bytes, _who: Any) -> bytes:
        self._check("close", self.paths[node])
        return b""

    def fsync(self, node: int, body: bytes, _who: Any) -> bytes:
        self._check("fsync", self.paths[node])
        os.fsync(struct.unpack_from("<Q", body)[0])
        return b""

    fsyncdir = fsync

    def opendir(self, node: int, _body: bytes, _who: Any) -> bytes:
        path = self._path(node)
        self._check("opendir", path)
        descriptor = os.open(self._real(path), os.O_RDONLY | os.O_DIRECTORY)
        self.handles.add(descriptor)
        return struct.pack("<QII", descriptor, 0, 0)

    def readdir(self, node: int, body: bytes, _who: Any) -> bytes:
        handle, offset, size = struct.unpack_from("<QQI", body)
        self._check("readdir", self.paths[node])
        out = b""
        if offset == 0 or handle not in self.lists:
            self.lists[handle] = [".", "..", *sorted(os.listdir(handle))]
        for position, name in enumerate(self.lists[handle][offset:], offset + 1):
            word = os.fsencode(name)
            line = struct.pack("<QQII", position + 2, position, len(word), 0) + word
            line += bytes(-len(line) % 8)
            if len(out) + len(line) > size:
                break
            out += line
        return out

    releasedir = release


def mount(served: str, target: str) -> int:
    """Mount a FUSE file system and return its device."""
    device = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
    mode = os.stat(served).st_mode
    options = f"fd={device},rootmode={mode:o},user_id=0,group_id=0,allow_other,default_permissions"
    libc = ctypes.CDLL(None, use_errno=True)
    # No set-user-ID programs and no devices (MS_NOSUID | MS_NODEV), as is usual on shared file systems.
    if libc.mount(b"network_fs", os.fsencode(target), b"fuse.network_fs", 2 | 4, options.encode()) != 0:
        raise OSError(ctypes.get_errno(), "mount", target)
    return device


def main(served: str, target: str, seconds: str, faults: str) -> None:
    """Mount and serve."""
    server = Server(served, mount(served, target), float(seconds), Path(faults))
    print("ready", flush=True)
    server.serve()


if __name__ == "__main__":
    main(*sys.argv[1:])
