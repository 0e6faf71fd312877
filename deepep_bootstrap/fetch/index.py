"""Pages of package indexes (PEP 503 as HTML, PEP 691 as JSON): name, hash, size and withdrawal of each file.
One page a distribution is read, no file is downloaded.
"""

from __future__ import annotations

import base64
import json
import os
import re
import ssl
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from email.message import Message
from html.parser import HTMLParser
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urldefrag, urljoin, urlsplit, urlunsplit

from msgspec import Struct
from packaging.utils import canonicalize_name

from deepep_bootstrap.core import filetree
from deepep_bootstrap.core.errors import Problem, Trouble
from deepep_bootstrap.fetch.locations import Mirrors, is_address, remedy, shown
from deepep_bootstrap.fetch.pip import own_index, own_settings
from deepep_bootstrap.lock.model import OWN_INDEX, Wheel

ACCEPTED = "application/vnd.pypi.simple.v1+json, application/vnd.pypi.simple.v1+html;q=0.2, text/html;q=0.1"
SILENCE_SECONDS = 60.0
"""How long an index may say nothing."""
LONGEST_PAGE = 256 << 20
GONE = frozenset((404, 410))
DIGEST = re.compile(r"sha256=([0-9a-f]{64})")


class Offered(Struct, frozen=True):
    """One file of an index: its address, SRI hash ("" where the index gives none), size in bytes (0 where it does
    not say), and why it was withdrawn (None where it was not, "" where nobody says why)."""

    file: str
    url: str
    hash: str
    size: int
    yanked: str | None


class PackageIndex(Struct, frozen=True):
    """An index: its name, and its address or directory. `settings` are those of the caller's pip for the network."""

    name: str
    place: str
    settings: Mapping[str, str]

    @property
    def folder(self) -> Path | None:
        """The directory that serves this index, or None where a server does."""
        return None if is_address(self.place) else Path(self.place)

    @property
    def where(self) -> str:
        """The index for a message."""
        return f"index {self.name} ({shown(self.place)})"


def find_index(name: str, mirrors: Mirrors, settings: Mapping[str, str]) -> PackageIndex:
    """Return the index called `name`: a mirror's, the lock's, or for `pypi` the one that the caller's pip with
    `settings` asks. Raises Trouble where nothing says where it is."""
    place = mirrors.index(name)
    if not place and name != OWN_INDEX:
        remedy = f"a table [indexes.{name}] in the lock, or --mirror index:{name}=URL_OR_DIRECTORY"
        raise Trouble(Problem(f"index {name}", "nothing says where it is", try_=remedy))
    place = place or own_index(settings)
    if place.startswith("file://"):
        place = unquote(urlsplit(place).path)
    return PackageIndex(name, place.rstrip("/"), settings)


def offered(index: PackageIndex, name: str) -> dict[str, Offered]:
    """Return the files that a server offers of one distribution, by file name; none where it does not have it.
    Raises Trouble."""
    url = f"{index.place}/{canonicalize_name(name)}/"
    try:
        headers, final, data = _ask(index, url, "GET")
        is_json = headers.get_content_type().endswith("json")
        found = _from_json(data, final) if is_json else _from_page(data.decode(errors="replace"), final)
        return {each.file: each for each in found}
    except urllib.error.HTTPError as error:
        if error.code in GONE:
            return {}
        raise _silent(index, url, error) from None
    except (OSError, HTTPException, ValueError) as error:
        raise _silent(index, url, error) from None


def find_file(wheel: Wheel, place: Path) -> Path:
    """Return the file called like the wheel in a directory, flat or with a folder per distribution. Raises Trouble
    when it has none."""
    for folder in dict.fromkeys((place, place / wheel.name, place / canonicalize_name(wheel.name))):
        if (candidate := folder / wheel.file).is_file():
            return candidate
    raise Trouble(
        Problem(
            f"index {wheel.index} ({place})",
            "does not have a wheel of the lock",
            wanted=wheel.file,
            try_=remedy(str(place), ""),
        )
    )


def is_offered(wheel: Wheel, mirrors: Mirrors) -> bool:
    """Return whether the index of `wheel` answers and has a file of its name, whatever is in it. Never raises."""
    try:
        index = find_index(wheel.index, mirrors, own_settings())
        if index.folder:
            return find_file(wheel, index.folder).is_file()
        return wheel.file in offered(index, wheel.name)
    except Trouble:
        return False


def size_of(index: PackageIndex, url: str) -> int:
    """Return the size in bytes of a file of the index by asking for nothing but its head. Raises Trouble."""
    try:
        headers, _, _ = _ask(index, url, "HEAD")
        return int(headers["Content-Length"] or "")
    except (OSError, HTTPException, ValueError) as error:
        raise _silent(index, url, error) from None


def _silent(index: PackageIndex, url: str, error: Exception) -> Trouble:
    reason = (
        f"{error.code} {error.reason}"
        if isinstance(error, urllib.error.HTTPError)
        else str(getattr(error, "reason", error))
    )
    remedy = f"--mirror index:{index.name}=URL_OR_DIRECTORY"
    return Trouble(Problem(index.where, f"{shown(url)} cannot be read", reason, try_=remedy))


def _ask(index: PackageIndex, url: str, method: str) -> tuple[Message, str, bytes]:
    """Return headers, final address and content of a page."""
    with open_url(index, url, {"Accept": ACCEPTED if method == "GET" else "*/*"}, method) as answer:
        return answer.headers, answer.geturl(), answer.read(LONGEST_PAGE) if method == "GET" else b""


def open_url(index: PackageIndex, url: str, headers: Mapping[str, str], method: str = "GET") -> HTTPResponse:
    """Return the answer of a server to one request, to be read and closed. The account in the index's address is for
    its own host only. Raises OSError, HTTPException or ValueError."""
    own, parts = urlsplit(index.place), urlsplit(url)
    account, _, host = parts.netloc.rpartition("@")
    if not account and host == own.netloc.rpartition("@")[2]:
        account = own.netloc.rpartition("@")[0]
    if parts.scheme not in {"http", "https"}:
        raise ValueError(f"{parts.scheme}: is no address of a file on a server")
    plain = urlunsplit(parts._replace(netloc=host, fragment=""))
    words = {"User-Agent": "deepep-bootstrap", **headers}
    request = urllib.request.Request(plain, headers=words, method=method)  # noqa: S310 - the scheme was looked at
    if account:
        request.add_unredirected_header(
            "Authorization", f"Basic {base64.b64encode(unquote(account).encode()).decode()}"
        )
    answer: HTTPResponse = _opener(index.settings, host).open(request, timeout=SILENCE_SECONDS)
    return answer


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Follows as urllib does, but asks for a head again where a head was asked for: urllib before Python 3.13 would
    ask for the file."""

    def redirect_request(self, req: urllib.request.Request, *answer: Any, **more: Any) -> urllib.request.Request | None:
        request = super().redirect_request(req, *answer, **more)
        if request and req.get_method() == "HEAD":
            request.method = "HEAD"
        return request


def _opener(settings: Mapping[str, str], host: str) -> urllib.request.OpenerDirector:
    """Return what opens addresses with the proxy and the certificates of pip's settings, else those of the
    environment."""
    context = ssl.create_default_context(cafile=settings.get("cert") or os.environ.get("REQUESTS_CA_BUNDLE") or None)
    if client := settings.get("client-cert"):
        context.load_cert_chain(client)
    if (
        host in settings.get("trusted-host", "").split()
        or host.partition(":")[0] in settings.get("trusted-host", "").split()
    ):
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    proxy = settings.get("proxy")
    handlers = [urllib.request.ProxyHandler({"http": proxy, "https": proxy})] if proxy else []
    return urllib.request.build_opener(urllib.request.HTTPSHandler(context=context), _Redirects, *handlers)


def _from_json(data: bytes, base: str) -> Iterator[Offered]:
    try:
        document = json.loads(data)
    except RecursionError:
        raise ValueError("JSON that is nested too deeply") from None
    files = document.get("files", ()) if isinstance(document, dict) else ()
    for entry in files if isinstance(files, list) else ():
        if not isinstance(entry, dict) or not isinstance(entry.get("url"), str):
            continue
        hashes, yanked, size = entry.get("hashes"), entry.get("yanked", False), entry.get("size", 0)
        digest = str(hashes.get("sha256", "")) if isinstance(hashes, dict) else ""
        why = None if yanked is False or yanked is None else yanked if isinstance(yanked, str) else ""
        yield _offered(urljoin(base, entry["url"]), f"sha256={digest}", size if isinstance(size, int) else 0, why)


def _from_page(text: str, base: str) -> Iterator[Offered]:
    page = _Page()
    page.feed(text)
    for attributes in page.links:
        url, fragment = urldefrag(urljoin(base, attributes["href"] or ""))
        yield _offered(url, fragment, 0, (attributes["data-yanked"] or "") if "data-yanked" in attributes else None)


def _offered(url: str, digest: str, size: int, yanked: str | None) -> Offered:
    match = DIGEST.search(digest.lower())
    file = unquote(urlsplit(url).path.rpartition("/")[2])
    return Offered(file, url, filetree.sri(bytes.fromhex(match[1])) if match else "", size, yanked)


class _Page(HTMLParser):
    """Collects the links of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.links: list[dict[str, str | None]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "a" and dict(attrs).get("href"):
            self.links.append(dict(attrs))
