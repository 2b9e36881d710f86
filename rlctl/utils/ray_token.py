"""Ray's authentication token, which every client of a Ray cluster needs. Its files are readable by their owner alone.

Helper programs on cluster hosts import this module too. So it does not import Ray, and an import changes no environment
variable.
"""

import hashlib
import os
import secrets
from functools import cache
from pathlib import Path

from rlctl.utils.files import write_private

# Environment variables that Ray reads: the token itself, and the path of its file.
TOKEN = "RAY_AUTH_TOKEN"
TOKEN_FILE = "RAY_AUTH_TOKEN_PATH"
_ON = {"RAY_AUTH_MODE": "token"}


def new_token() -> str:
    """Return a new token of 32 random bytes, as hexadecimal digits."""
    return secrets.token_hex(32)


@cache
def token_of_process() -> str:
    """Return the token of all local Rays that this process starts. It is one token, as Ray reads it once a process."""
    return new_token()


def write_token(path: Path, token: str) -> str:
    """Write a token to a private file, in place of an earlier one, and return its digest."""
    path.unlink(missing_ok=True)
    write_private(path, token)
    return token_digest(token)


def read_token(path: Path) -> str:
    """Return the token in a file. Raises OSError, UnicodeDecodeError."""
    return path.read_text(encoding="utf-8").strip()


def token_here(path: Path) -> str:
    """Return the token in a file. If there is no file, as in a pod, return that of the environment."""
    return read_token(path) if path.is_file() else os.environ[TOKEN]


def token_environment(path: Path | str) -> dict[str, str]:
    """Return environment variables that make a Ray program use the token in a file."""
    return {**_ON, TOKEN_FILE: str(path)}


def use_token(path: str | None) -> None:
    """Make Ray in this process use the token in a file. None: use that of the environment, as in a pod."""
    os.environ.update(token_environment(path) if path else _ON)
    if path:
        os.environ.pop(TOKEN, None)


def token_digest(token: str) -> str:
    """Return the SHA-256 of a token, by which programs compare tokens without showing them."""
    return hashlib.sha256(token.encode()).hexdigest()
