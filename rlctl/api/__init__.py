"""The functions of `import rlctl`, for programs and notebooks."""

import os

_names_before = set(os.environ)
# The import sets environment variables for Ray. They are removed again, because the caller's process may use Ray in
# another way. The processes of runs set them themselves.
import rlctl.workers  # noqa: E402, F401

for _name in set(os.environ) - _names_before:
    del os.environ[_name]
