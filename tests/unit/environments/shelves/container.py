"""Stand-in for the client of containers, in bubblewrap: `container.py IMAGES --volume=HOST:PLACE... IMAGE COMMAND...`.

IMAGES is a folder, and an image a folder in it, whose folders are those of a container besides the system's.
"""

import os
import sys
from pathlib import Path

SYSTEM = ("/usr", "/bin", "/lib", "/lib64")


def main(images: str, *words: str) -> None:
    volumes = [word.removeprefix("--volume=") for word in words if word.startswith("--volume=")]
    image, *command = words[len(volumes) :]
    places = ["bwrap", "--unshare-all", "--die-with-parent", "--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp"]
    for name in SYSTEM:
        places += ["--symlink", os.readlink(name), name] if os.path.islink(name) else ["--ro-bind", name, name]
    for folder in sorted(Path(images, image).iterdir()):
        places += ["--ro-bind", str(folder), f"/{folder.name}"]
    for volume in volumes:
        host, _, place = volume.partition(":")
        places += ["--bind", host, place]
    os.execvp("bwrap", [*places, *command])


if __name__ == "__main__":
    main(*sys.argv[1:])
