"""Ray's token, without which nobody uses a Ray. It rests in files that only their owner reads.

Programs on hosts use this module too, so it imports no Ray and changes no environment.
"""

import hashlib
import os
import secrets
from functools import cache
from pathlib import Path

from rlctl.utils.files import write_private

# Variables that Ray reads: the token itself, and its file.
TOKEN = "RAY_AUTH_TOKEN"
TOKEN_FILE = "RAY_AUTH_TOKEN_PATH"
_ON = {"RAY_AUTH_MODE": "token"}


def new_token() -> str:
    """Return a new token of 32 random bytes, as hexadecimal digits."""
    return secrets.token_hex(32)


@cache
def token_of_process() -> str:
    """Return the token of every private Ray of this process: Ray reads it once a process."""
    return new_token()


def write_token(path: Path, token: str) -> str:
    """Write a token to its file, over an earlier one, and return its digest."""
    path.unlink(missing_ok=True)
    write_private(path, token)
    return token_digest(token)


def read_token(path: Path) -> str:
    """Return the token of a file. Raises OSError, UnicodeDecodeError."""
    return path.read_text(encoding="utf-8").strip()


def token_here(path: Path) -> str:
    """Return the token of a file, or, as in a pod, of the environment."""
    return read_token(path) if path.is_file() else os.environ[TOKEN]


def token_environment(path: Path | str) -> dict[str, str]:
    """Return the environment by which a Ray program uses the token of a file."""
    return {**_ON, TOKEN_FILE: str(path)}


def use_token(path: str | None) -> None:
    """Have Ray in this process use the token of a file; None: that of the environment, as in a pod."""
    os.environ.update(token_environment(path) if path else _ON)
    if path:
        os.environ.pop(TOKEN, None)


def token_digest(token: str) -> str:
    """Return the SHA-256 by which a token is recognized."""
    return hashlib.sha256(token.encode()).hexdigest()
