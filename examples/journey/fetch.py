"""Download a file: resumed where it broke off, used only if its SHA-256 matches. Used by station 1."""

import hashlib
import shutil
from http.client import HTTPException
from urllib.request import Request, urlopen


def matches(path, sha256):
    return path.exists() and hashlib.sha256(path.read_bytes()).hexdigest() == sha256


def append(url, part, bar):
    """Append the missing bytes to a partly downloaded file. Return whether it is complete."""
    have = part.stat().st_size
    with urlopen(Request(url, headers={"Range": f"bytes={have}-"} if have else {}), timeout=10) as answer:
        have = have if answer.status == 206 else 0  # 200: the server ignores the range and sends all of it
        length = answer.headers["Content-Length"]
        with part.open("ab" if have else "wb") as file:
            shutil.copyfileobj(bar.wrap_file(answer, int(length or 0), description=part.stem), file)
    return length is None or part.stat().st_size == have + int(length)


def download(url, sha256, path, bar):
    """Try as long as more of the file comes. Return whether it is there and matches."""
    part, before = path.with_name(f"{path.name}.part"), None
    if matches(path, sha256):
        return True
    part.touch()
    while not matches(part, sha256):
        if part.stat().st_size == before:
            return False
        before = part.stat().st_size
        try:
            complete = append(url, part, bar)
        except (OSError, HTTPException) as error:
            complete = getattr(error, "code", 0) == 416  # the server has no more bytes
            bar.print(f"{url}: {error}")
        if complete and not matches(part, sha256):
            bar.print(f"{url}: SHA-256 mismatch, discarded")
            part.write_bytes(b"")
    part.rename(path)
    return True
