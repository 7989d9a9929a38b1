"""Runs test code without the candidate, inside the sandbox: the text of this file is the program, nothing imports it.

The candidate's functions are stand-ins. A call of one is looked up among the answers given; a call that has none is put
on the list of wanted ones and gives `_Pending`, a value on which every operation ends the statement. So one run gathers
all calls that do not depend on each other; the judge has them answered and runs the test code again, until nothing
is wanted: then every assert has been decided on plain data.
"""
# mypy: disallow_untyped_defs=False

import builtins
import copy
import random
import sys
import types


class _Unanswered(BaseException):
    """A statement needs a value that is still wanted."""


class _Pending:
    """Stands for an unknown value."""

    __slots__ = ()


def _unanswered(*args, **kwargs):
    raise _Unanswered


_OPERATIONS = """
    eq ne lt le gt ge hash bool len iter next reversed contains getitem setitem delitem call getattr enter index int
    float complex str repr bytes format abs neg pos invert round trunc floor ceil add radd iadd sub rsub isub mul rmul
    imul truediv rtruediv floordiv rfloordiv mod rmod divmod rdivmod pow rpow matmul lshift rshift and rand iand or ror
    ior xor rxor ixor
"""
for _name in _OPERATIONS.split():
    setattr(_Pending, f"__{_name}__", _unanswered)


class _CandidateError(Exception):
    """An exception of a class that is not built in."""


class _Run:
    """`answers`: key of a call -> (value, error or None) of its first, second, ... occurrence."""

    def __init__(self, answers):
        self.answers = answers
        self.occurrences = {}
        self.wanted = []
        self.passed = 0
        self.failed = 0
        self.first = ""

    def call(self, name, args, kwargs):
        if _has_pending(args) or _has_pending(kwargs):
            raise _Unanswered
        key = f"{name} {_canonical(args)} {_canonical(kwargs)}"
        number = self.occurrences.get(key, 0)
        self.occurrences[key] = number + 1
        known = self.answers.get(key, ())
        if number >= len(known):
            self.wanted.append((key, name, copy.deepcopy(args), copy.deepcopy(kwargs)))
            return _Pending()
        value, error = known[number]
        if error is not None:
            raise _exception(error)
        return value

    def passes(self):
        self.passed += 1

    def fails(self, reason):
        self.failed += 1
        self.first = self.first or reason[:200]

    def note(self, error, text, decides):
        """What became of a statement. `decides`: it is an assert outside of any try, so that an error decides it."""
        if isinstance(error, _Unanswered):
            return
        if isinstance(error, AssertionError):
            if not self.wanted:
                self.fails(text)
        elif decides and isinstance(error, Exception):
            if not self.wanted:
                self.fails(f"{text}: {type(error).__name__}: {error}")
        else:
            raise error


def _has_pending(value):
    if isinstance(value, dict):
        return any(map(_has_pending, value.values()))
    return isinstance(value, _Pending) or (isinstance(value, (list, tuple)) and any(map(_has_pending, value)))


def _canonical(value):
    """A text that is the same in every run: the order of a set is not."""
    if isinstance(value, (list, tuple)):
        return f"{type(value).__name__}({','.join(map(_canonical, value))})"
    if isinstance(value, (set, frozenset)):
        return f"{type(value).__name__}({','.join(sorted(map(_canonical, value)))})"
    if isinstance(value, dict):
        return f"dict({','.join(f'{_canonical(k)}:{_canonical(v)}' for k, v in value.items())})"
    return repr(value)


def _exception(error):
    name, _, message = error.partition(":")
    kind = getattr(builtins, name, None)
    if isinstance(kind, type) and issubclass(kind, Exception):
        try:
            return kind(message.strip())
        except TypeError:  # UnicodeDecodeError and its like take more than a message
            return kind.__base__(message.strip())
    return _CandidateError(error)


class _Raises:
    """pytest.raises, without pytest."""

    def __init__(self, run, kind, match=None):
        self.run, self.kind, self.match = run, kind, match

    def __enter__(self):
        return self

    def __exit__(self, kind, error, traceback):
        if self.run.wanted:
            return True
        if kind is None:
            self.run.fails(f"did not raise {self.kind}")
        elif not issubclass(kind, self.kind):
            self.run.fails(f"raised {kind.__name__}: {error}")
        elif self.match is not None and not __import__("re").search(self.match, str(error)):
            self.run.fails(f"{error} does not match {self.match}")
        else:
            self.run.passes()
        return True


class _Approx:
    """pytest.approx for numbers and lists of them, without pytest."""

    def __init__(self, expected, rel=None, abs=None):
        self.expected = expected
        self.rel, self.abs = (1e-6 if rel is None and abs is None else rel or 0.0), (1e-12 if abs is None else abs)

    def __eq__(self, got):
        return self._close(self.expected, got)

    def _close(self, expected, got):
        if isinstance(expected, (list, tuple)):
            return len(expected) == len(got) and all(map(self._close, expected, got))
        return expected == got or abs(expected - got) <= max(self.rel * abs(expected), self.abs)


def quintet_check(source, names, answers):
    """What is wanted, or what was decided. `broken`: the error of test code that fails by itself."""
    run = _Run(answers)
    random.seed(0)
    pytest = types.ModuleType("pytest")
    pytest.raises = lambda kind, match=None: _Raises(run, kind, match)
    pytest.approx = _Approx
    sys.modules["pytest"] = pytest
    namespace = {"__name__": "quintet_tests", "_quintet": run}
    for name in names:
        namespace[name] = lambda *args, _name=name, **kwargs: run.call(_name, args, kwargs)
    broken = None
    try:
        exec(compile(source, "<tests>", "exec"), namespace)
    except _Unanswered:
        pass
    except Exception as error:
        if not run.wanted:
            broken = f"{type(error).__name__}: {error}"
            run.fails(broken)
    return {
        "wanted": run.wanted, "passed": run.passed, "failed": run.failed, "first": run.first, "broken": broken,
    }  # fmt: skip
