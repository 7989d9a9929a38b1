"""Runs a program elsewhere and writes what its calls and expressions gave: the end of the text that `remote` sends.

The text of jail/data.py stands before it in one file, so that values cross as plain data; nothing imports this file. A
program can forge what is written here, and gains nothing by it: it says what its functions returned, no more.
"""

# mypy: ignore-errors
# ruff: noqa: F821

import base64
import os
import sys
import types


def _plain(compute, limit):
    try:
        return encode(compute(), limit), None
    except NotData as fault:
        return None, f"not data: {fault}"
    except SystemExit:
        raise
    except BaseException as error:
        return None, f"{type(error).__name__}: {error}"[:1000]


def _run(payload):
    task = decode(base64.b64decode(payload), trusted=True)
    end, write, wait = ("error", "SystemExit"), os.write, sys.stdout.flush
    module = types.ModuleType(task["name"])
    sys.modules[task["name"]] = module
    names, values = module.__dict__, []
    try:
        exec(compile(task["code"], "<program>", "exec"), names)
        for function, call in task["calls"]:
            args, kwargs = decode(call, trusted=True)
            values.append(_plain(lambda f=function, a=args, k=kwargs: eval(f, names)(*a, **k), task["limit"]))
        for expression in task["expressions"]:
            values.append(_plain(lambda e=expression: eval(e, names), task["limit"]))
        end = ("end",)
    except SystemExit:
        end = ("exit",)
        raise
    except BaseException as error:
        end = ("error", type(error).__name__)
        raise
    finally:
        wait()
        record = encode((end, values), 1 << 30)
        report = f"\n{task['mark']}{base64.b64encode(record).decode()}\n".encode()
        while report:
            report = report[write(1, report) :]
