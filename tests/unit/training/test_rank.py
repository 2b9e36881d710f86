"""The driver, and a trainer rank before its environment variables are set, import no slow module."""

import subprocess
import sys


def test_the_hosted_class_is_imported_without_torchs_compiler() -> None:
    """Importing torch's compiler takes 2.5 s and may initialize devices."""
    slow = ("torch._dynamo", "torch._inductor", "triton", "torch.distributed.checkpoint", "transformers")
    code = f"import sys, rlctl.training.trainer_worker; print([name for name in {slow} if name in sys.modules])"
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600, check=True)
    assert process.stdout == "[]\n"
