"""Files that are there whole or not at all."""

from pathlib import Path


def write_whole(path: Path, content: str | bytes) -> None:
    """The file with this content, text as UTF-8; whoever looks meanwhile, or after a kill, finds the old one."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_bytes(content.encode("utf-8") if isinstance(content, str) else content)
    temporary.replace(path)
