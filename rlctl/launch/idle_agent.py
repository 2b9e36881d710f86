"""A stand-in for an agent of Ray's node: writes that its ports are not used, and waits for the end of the raylet.

A raylet starts two agents, of metrics and of runtime environments, and ends if they end or name no port. A private Ray
uses neither. The program imports the standard library alone: `python idle_agent.py SESSION_DIR NODE_ID PORT_NAME...`.
"""

import os
import sys
from pathlib import Path


def main(session: Path, node: str, names: list[str]) -> None:
    """Write the ports' files, then read until the raylet's end of the pipe is closed."""
    for name in names:
        part = session / f".{name}_{node}"
        # Ray's own minimal agent writes the same.
        part.write_text("-1")
        os.replace(part, session / f"{name}_{node}")
    sys.stdin.buffer.read()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3:])
