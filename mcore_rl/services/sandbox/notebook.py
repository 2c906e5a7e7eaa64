"""A notebook inside a box: cells come on descriptor 3, and answers go to descriptor 4.

Cells and answers end with a zero byte. The names of one cell are there in the next. It runs inside
the sandbox, where programs may read it, and imports nothing of this package.
"""

import ast
import json
import linecache
import os
import sys
import traceback
import types

CELLS, ANSWERS = 3, 4


def serve() -> None:
    """Run cells until the caller closes the descriptor."""
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    sys.path[0] = os.getcwd()
    number = 0
    waiting = b""
    while True:
        while b"\0" not in waiting:
            try:
                chunk = os.read(CELLS, 1 << 16)
            except KeyboardInterrupt:  # sent for a cell that has just ended
                continue
            if not chunk:
                return
            waiting += chunk
        cell, _, waiting = waiting.partition(b"\0")
        number += 1
        error = run_cell(cell.decode(), f"<cell {number}>", main.__dict__)
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os.write(ANSWERS, json.dumps({"error": error}).encode() + b"\0")


def run_cell(source: str, name: str, variables: dict[str, object]) -> str:
    """Run a cell; print the value of its last expression. Return the name of its error, or ""."""
    lines = source.splitlines(keepends=True)
    linecache.cache[name] = (len(source), None, lines, name)
    try:
        tree = ast.parse(source, name)
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, name, "exec"), variables)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), name, "eval"), variables)
            if value is not None:
                print(repr(value))
    except BaseException as error:  # the cell's own, even SystemExit: the next cell follows
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
            trace = trace.tb_next
        traceback.print_exception(type(error), error, trace)
        return type(error).__name__
    return ""


if __name__ == "__main__":
    serve()
