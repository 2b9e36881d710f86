"""The child process of one `rlctl.train` or `rlctl.evaluate`: `python -m rlctl.cli.api_process DESCRIPTOR`.

The call comes as JSON on stdin. A child process makes it, because a run changes its process: signal handlers,
environment variables, Ray, and an immediate exit if Ray's head is lost. So the notebook or sweep that calls stays as it
was. Answers go to the file descriptor DESCRIPTOR, one line of JSON each:

- {"run": PATH} as soon as the run has a directory
- {"problems": [[where, key, what], ...]} for bad input
- {"failure": TEXT} for any other error
- {"results": [...]} of an evaluation
"""

import json
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rlctl.cli.output import BAD_INPUT, FAILED, INTERRUPTED, OK, ShownProgress, say, tell
from rlctl.config.errors import ConfigError, UserError, one_line
from rlctl.preflight.installation import missing_problem
from rlctl.run.run_dir import RunDir
from rlctl.utils.process import stop_with_parent

Answer = Callable[[dict[str, Any]], None]


def main() -> None:
    """Make the call, and end the process with the exit code that `rlctl train` or `rlctl eval` would have."""
    _end_with_parent()
    call = json.load(sys.stdin)
    with os.fdopen(int(sys.argv[1]), "w", encoding="utf-8") as answers:

        def answer(record: dict[str, Any]) -> None:
            print(json.dumps(record), file=answers, flush=True)

        code = _run_call(CALLS[call.pop("function")], call, answer)
    sys.stdout.flush()
    sys.stderr.flush()
    # A normal exit would only free every object of torch, transformers and Ray, which takes time.
    os._exit(code)


def _end_with_parent() -> None:
    """Ask the kernel for a SIGTERM to this process when its caller is gone. A run then saves and ends."""
    parent = os.getppid()
    stop_with_parent()
    # A caller that ended before the request sends no signal: the kernel has given this process another parent.
    if os.getppid() != parent:
        os._exit(INTERRUPTED)


def _run_call(function: Callable[..., int], arguments: dict[str, Any], answer: Answer) -> int:
    """Call the function and return its exit code. If it raises, answer with the error and return the error's code."""
    try:
        return function(answer, **arguments)
    except ConfigError as error:
        answer({"problems": [[problem.where, problem.key, problem.what] for problem in error.problems]})
        return BAD_INPUT
    except UserError as error:
        if error.exit_code == BAD_INPUT:
            answer({"problems": [["", "", str(error)]]})
        else:
            answer({"failure": str(error)})
        return error.exit_code
    except KeyboardInterrupt:
        return INTERRUPTED
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and (problem := missing_problem(error)):
            answer({"problems": [["", "", problem.what]]})
            return BAD_INPUT
        traceback.print_exc()
        answer({"failure": f"{type(error).__name__}: {one_line(error)}"})
        return FAILED


def _train(answer: Answer, recipe: str | None, overrides: list[str], resume: str | None) -> int:
    from rlctl.launch.assembly import launch_prepared
    from rlctl.launch.prepare import RunRequest, prepare
    from rlctl.launch.runtime import LocalRuntime

    def tell_directory(run_dir: RunDir) -> None:
        answer({"run": str(run_dir.path)})

    request = RunRequest(kind=None, recipe=recipe, overrides=overrides, resume=Path(resume) if resume else None)
    prepared = prepare(request, "planned", ShownProgress())
    return launch_prepared(prepared, LocalRuntime(), on_directory=tell_directory)


def _evaluate(answer: Answer, target: str, save_every: int, **options: Any) -> int:
    from rlctl.evaluation.evaluation_configs import make_evaluation

    to = options.pop("to")
    evaluation = make_evaluation(target, tell, to=Path(to) if to else None, **options)
    results = evaluation.run(save_every, lambda name, done, count: say(f"{name}: {done} of {count} tasks"))
    answer({"results": results})
    return OK


CALLS: dict[str, Callable[..., int]] = {"train": _train, "evaluate": _evaluate}

if __name__ == "__main__":
    main()
