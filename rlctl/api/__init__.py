"""The functions of `import rlctl`, for programs and notebooks."""

import os

_names_before = set(os.environ)
# Its import sets variables for Ray. The caller's process may use Ray in another way; processes of runs set them anew.
import rlctl.workers  # noqa: E402, F401

for _name in set(os.environ) - _names_before:
    del os.environ[_name]
