"""Interpreter of the tool `python`, which runs inside the sandbox with the standard library alone.

It reads one request a line, {"code": text, "most_bytes": number}. It runs the texts one after another in one namespace,
and answers each by one line, {"output": text, "is_cut": bool}.
"""

import ast
import code
import json
import os
import sys
import tempfile
import traceback
from typing import IO

# Name of the texts in tracebacks.
_NAME = "<python>"


def main() -> None:
    """Answer requests until the standard input ends."""
    requests = os.fdopen(os.dup(0), "r")
    replies = os.fdopen(os.dup(1), "w")
    own_pid = os.getpid()
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    with tempfile.TemporaryFile() as output:
        # Everything that a text or its children write goes into the file.
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
        interpreter = code.InteractiveInterpreter({"__name__": "__main__"})
        for line in requests:
            request = json.loads(line)
            output.seek(0)
            output.truncate()
            run_text(interpreter, request["code"])
            if os.getpid() != own_pid:
                # A child that the text forked, and that went on behind the text.
                os._exit(0)
            replies.write(json.dumps(read_output(output, request["most_bytes"])) + "\n")
            replies.flush()


def run_text(interpreter: code.InteractiveInterpreter, text: str) -> None:
    """Run a text. The value of a last expression is printed, as in a notebook."""
    try:
        statements = ast.parse(text, _NAME).body
    except (SyntaxError, ValueError):
        traceback.print_exc(limit=0)
        return
    last = statements.pop() if statements and isinstance(statements[-1], ast.Expr) else None
    try:
        compiled = compile(ast.Module(statements, []), _NAME, "exec")
        interpreter.runcode(compiled)
        if last is not None:
            interpreter.runcode(compile(ast.Interactive([last]), _NAME, "single"))
    except SystemExit as error:
        print(f"SystemExit: {error}")
    except (RecursionError, SyntaxError, ValueError):
        traceback.print_exc(limit=0)
    except KeyboardInterrupt:
        print("KeyboardInterrupt")
    for stream in (sys.stdout, sys.stderr):
        stream.flush()


def read_output(output: IO[bytes], most_bytes: int) -> dict[str, object]:
    """Return the text in the file, and True if the rest was cut."""
    output.seek(0)
    content = output.read(most_bytes + 1)
    output.seek(0, os.SEEK_END)
    return {"output": content[:most_bytes].decode(errors="replace"), "is_cut": len(content) > most_bytes}


if __name__ == "__main__":
    main()
