"""Program that prints the probe's finding for each kind of sandbox, as the user that runs it: `kind: strengths`."""

from rlctl.sandbox.base import SandboxError
from rlctl.sandbox.open_sandbox import LOCAL_KINDS, open_sandbox
from rlctl.sandbox.probe import probe

for kind in LOCAL_KINDS:
    try:
        sandbox = open_sandbox(kind)
        print(f"{kind}: {probe(sandbox).describe()}")
    except SandboxError as error:
        print(f"{kind}: {error}")
