"""Dummy for an agent process of Ray: it reports that its ports are not used, and waits until the raylet ends.

A raylet starts two agents, one for metrics and one for runtime environments. It exits if an agent exits or reports no
port. A private Ray uses neither agent. The program imports only the standard library. Usage: `python idle_agent.py
SESSION_DIR NODE_ID PORT_NAME...`.
"""

import os
import sys
from pathlib import Path


def main(session: Path, node: str, names: list[str]) -> None:
    """Write one file per port name, then read stdin until the raylet closes the pipe."""
    for name in names:
        part = session / f".{name}_{node}"
        # -1 means that the port is not used. Ray's own minimal agent writes the same.
        part.write_text("-1")
        os.replace(part, session / f"{name}_{node}")
    sys.stdin.buffer.read()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3:])
